"""fairseq's checkpoints. fairseq cannot be installed with the tests. The references are FSMT, its port with the same
names, and the NumPy restatement; subword-nmt and SentencePiece for the tokens.
"""

import re
import sys
from argparse import Namespace
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sacremoses
import sentencepiece
import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

from hf_vanilla_transformer.interop.fairseq import from_fairseq
from hf_vanilla_transformer.interop.vocabularies import PRETOKENIZED
from tests.interop.checkpoints import FFN, HEADS, D
from tests.interop.checkpoints.fairseq import (
    OPTIONS,
    PEER,
    restated,
    save,
    save_with_sections,
    weights,
    with_final_norms,
    write_dictionaries,
)
from tests.interop.conftest import Compare
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_fields,
    converted,
    installed,
    learnt_codes,
    train_sentencepiece,
)
from tests.model_helpers import error_of, randomise

PORT = f"its port `FSMTForConditionalGeneration`, {installed('transformers')}"


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gelu", "none"),
        ("gelu_accurate", "tanh"),
        ("gelu_fast", "tanh"),
    ],
)
def test_fairseq_activation_names_are_mapped(name: str, formula: str, model_file: Path) -> None:
    save(model_file, weights(9, 8), activation_fn=name)
    ours = from_fairseq(model_file).model
    x = torch.linspace(-3, 3, 50)
    actual = ours.model.encoder.layers[0].activation(x)
    torch.testing.assert_close(actual, torch.nn.functional.gelu(x, approximate=formula))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_fairseq_checkpoint_with_sections_gives_its_logits(nested, shared, tmp_path, compared):
    model = weights(23, 23 if shared else 29, shared)
    save_with_sections(tmp_path / "checkpoint_best.pt", model, nested)
    ours, tokenizer, _ = compared(PEER, "fairseq", tmp_path / "checkpoint_best.pt", restated(model))
    assert tokenizer is None
    assert_fields(ours.config, share_encoder_decoder_embeddings=shared, tie_word_embeddings=shared)
    assert_fields(
        ours.generation_config,
        num_beams=7,
        length_penalty=0.8,
        max_new_tokens=34,
    )


def test_fairseq_checkpoint_of_old_version_gives_its_logits(
    model_file: Path, compared: Compare
) -> None:
    """Names of version 0.6: fused projections, numbered LayerNorms, `embed_out`; learned positions."""
    model = weights(23, 29)
    old = {name: tensor for name, tensor in model.items() if "_float_tensor" not in name}
    for name in [name for name in old if ".q_proj." in name]:
        projections = [old.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        old[name.replace("q_proj.", "in_proj_")] = torch.cat(projections)
    numbers = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    }
    for name in list(old):
        stack, *rest = name.split(".")
        norm = rest[-2:][0]
        if norm in numbers[stack]:
            old[name.replace(norm, f"layer_norms.{numbers[stack].index(norm)}")] = old.pop(name)
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    tables = {
        f"{stack}.embed_positions.weight": torch.randn(12 + 2, D)
        for stack in ("encoder", "decoder")
    }
    save(model_file, old | tables, no_scale_embedding=True)
    stacks = {"source": "encoder", "target": "decoder"}

    def learned(index: int, side: str) -> np.ndarray:
        return tables[f"{stacks[side]}.embed_positions.weight"][index + 2].double().numpy()

    ours, _, _ = compared(
        PEER,
        "fairseq",
        model_file,
        restated(model, learned, scale=False),
    )
    assert_fields(ours.config, max_position_embeddings=12)


@torch.no_grad()
def test_fairseq_checkpoint_gives_logits_of_fsmt(model_file: Path, compared: Compare) -> None:
    config = FSMTConfig(
        d_model=D,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        src_vocab_size=23,
        tgt_vocab_size=29,
    )
    port = FSMTForConditionalGeneration(config)
    tables = {
        name: table.clone()
        for name, table in port.state_dict().items()
        if "embed_positions" in name
    }
    randomise(port).load_state_dict(tables, strict=False)
    model = {
        name.removeprefix("model."): weight
        for name, weight in port.state_dict().items()
        if name not in tables
    }
    save(model_file, model)
    compared(PORT, "fairseq", model_file, port.eval())


def test_fairseq_pre_norm_checkpoint_gives_its_logits(model_file: Path, compared: Compare) -> None:
    model = with_final_norms(weights(23, 29))
    save(model_file, model, encoder_normalize_before=True, decoder_normalize_before=True)
    ours, _, _ = compared(PEER, "fairseq", model_file, restated(model, pre_norm=True))
    assert_fields(ours.config, layer_norm_position="pre")


def test_fairseq_checkpoint_of_version_0_12_with_unused_tensors(
    model_file: Path, compared: Compare
) -> None:
    """Its encoder layers save copies of their weights for an inference kernel, zeros until they are used."""
    model = weights(23, 29)
    modules = [
        f"encoder.layers.{number}.{part}"
        for number in (0, 1)
        for part in ("in_proj", "out_proj", "fc1", "fc2")
    ]
    unused = {
        f"{module}_{kind}": torch.zeros(D) for module in modules for kind in ("weight", "bias")
    }
    save_with_sections(model_file, model | unused, nested=False)
    compared(PEER, "fairseq", model_file, restated(model))


def test_fairseq_checkpoint_of_version_0_9_with_meters(model_file, monkeypatch, compared):
    """It saves its objects that average the loss, of classes that are not installed here."""
    module: Any = ModuleType("fairseq.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        setattr(module, name, type(name, (), {"__module__": "fairseq.meters"}))
    monkeypatch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.meters", module)
    meter = module.AverageMeter()
    meter.sum = 10.0
    meters = OrderedDict(
        train_loss=meter,
        wall=module.TimeMeter(),
        train_wall=module.StopwatchMeter(),
    )
    model = weights(23, 29)
    content = {
        "args": Namespace(**OPTIONS),
        "model": model,
        "extra_state": {"train_meters": meters, "epoch": 3},
    }
    torch.save(content, model_file)
    monkeypatch.undo()
    compared(PEER, "fairseq", model_file, restated(model))


def ids_of(line: str, tokens: list[str]) -> list[int]:
    """`Dictionary.encode_line`: the special tokens come first, unknown tokens are 3, the end is 2."""
    ids = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *tokens])}
    return [ids.get(token, 3) for token in line.split()] + [2]


def test_fairseq_tokenizer_for_tokenized_text(model_file: Path, tmp_path: Path) -> None:
    sides = {"en": ["a", "do@@", "g", "runs", "."], "de": ["ein", "Hu@@", "nd", "läuft"]}
    write_dictionaries(tmp_path / "bin", sides)
    save(model_file, weights(9, 8))
    _, tokenizer, target = converted(
        "fairseq", model_file, tmp_path / "ours", data=tmp_path / "bin"
    )
    lines = ["a do@@ g runs .", "  a\tcat </s> runs", ""]
    assert tokenizer(lines)["input_ids"] == [ids_of(line, sides["en"]) for line in lines]
    assert PRETOKENIZED in from_fairseq(model_file, data=tmp_path / "bin").notes
    assert target("ein Hu@@ nd läuft")["input_ids"] == ids_of("ein Hu@@ nd läuft", sides["de"])
    # as --remove-bpe
    assert target.batch_decode([[2, 4, 5, 6, 7, 2, 1], [5, 2], [2]], skip_special_tokens=True) == [
        "ein Hund läuft",
        "Hu",
        "",
    ]


def test_fairseq_dictionary_lines_that_overwrite(model_file: Path, tmp_path: Path) -> None:
    """As of CamemBERT: a token that is there already gets another id. `<s>` too, while the start keeps its own."""
    for language, lines in (("en", "ein 9\nHund 7\nein 4091"), ("de", "a 2\n<s> 3")):
        (tmp_path / f"dict.{language}.txt").write_text(f"{lines} #fairseq:overwrite\n")
    save(model_file, weights(7, 6))
    _, tokenizer, target = converted("fairseq", model_file, tmp_path / "ours")
    assert tokenizer("ein Hund")["input_ids"] == [6, 5, 2]
    assert tokenizer.decode([6, 5, 2], skip_special_tokens=True) == "ein Hund"
    assert target("a <s>")["input_ids"] == [4, 5, 2]
    assert target.decode([0, 4, 5, 2], skip_special_tokens=True) == "a <s>"


@pytest.mark.parametrize("tool", ["subword-nmt", "fastBPE"])
def test_fairseq_tokenizer_for_raw_text_with_byte_pair_codes(
    tool, model_file, tmp_path, record_property
):
    tokenizer_of_moses = sacremoses.MosesTokenizer("en")
    moses = partial(tokenizer_of_moses.tokenize, aggressive_dash_splits=True, return_str=True)
    tokenised = [*map(moses, SOURCES)]
    codes = tmp_path / "codes"
    bpe = learnt_codes(codes, [*tokenised, *TARGETS])
    pieces = sorted({piece for line in tokenised[:2] for piece in bpe.process_line(line).split()})
    target_pieces = sorted({piece for line in TARGETS for piece in bpe.process_line(line).split()})
    if tool == "fastBPE":  # no header, and a count in each line
        lines = codes.read_text().splitlines()[1:]
        codes.write_text("".join(f"{line} 5\n" for line in lines))
    write_dictionaries(tmp_path, {"en": pieces, "de": target_pieces})
    save(model_file, weights(len(pieces) + 4, len(target_pieces) + 4))
    _, tokenizer, target = converted("fairseq", model_file, tmp_path / "ours", codes=codes)
    texts = [
        "two dogs run in the snow, and a cat doesn't!",
        "thirty-four children sleep.",
        *SOURCES[:2],
    ]
    for text in texts:
        assert tokenizer(text)["input_ids"] == ids_of(bpe.process_line(moses(text)), pieces)
    written = ids_of(bpe.process_line("ein Hund läuft im Schnee ."), target_pieces)
    assert target.decode([2, *written], skip_special_tokens=True) == "ein Hund läuft im Schnee."
    for peer in ("sacremoses", "subword-nmt"):
        record_property("tokens", installed(peer))


def test_fairseq_tokenizer_for_raw_text_with_sentencepiece(
    model_file: Path, tmp_path: Path, record_property: Record
) -> None:
    spm = tmp_path / "spm.model"
    pieces = train_sentencepiece(spm, SOURCES + TARGETS)
    tokens = [piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>")][::-1]
    write_dictionaries(tmp_path, {"en": tokens[:-3], "de": tokens})
    save(model_file, weights(len(tokens) + 1, len(tokens) + 4))
    _, tokenizer, target = converted("fairseq", model_file, tmp_path / "ours", sentencepiece=spm)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    for text in [*SOURCES, "", "Žluťoučký dogs"]:
        line = " ".join(processor.encode(text, out_type=str))
        assert tokenizer(text)["input_ids"] == ids_of(line, tokens[:-3])
    for text in TARGETS:
        written = ids_of(" ".join(processor.encode(text, out_type=str)), tokens)
        assert target(text_target=text)["input_ids"] == written
        assert target.decode([2, *written], skip_special_tokens=True) == text
    record_property("tokens", installed("sentencepiece"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_normalize_before": True}, "--encoder-normalize-before=True"),
        ({"no_decoder_final_norm": True}, "--no-decoder-final-norm=True"),
        ({"layernorm_embedding": True}, "--layernorm-embedding"),
        ({"adaptive_softmax_cutoff": "1000,5000"}, "--adaptive-softmax-cutoff=1000,5000"),
        ({"no_token_positional_embeddings": True}, "positions"),
        ({"decoder_output_dim": 6}, "--decoder-output-dim=6"),
        ({"arch": "transformer_lm"}, "arch=transformer_lm"),
        ({"arch": "fconv_wmt_en_de"}, "arch=fconv_wmt_en_de"),
        ({"encoder_attention_heads": None}, "heads"),
        ({"activation_fn": "relu_squared"}, "activation_function='relu_squared'"),
        # these would pass silently, with other logits than fairseq's
        ({"arch": "transformer_unidirectional_iwslt_de_en"}, "arch=transformer_unidirectional"),
        ({"arch": "transformer_monotonic"}, "arch=transformer_monotonic"),
        ({"quant_noise_scalar": 0.5}, "--quant-noise-scalar=0.5"),
        ({"encoder_xformers_att_config": '{"name": "global"}'}, "--encoder-xformers-att-config"),
        ({"task": "translation_moe", "num_experts": 3}, "--num-experts=3"),
    ],
)
def test_fairseq_refuses_other_architectures(options, message, model_file, record_property):
    save(model_file, weights(9, 8), **options)
    assert message in error_of(from_fairseq, model_file)
    spelt = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    record_property("refused", ", ".join(spelt))


def test_fairseq_refuses_options_of_sections(model_file: Path) -> None:
    """`transformer` itself keeps them in sections: fairseq rounds the weights of such a model when it is used."""
    save_with_sections(model_file, weights(9, 8), nested=True)
    state = torch.load(model_file, weights_only=False)
    state["cfg"]["model"]["quant_noise"] = {"pq": 0.0, "pq_block_size": 8, "scalar": 0.5}
    torch.save(state, model_file)
    assert "--quant-noise-scalar=0.5" in error_of(from_fairseq, model_file)


def test_fairseq_refuses_inconsistent_files(model_file: Path, tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    save(model_file, weights(9, 8))
    assert "dict.SOURCE.txt" in error_of(from_fairseq, model_file, codes=codes)
    for letters, message in (
        ("a", r"dict\.en\.txt: 5 .* 9"),
        ("abcda", "'a' occurs twice"),
    ):
        write_dictionaries(tmp_path, {"en": [*letters], "de": [*"abcd"]})
        assert re.search(message, error_of(from_fairseq, model_file))
    write_dictionaries(tmp_path, {"en": [*"abcde"], "de": [*"abcd"]})
    codes.write_text("#version: 0.2\na b\nc\n")
    assert "line 2" in error_of(from_fairseq, model_file, codes=codes)
    assert "SentencePiece" in error_of(from_fairseq, model_file, sentencepiece=codes)
