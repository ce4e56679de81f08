"""`torch.compile` and `torch.export`: one graph without breaks, few compilations, the same numbers.

Nothing here needs a compiler but the tests that say so: a backend that runs each graph as it is, and counts it, shows
what is compiled and when.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import GenerationConfig, StaticCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import CompileConfig
from transformers.integrations.executorch import Seq2SeqLMExportableModule

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import (
    PAD,
    START,
    assert_near,
    assert_same_gradients,
    gradients,
    padded,
    sentences,
    tiny_model,
    translation_batch,
)

ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}  # compiling takes seconds for each
# Source and target lengths of batches: shorter and longer, equal to each other, equal to the batch size.
LENGTHS = [(7, 5), (9, 6), (4, 11), (12, 3), (6, 6), (3, 3), (30, 40)]

Model = VanillaTransformerForConditionalGeneration
Graphs = list[torch.fx.GraphModule]


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting_backend(differentiable: bool = False) -> tuple[Callable, Graphs]:
    """A backend for `torch.compile`, and the list of the graphs that it was given."""
    graphs: Graphs = []

    # a function, because `generate` copies its settings deeply, and a copied counter would count for itself
    def backend(
        graph: torch.fx.GraphModule,
        inputs: list[Tensor],
        **_: Any,
    ) -> Callable:
        graphs.append(graph)
        return aot_eager(graph, inputs) if differentiable else graph.forward

    return backend, graphs


def in_one_graph(model: Model, differentiable: bool = False) -> tuple[Any, Graphs]:
    """The compiled model, and the list of the graphs that it will have."""
    backend, graphs = counting_backend(differentiable)
    return torch.compile(model, fullgraph=True, backend=backend), graphs


def batch_of(source: int, target: int, size: int = 3) -> dict[str, Tensor]:
    """`size` sentences, the first as long as given and the others shorter by one token each."""
    sources, targets = ([max(1, length - i) for i in range(size)] for length in (source, target))
    return translation_batch(sources, targets, seed=source)


def batches() -> list[dict[str, Tensor]]:
    """Of all `LENGTHS`, and of two sizes."""
    return [batch_of(source, target, size=3 + i % 2) for i, (source, target) in enumerate(LENGTHS)]


def without_labels(model: Model, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = batch.pop("labels")
    return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}


# torch.compile


@pytest.mark.slow  # test_fixed_shape_loss.py compiles a forward pass, too
@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_layers": 2, "decoder_layers": 2},
        {"attn_implementation": "eager"},
        {
            "position_encoding_type": "learned",
            "lm_head_bias": True,
            "final_layer_norm": True,
        },
        {
            "position_encoding_type": "sinusoidal_split",
            "share_encoder_decoder_embeddings": False,
            "head_dim": 5,
        },
        {"layer_norm_position": "pre"},
    ],
)
@torch.no_grad()
def test_forward_is_one_graph_with_every_option(fields: dict[str, Any]) -> None:
    model = tiny_model(**ONE_LAYER | fields)
    compiled, graphs = in_one_graph(model)
    counts = []
    for batch in batches():
        inputs = without_labels(model, batch)
        assert_near(compiled(**inputs).logits, model(**inputs).logits)
        counts.append(len(graphs))
    # with the lengths of the first batch, and, once these have changed, for all lengths
    assert counts[0] == 1
    assert counts[-1] <= 2, counts


def assert_trains_alike(
    compiled: Any,
    model: Model,
    batch: dict[str, Tensor],
    **settings: Any,
) -> None:
    """The same loss and the same gradients."""
    loss, expected = gradients(model, **batch, **settings)
    model.zero_grad()
    output = compiled(**batch, **settings)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_step_is_one_graph_for_all_lengths(attention: str) -> None:
    model = tiny_model(attn_implementation=attention, label_smoothing=0.1, **ONE_LAYER).train()
    compiled, graphs = in_one_graph(model, differentiable=True)
    for batch in batches():
        assert_trains_alike(compiled, model, batch, num_items_in_batch=torch.tensor(10))
    assert len(graphs) <= 2


@pytest.mark.slow
def test_training_in_bfloat16_with_dropout_is_one_graph() -> None:
    model = tiny_model(
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        label_smoothing=0.1,
        **ONE_LAYER,
    ).train()
    compiled, graphs = in_one_graph(model, differentiable=True)
    for source, target in LENGTHS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(**batch_of(source, target)).loss
        loss.backward()
        assert torch.isfinite(loss)
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    assert len(graphs) <= 2


def decode_step_by_step(
    step: Callable,
    model: Model,
    source: Tensor,
) -> tuple[Tensor, Tensor]:
    """Greedy decoding of 12 tokens with a static cache: the tokens, and the logits of every step but the first."""
    mask = source.ne(PAD).long()
    encoded = model.get_encoder()(source, mask)
    cache = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=16),
        StaticCache(config=model.config, max_cache_len=source.shape[1]),
    )
    written = [torch.full((len(source), 1), START)]
    logits = []
    for i in range(12):
        run = step if i else model
        output = run(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=written[-1],
            past_key_values=cache,
            use_cache=True,
        )
        written.append(output.logits[:, -1:].argmax(dim=-1))
        logits.append(output.logits)
    return torch.cat(written, dim=1), torch.cat(logits[1:], dim=1)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.10"), reason="older torch compiles a second graph"
)
@torch.no_grad()
@pytest.mark.slow
def test_decoding_with_a_static_cache_is_one_graph_for_all_steps() -> None:
    model = tiny_model(tie_word_embeddings=False)
    compiled, graphs = in_one_graph(model)
    for lengths in ([6, 3], [4, 6]):
        source = padded(sentences(lengths))
        expected, expected_logits = decode_step_by_step(model, model, source)
        actual, logits = decode_step_by_step(compiled, model, source)
        assert actual.tolist() == expected.tolist()
        assert_near(logits, expected_logits)
        assert len(graphs) == 1
    # equal to a decoder without a cache
    whole = model(input_ids=source, decoder_input_ids=actual[:, :-1], use_cache=False).logits
    assert_near(logits, whole[:, 1:])


@pytest.mark.slow
def test_generate_compiles_once_for_all_steps() -> None:
    # once more when the length of the source, and with it the cache of the cross-attention, has changed
    model = tiny_model(seed=2, tie_word_embeddings=False)
    backend, graphs = counting_backend()
    compilation = CompileConfig(fullgraph=True, backend=backend, mode="default")
    compilation._compile_all_devices = True
    settings = {"max_new_tokens": 15, "min_new_tokens": 15, "num_beams": 1}
    compiled = GenerationConfig(
        cache_implementation="static",
        compile_config=compilation,
        **settings,
    )
    counts = []
    for lengths in ([6, 3], [6, 6], [9, 2], [4, 4], [12, 5]):
        ids = padded(sentences(lengths))
        inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
        expected = model.generate(**inputs, **settings)
        assert model.generate(**inputs, generation_config=compiled).equal(expected)
        counts.append(len(graphs))
    assert counts[:2] == [1, 1]
    assert counts[-1] <= 2, counts


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor, torch's own compiler, needs a C++ compiler"
)
def test_inductor_equals_eager() -> None:
    model = tiny_model(label_smoothing=0.1, **ONE_LAYER)
    compiled = torch.compile(model, fullgraph=True)
    lengths = LENGTHS[:3]
    with torch.no_grad():
        for source, target in lengths:
            batch = batch_of(source, target)
            assert_near(
                compiled(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits
            )
    model.train()
    for source, target in lengths:
        assert_trains_alike(compiled, model, batch_of(source, target))


# torch.export


class Logits(nn.Module):
    """A translation model as torch.export needs it: tensors in, a tensor out."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
    ) -> Tensor:
        return self.model(input_ids, attention_mask, decoder_input_ids, use_cache=False).logits


def export_translator(model: Model) -> torch.export.ExportedProgram:
    sizes = (torch.export.Dim(name, min=2, max=512) for name in ("batch", "source", "target"))
    batch, source, target = sizes
    inputs = without_labels(model, batch_of(7, 5))
    return torch.export.export(
        Logits(model),
        tuple(inputs.values()),
        dynamic_shapes=(
            {0: batch, 1: source},
            {0: batch, 1: source},
            {0: batch, 1: target},
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {
            "attn_implementation": "eager",
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
        },
        {
            "position_encoding_type": "learned",
            "lm_head_bias": True,
            "final_layer_norm": True,
        },
    ],
)
@torch.no_grad()
def test_exported_translator_accepts_other_lengths(fields: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**fields)
    program = export_translator(model)
    file = tmp_path / "translator.pt2"
    torch.export.save(program, file)
    loaded = torch.export.load(file)
    for source, target in LENGTHS:
        inputs = without_labels(model, batch_of(source, target, size=5)).values()
        expected = model(*inputs).logits
        for each in (program, loaded):
            assert_near(
                each.module()(*inputs),
                expected,
                1e-5,
                f"lengths {source}, {target}",
            )


@pytest.mark.slow
def test_transformers_exporter_is_supported() -> None:
    # an encoder for every length, and one decoding step with a static cache
    model = tiny_model(seed=2, tie_word_embeddings=False)
    module = Seq2SeqLMExportableModule(
        model,
        batch_size=1,
        max_hidden_seq_length=64,
        max_cache_length=32,
    )
    exported = module.export()
    for length in (7, 4, 30):
        ids = torch.tensor(sentences([length]))
        (expected,) = model.generate(ids, num_beams=1, max_new_tokens=9).tolist()
        assert exported.generate(ids, 10) == expected
