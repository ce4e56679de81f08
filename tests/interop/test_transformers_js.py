"""The folder for transformers.js and optimum: its graphs in onnxruntime give our logits, attention and tokens.
(An export takes about ten seconds.)

Shapes: B batch, S source length, T target length, V target vocabulary.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interop.transformers_js import DTYPES, GRAPHS, write
from tests.interop.exports import CASES, Graphs, require_onnx, write_model
from tests.model_helpers import EOS, PAD, assert_near, error_of, padded, sentences

require_onnx()


class Exported(NamedTuple):
    """A tiny model, its folder for transformers.js, and the bytes of the graphs by dtype."""

    model: VanillaTransformerForConditionalGeneration
    folder: Path
    sizes: dict[str, int]


def write_folder(tmp_path: Path, dtypes: tuple[str, ...] = ("fp32",), **fields: Any) -> Exported:
    model = write_model(tmp_path / "model", **fields)
    sizes = write(model, tmp_path / "model", tmp_path / "out", dtypes)
    return Exported(model, tmp_path / "out", sizes)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """In every dtype, and so wide that its matrices are most of the files."""
    wide = {"d_model": 128, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    return write_folder(tmp_path_factory.mktemp("exported"), ("q8", "fp32", "fp16"), **wide)


# Each takes half a minute, so that pre-norm has the fields of "split", too.
CASES_OF_GRAPHS = {
    name: fields for name, fields in CASES.items() if name not in ("pre-norm", "split")
}
CASES_OF_GRAPHS["pre"] = CASES["split"] | {
    "layer_norm_position": "pre",
    "final_layer_norm": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES_OF_GRAPHS)
@torch.no_grad()
def test_graphs_give_our_logits_and_attention(case: str, tmp_path: Path) -> None:
    from onnx import checker

    fields = CASES_OF_GRAPHS[case]
    model, folder, _ = write_folder(tmp_path, **fields)
    graphs = Graphs(folder)
    for name in GRAPHS:
        checker.check_model(str(folder / "onnx" / f"{name}.onnx"))
    ids = torch.full((2, 4), 5)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]])
    assert graphs.all_logits(ids, mask, ids, 1).isfinite().all()  # also of a fully padded source
    for lengths, left in (([7, 3, 5], False), ([2, 9], True), ([1], False)):
        ids = padded(sentences(lengths, 320), left=left)
        target = padded(sentences([6] * len(lengths), 320, seed=1))
        mask = ids.ne(PAD).long()
        model.set_attn_implementation("eager")
        expected = model(
            input_ids=ids,
            attention_mask=mask,
            decoder_input_ids=target,
            output_attentions=True,
        )
        assert_near(
            graphs.all_logits(ids, mask, target, [1, 1, 3, 1]),
            expected.logits,
            1e-5,
            f"{case} {lengths}",
        )
        outputs = graphs.decode(target, mask, graphs.encode(ids, mask), {})
        hidden = ~mask.bool()[:, None, None]  # (B, 1, 1, S)
        for layer, weights in enumerate(expected.cross_attentions):
            scores = torch.from_numpy(outputs[f"cross_scores.{layer}"]).masked_fill(
                hidden, -torch.inf
            )
            assert_near(scores.softmax(dim=-1), weights, 1e-5, f"layer {layer}")


@pytest.mark.slow
@torch.no_grad()
def test_graph_ends_a_translation_where_generate_does(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    model.generation_config.max_length_over_source = 2
    write(model, tmp_path / "model", tmp_path / "out", ("fp32",))
    ids = padded(sentences([5, 3], 320))
    target = padded(sentences([9, 9], 320, seed=1))
    mask = ids.ne(PAD).long()
    logits = Graphs(tmp_path / "out").all_logits(
        ids, mask, target, [3] + [1] * (target.shape[1] - 3)
    )
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    for row, most in enumerate((mask.sum(dim=1) + 2).tolist()):  # tokens of the longest translation
        assert_near(logits[row, :most], expected[row, :most], 1e-5)
        assert set(logits[row, most:].argmax(dim=-1).tolist()) == {EOS}


@pytest.mark.slow
def test_other_dtypes_are_smaller_and_near(exported: Exported) -> None:
    model, folder, sizes = exported
    assert list(sizes) == ["q8", "fp32", "fp16"]
    assert sizes["q8"] < 0.4 * sizes["fp32"]
    assert sizes["fp16"] < 0.6 * sizes["fp32"]
    for dtype, size in sizes.items():
        assert size == sum(
            (folder / "onnx" / f"{name}{DTYPES[dtype]}.onnx").stat().st_size for name in GRAPHS
        )
    assert sizes["fp32"] < 1.1 * (
        4 * model.num_parameters() + 4 * 320 * 128 + 200_000
    )  # a tied matrix once a graph
    ids = padded(sentences([7, 3], 320))
    target = padded(sentences([6, 6], 320, seed=1))
    mask = ids.ne(PAD).long()
    exact = Graphs(folder).all_logits(ids, mask, target, [6])
    for dtype, tolerance in (("fp16", 0.01), ("q8", 0.15)):
        found = Graphs(folder, dtype).all_logits(ids, mask, target, [1, 5])
        assert (found - exact).abs().mean() < tolerance * exact.std(), dtype
    assert json.loads((folder / "config.json").read_text())["transformers.js_config"] == {
        "dtype": "q8"
    }


def test_setting_that_the_web_lacks_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    model.generation_config.update(no_repeat_ngram_size=3)
    assert "no_repeat_ngram_size=3" in error_of(write, model, tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
