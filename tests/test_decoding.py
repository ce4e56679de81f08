"""Reading word by word: our own steps against the modules, and where the pasts of the beams stand."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import decoding_vanilla_transformer as decoding
from hf_vanilla_transformer import products_vanilla_transformer as products
from hf_vanilla_transformer.decoding_vanilla_transformer import (
    _MADE,
    BeamPlaces,
    ModuleReader,
    PlacedLayer,
    StepDecoder,
    StepReader,
    _neighbours,
    reader_for,
)
from hf_vanilla_transformer.products_vanilla_transformer import Product
from hf_vanilla_transformer.search_vanilla_transformer import likeliest
from tests.model_helpers import PAD, START, TYING_MODES, assert_near, padded, sentences, tiny_model

Translator = VanillaTransformerForConditionalGeneration

OPTIONS: list[dict[str, Any]] = [
    *({"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie} for share, tie in TYING_MODES),
    *({"position_encoding_type": kind} for kind in ("learned", "sinusoidal_split", "sinusoidal_fairseq")),
    {"activation_function": "silu", "lm_head_bias": True, "final_layer_norm": True},
    {"attention_bias": False, "scale_embedding": False, "layer_norm_eps": 1e-3},
    {"head_dim": 6, "value_head_dim": 10},
    {"decoder_attention_heads": 2, "decoder_ffn_dim": 20, "d_model": 36, "decoder_layers": 3},
    {"decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False},
]


def states(model: Translator, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """What the encoder makes of random sentences, and their mask."""
    ids = padded(sentences(lengths))
    mask = ids.ne(PAD).long()
    return model.get_encoder()(ids, mask).last_hidden_state, mask


def readers(model: Translator, lengths: list[int]) -> tuple[StepReader, ModuleReader]:
    """Both, of the same source; `eager` makes `reader_for` ask the modules."""
    source, mask = states(model, lengths)
    steps = reader_for(model, source, mask)
    model.config._attn_implementation = "eager"
    modules = reader_for(model, source, mask)
    model.config._attn_implementation = "sdpa"
    assert isinstance(steps, StepReader)
    assert isinstance(modules, ModuleReader)
    return steps, modules


def walk(reader: StepReader | ModuleReader, batch: int, beams: int, prefix: int, leave: bool = False) -> list[Tensor]:
    """The logits of a search whose words and parents are drawn at random; one sentence may leave it."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(4, 40, (batch, prefix), generator=draw)
    words[:, 0] = START
    places = BeamPlaces(batch, prefix, beams, words.device)
    logits = [reader.read_prefix(words, beams)]
    for step in range(8):
        if leave and step == 4:
            kept = torch.tensor([0, 2])
            reader.select(kept)
            places.select(kept)
            batch = 2
        parents = torch.randint(beams, (batch, beams), generator=draw)
        words = torch.randint(4, 40, (batch, beams), generator=draw)
        where = places.append(parents)
        logits.append(reader.read(words, where, places.seen, torch.full((batch,), prefix + step)))
    return logits


@pytest.mark.parametrize("fields", OPTIONS, ids=lambda fields: ",".join(fields))
def test_steps_are_what_the_modules_compute(fields: dict[str, Any]) -> None:
    with torch.no_grad():
        steps, modules = readers(tiny_model(3, **fields), [5, 2, 7])
        for ours, theirs in zip(walk(steps, 3, 4, 2, True), walk(modules, 3, 4, 2, True), strict=True):
            assert_near(ours, theirs)


@pytest.mark.parametrize("least", [0, 2**19])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prefix", [1, 4])
@pytest.mark.parametrize("lengths", [[4], [3, 3, 3], [1, 9, 4]])
@torch.no_grad()
def test_steps_in_batches_of_any_shape(
    beams: int, prefix: int, lengths: list[int], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_LEAST_LAID_OUT", least)
    steps, modules = readers(tiny_model(1), lengths)
    for ours, theirs in zip(
        walk(steps, len(lengths), beams, prefix), walk(modules, len(lengths), beams, prefix), strict=True
    ):
        assert_near(ours, theirs)


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[3, 9, 4, 7], [20, 2, 20, 31, 6, 6], [5, 2, 7]])
@torch.no_grad()
def test_neighbours_that_are_attended_to_together(
    lengths: list[int], beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(decoding, "_tile", lambda *args: 16)
    monkeypatch.setattr(decoding, "_neighbours", lambda *args: taken.append(_neighbours(*args)) or taken[-1])
    steps, modules = readers(tiny_model(1), lengths)
    leave = len(lengths) == 3
    ours, theirs = (walk(reader, len(lengths), beams, 3, leave) for reader in (steps, modules))
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other)
    assert max(taken) == (1 if beams == 1 else {4: 4, 6: 2, 3: 2}[len(lengths)])


@torch.no_grad()
def test_a_sentence_without_words_has_no_part_of_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_tile", lambda *args: 16)
    found = []
    for others in (1.0, 9.0):
        model = tiny_model(1)
        source, mask = others * torch.ones(4, 16, 32), torch.ones(4, 16)
        source[2], mask[2] = 1.0, 0
        found.append(walk(reader_for(model, source, mask), 4, 4, 1))
    for first, second in zip(*found, strict=True):
        assert_near(first[2], second[2], 1e-6)
        assert not first[1].equal(second[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1)])
@torch.no_grad()
def test_steps_in_other_precisions(dtype: torch.dtype, tolerance: float) -> None:
    steps, modules = readers(tiny_model(2).to(dtype), [5, 2, 7])
    for ours, theirs in zip(walk(steps, 3, 4, 1), walk(modules, 3, 4, 1), strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() < tolerance


@torch.no_grad()
def test_autocast_decides_the_precision_of_steps() -> None:
    model = tiny_model(2)
    source, mask = states(model, [5, 2])
    full = walk(reader_for(model, source, mask), 2, 3, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reader = reader_for(model, source, mask)
        half = walk(reader, 2, 3, 1)
    assert isinstance(reader, StepReader)
    for a, b in zip(full, half, strict=True):
        assert a.dtype == torch.float32
        assert b.dtype == torch.bfloat16
        assert (a - b).abs().max() < 0.1
    assert walk(reader_for(model, source, mask), 2, 3, 1)[-1].equal(full[-1])


# What is not ours alone is left to the modules


def hook(model: Translator) -> None:
    model.model.decoder.layers[1].fc1.register_forward_hook(lambda module, inputs, output: output)


def offload(model: Translator) -> None:
    model.lm_head.forward = model.lm_head.forward  # as accelerate does


def subclass(model: Translator) -> None:
    class Other(nn.Linear):
        pass

    model.model.decoder.layers[0].fc1.__class__ = Other


def adapt(model: Translator) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(adapter, model)


def parametrize(model: Translator) -> None:
    nn.utils.parametrize.register_parametrization(model.model.decoder.layers[0].fc2, "weight", nn.Identity())


@pytest.mark.parametrize("change", [hook, offload, subclass, adapt, parametrize, nn.Module.train])
@torch.no_grad()
def test_modules_are_asked_where_they_do_more(change: Callable[[Translator], Any]) -> None:
    model = tiny_model()
    source, mask = states(model, [3, 4])
    assert isinstance(reader_for(model, source, mask), StepReader)
    change(model)
    assert isinstance(reader_for(model, source, mask), ModuleReader)


# Weights may change between two calls


def in_place(model: Translator) -> None:
    model.model.decoder.layers[1].fc1.weight[3, 5] += 1.0


def behind_autograd(model: Translator) -> None:
    model.model.decoder.layers[0].cross_attn.v_proj.weight.data[1, 1] = 2.0


def rows_exchanged(model: Translator) -> None:
    weight = model.model.decoder.layers[0].fc2.weight
    weight.data.copy_(weight[torch.arange(len(weight) - 1, -1, -1)])


def another_parameter(model: Translator) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)


def a_bias(model: Translator) -> None:
    model.model.decoder.layers[0].fc2.bias.data[0] += 1.0


def another_norm(model: Translator) -> None:
    model.model.decoder.layers[0].final_layer_norm.weight.data *= 2


CHANGES = [in_place, behind_autograd, rows_exchanged, another_parameter, a_bias, another_norm]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_steps_have_the_weights_of_now(change: Callable[[Translator], None]) -> None:
    model = tiny_model()
    source, mask = states(model, [3, 4])
    before = walk(reader_for(model, source, mask), 2, 2, 1)
    change(model)
    steps, modules = readers(model, [3, 4])
    after = walk(steps, 2, 2, 1)
    assert not after[-1].allclose(before[-1], atol=1e-4)
    assert_near(after[-1], walk(modules, 2, 2, 1)[-1])


@torch.no_grad()
def test_weights_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny_model(), []
    original = Product.__init__
    monkeypatch.setattr(Product, "__init__", lambda self, *args: made.append(1) or original(self, *args))
    source, mask = states(model, [3])
    for _ in range(3):
        reader_for(model, source, mask)
    assert len(made) == 7 * 2 + 1
    reader_for(copy.deepcopy(model), source, mask)
    assert len(made) == 2 * (7 * 2 + 1)


@torch.no_grad()
def test_laid_out_weights_go_with_their_model() -> None:
    model = tiny_model()
    reader_for(model, *states(model, [3]))
    gone = weakref.ref(_MADE[model][StepDecoder][2])
    del model
    gc.collect()
    assert gone() is None


def test_model_is_saved_without_its_laid_out_weights(tmp_path: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        reader_for(model, *states(model, [3]))
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False).lm_head.weight.equal(model.lm_head.weight)


# Where the pasts stand


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_a_beam_sees_its_own_past(batch: int, beams: int, prefix: int, steps: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    places = BeamPlaces(batch, prefix, beams, torch.device("cpu"))
    written = [{i: ("prefix", i) for i in range(prefix)} for _ in range(batch)]  # what stands at each place
    pasts = [[set(written[b].values()) for _ in range(beams)] for b in range(batch)]
    for step in range(steps):
        parents = torch.randint(beams, (batch, beams), generator=draw)
        where = places.append(parents)
        for b in range(batch):
            assert len(set(where[b].tolist())) == beams
            for k, place in enumerate(where[b].tolist()):
                written[b][place] = (step, k)
            pasts[b] = [pasts[b][int(parents[b, k])] | {(step, k)} for k in range(beams)]
            for k in range(beams):
                assert {written[b][place] for place in places.seen[b, k].nonzero().flatten().tolist()} == pasts[b][k]
    assert places.seen.shape[2] <= prefix + beams * steps


def test_places_are_written_again() -> None:
    # All beams go on from the first one: one past is alive, and the K words of the last step.
    beams, steps = 8, 100
    places = BeamPlaces(2, 1, beams, torch.device("cpu"))
    for _ in range(steps):
        places.append(torch.zeros(2, beams, dtype=torch.long))
    assert places.seen.shape[2] <= 1 + steps + 2 * beams


@pytest.mark.parametrize("reader", [StepReader, ModuleReader])
@torch.no_grad()
def test_source_is_held_once_a_sentence(reader: type) -> None:
    model = tiny_model()
    found = readers(model, [5, 2, 7])[reader is ModuleReader]
    walk(found, 3, 6, 1)
    if isinstance(found, StepReader):
        held = [entries.shape[:2] for entries in found.source]
    else:
        held = [layer.keys.shape[:1] + layer.keys.shape[2:3] for layer in found.cache.cross_attention_cache.layers]
    assert held == [(3, 7)] * 2


def test_placed_layer_holds_what_it_was_given() -> None:
    layer = PlacedLayer()
    prefix = torch.randn(2, 4, 3, 6), torch.randn(2, 4, 3, 5)  # (B, H, P, width)
    for held, given_ in zip(layer.update(*prefix), prefix, strict=True):
        assert held.equal(given_)
    layer.places, layer.size = torch.tensor([[3, 1], [30, 0]]), 31
    new = torch.randn(2, 4, 2, 6), torch.randn(2, 4, 2, 5)
    for held, old, given_ in zip(layer.update(*new), prefix, new, strict=True):
        assert held.shape[2] == 31
        for b in range(2):
            for k in range(2):
                assert held[b, :, layer.places[b, k]].equal(given_[b, :, k])
        assert held[0, :, [0, 2]].equal(old[0, :, [0, 2]])
    kept = layer.keys[1:]
    layer.select(torch.tensor([1]))
    assert layer.keys.equal(kept)


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 1, 700), (5, 4, 16000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_words_have_the_highest_log_softmax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # no ties, which bfloat16 would have among random numbers
    logits = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = logits.double().log_softmax(dim=-1).topk(8)
    values, words = likeliest(logits, 8)
    assert (values - expected.values).abs().max() < 1e-5
    assert logits.gather(-1, words).equal(logits.gather(-1, expected.indices))
    assert likeliest(logits, 8, normalised=False)[0].equal(logits.float().topk(8).values)
