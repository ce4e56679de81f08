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
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable:
        graphs.append(graph)
        return aot_eager(graph, inputs) if differentiable else graph.forward

    return backend, graphs


def batch_of(source: int, target: int, size: int = 3) -> dict[str, Tensor]:
    """`size` sentences, the first as long as given and the others shorter by one token each."""
    sources, targets = ([max(1, length - i) for i in range(size)] for length in (source, target))
    return translation_batch(sources, targets, seed=source)


# torch.compile


def check_compiled_forward(model: VanillaTransformerForConditionalGeneration, **settings: Any) -> None:
    backend, graphs = counting_backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    counts = []
    for i, (source, target) in enumerate(LENGTHS):
        batch = batch_of(source, target, size=3 + i % 2)
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
        with torch.no_grad():
            expected, actual = model(**batch, **settings), compiled(**batch, **settings)
        assert_near(actual.logits, expected.logits, 1e-5, f"logits at {source}, {target}")
        counts.append(len(graphs))
    # with the lengths of the first batch, and, once these have changed, for all lengths
    assert counts[0] == 1
    assert counts[-1] <= 2, counts


@pytest.mark.slow  # test_fixed_shape_loss.py compiles a forward pass, too
@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_layers": 2, "decoder_layers": 2},
        {"attn_implementation": "eager"},
        {"position_encoding_type": "learned", "lm_head_bias": True, "final_layer_norm": True},
        {"position_encoding_type": "sinusoidal_split", "share_encoder_decoder_embeddings": False, "head_dim": 5},
        {"layer_norm_position": "pre"},
    ],
)
def test_forward_is_one_graph_with_every_option(fields: dict[str, Any]) -> None:
    check_compiled_forward(tiny_model(**ONE_LAYER | fields), use_cache=None)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_step_is_one_graph_for_all_lengths(attention: str) -> None:
    model = tiny_model(attn_implementation=attention, label_smoothing=0.1, **ONE_LAYER).train()
    backend, graphs = counting_backend(differentiable=True)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for i, (source, target) in enumerate(LENGTHS):
        batch = batch_of(source, target, size=3 + i % 2)
        loss, expected = gradients(model, **batch, num_items_in_batch=torch.tensor(10))
        model.zero_grad()
        output = compiled(**batch, num_items_in_batch=torch.tensor(10))
        output.loss.backward()
        assert output.loss.item() == pytest.approx(loss, rel=1e-5)
        assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)
    assert len(graphs) <= 2


@pytest.mark.slow
def test_training_in_bfloat16_with_dropout_is_one_graph() -> None:
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    model = tiny_model(**dropouts, label_smoothing=0.1, **ONE_LAYER).train()
    backend, graphs = counting_backend(differentiable=True)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for source, target in LENGTHS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(**batch_of(source, target)).loss
        loss.backward()
        assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert len(graphs) <= 2


def decode_step_by_step(
    step: Callable, model: VanillaTransformerForConditionalGeneration, source: Tensor, tokens: int, size: int
) -> tuple[Tensor, Tensor]:
    """Greedy decoding with a static cache: the tokens, and the logits of every step but the first."""
    mask = source.ne(PAD).long()
    encoded = model.get_encoder()(source, mask)
    caches = (StaticCache(config=model.config, max_cache_len=length) for length in (size, source.shape[1]))
    cache = EncoderDecoderCache(*caches)
    written, logits = [torch.full((len(source), 1), START)], []
    for i in range(tokens):
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


@pytest.mark.skipif(Version(torch.__version__) < Version("2.10"), reason="older torch compiles a second graph")
@torch.no_grad()
def test_decoding_with_a_static_cache_is_one_graph_for_all_steps() -> None:
    model = tiny_model(tie_word_embeddings=False)
    backend, graphs = counting_backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for lengths in ([6, 3], [4, 6]):
        source = padded(sentences(lengths))
        expected, expected_logits = decode_step_by_step(model, model, source, 12, size=16)
        actual, logits = decode_step_by_step(compiled, model, source, 12, size=16)
        assert actual.tolist() == expected.tolist()
        assert_near(logits, expected_logits)
        assert len(graphs) == 1
    # equal to a decoder without a cache
    whole = model(input_ids=source, decoder_input_ids=actual[:, :-1], use_cache=False).logits
    assert_near(logits, whole[:, 1:])


def generate_compiled(
    model: VanillaTransformerForConditionalGeneration, backend: Callable, inputs: dict[str, Tensor], **settings: Any
) -> Tensor:
    compilation = CompileConfig(fullgraph=True, backend=backend, mode="default")
    compilation._compile_all_devices = True
    config = GenerationConfig(cache_implementation="static", compile_config=compilation, **settings)
    return model.generate(**inputs, generation_config=config)


@pytest.mark.slow
def test_generate_compiles_once_for_all_steps() -> None:
    # once more when the length of the source, and with it the cache of the cross-attention, has changed
    model = tiny_model(seed=2, tie_word_embeddings=False)
    backend, graphs = counting_backend()
    counts = []
    for lengths in ([6, 3], [6, 6], [9, 2], [4, 4], [12, 5]):
        ids = padded(sentences(lengths))
        inputs = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
        settings = {"max_new_tokens": 15, "min_new_tokens": 15, "num_beams": 1}
        expected = model.generate(**inputs, **settings)
        assert generate_compiled(model, backend, inputs, **settings).tolist() == expected.tolist()
        counts.append(len(graphs))
    assert counts[:2] == [1, 1]
    assert counts[-1] <= 2, counts


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor, torch's own compiler, needs a C++ compiler")
def test_inductor_equals_eager() -> None:
    model = tiny_model(label_smoothing=0.1, encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(model, fullgraph=True)
    for source, target in LENGTHS[:3]:
        batch = batch_of(source, target)
        with torch.no_grad():
            assert_near(compiled(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)
    model.train()
    for source, target in LENGTHS[:3]:
        batch = batch_of(source, target)
        loss, expected = gradients(model, **batch)
        model.zero_grad()
        output = compiled(**batch)
        output.loss.backward()
        assert output.loss.item() == pytest.approx(loss, rel=1e-5)
        assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)


# torch.export


class Logits(nn.Module):
    """A translation model as torch.export needs it: tensors in, a tensor out."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask, decoder_input_ids, use_cache=False).logits


def sizes() -> tuple[Any, Any, Any]:
    """B, S and T, free."""
    return tuple(torch.export.Dim(name, min=2, max=512) for name in ("batch", "source", "target"))


def export_translator(model: VanillaTransformerForConditionalGeneration) -> torch.export.ExportedProgram:
    batch, source, target = sizes()
    first = batch_of(7, 5)
    inputs = (
        first["input_ids"],
        first["attention_mask"],
        model.prepare_decoder_input_ids_from_labels(first["labels"]),
    )
    shapes = ({0: batch, 1: source}, {0: batch, 1: source}, {0: batch, 1: target})
    return torch.export.export(Logits(model), inputs, dynamic_shapes=shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "eager", "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        {"position_encoding_type": "learned", "lm_head_bias": True, "final_layer_norm": True},
    ],
)
@torch.no_grad()
def test_exported_translator_accepts_other_lengths(fields: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**fields)
    exported_program = export_translator(model)
    torch.export.save(exported_program, tmp_path / "translator.pt2")
    loaded = torch.export.load(tmp_path / "translator.pt2").module()
    for source, target in LENGTHS:
        other = batch_of(source, target, size=5)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(other["labels"])
        inputs = other["input_ids"], other["attention_mask"], decoder_ids
        expected = model(*inputs).logits
        for exported in (exported_program.module(), loaded):
            assert_near(exported(*inputs), expected, 1e-5, f"lengths {source}, {target}")


@pytest.mark.slow
def test_transformers_exporter_is_supported() -> None:
    # an encoder for every length, and one decoding step with a static cache
    model = tiny_model(seed=2, tie_word_embeddings=False)
    exported = Seq2SeqLMExportableModule(model, batch_size=1, max_hidden_seq_length=64, max_cache_length=32).export()
    for length in (7, 4, 30):
        ids = torch.tensor(sentences([length]))
        expected = model.generate(ids, num_beams=1, max_new_tokens=9)[0].tolist()
        assert exported.generate(ids, 10) == expected
