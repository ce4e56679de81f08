"""The slots of the KV cache that beams share, the most probable tokens, and how often the host waits for a device."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer import search_vanilla_transformer as search
from hf_vanilla_transformer.decoding_vanilla_transformer import SLOTS, BeamCacheSlots, SlotCache
from hf_vanilla_transformer.engine import captured, optimize
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import topk_log_probs
from tests.pretended_gpu import counted, on_gpu
from tests.search_helpers import source, varied_model

# KV cache slots and candidates


@given(
    batch=st.integers(1, 3),
    beams=st.integers(1, 4),
    prefix=st.integers(0, 3),
    steps=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_beams_see_the_slots_of_their_own_past(
    batch: int, beams: int, prefix: int, steps: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    slots = BeamCacheSlots(batch, torch.device("cpu"))
    slots.show_all(prefix)
    slots.visible = slots.visible.repeat(1, beams, 1)
    first = {slot: ("prefix", slot) for slot in range(prefix)}
    written = [dict(first) for _ in range(batch)]  # the content of each slot
    pasts = [[set(first.values())] * beams for _ in range(batch)]
    most = prefix
    for step in range(steps):
        parents = torch.randint(beams, (batch, beams), generator=draw)
        taken = slots.append(parents).tolist()
        in_use = slots.visible.any(dim=1).sum(dim=1)
        most = max(most, int(in_use.max()))
        assert slots.visible.shape[:2] == (batch, beams)
        assert slots.visible.shape[2] <= max(prefix, most + SLOTS - 1)
        for b, parents_of in enumerate(parents.tolist()):
            assert len(set(taken[b])) == beams
            written[b] |= {slot: (step, k) for k, slot in enumerate(taken[b])}
            pasts[b] = [pasts[b][parent] | {(step, k)} for k, parent in enumerate(parents_of)]
            for visible, past in zip(slots.visible[b], pasts[b], strict=True):
                seen = visible.nonzero().flatten().tolist()
                assert {written[b][slot] for slot in seen} == past


def test_slot_cache_holds_what_it_was_given() -> None:
    def keys_and_values(length: int) -> list[torch.Tensor]:
        return [torch.randn(2, 4, length, width) for width in (6, 5)]  # (B, H, length, width)

    cache = SlotCache()
    prefix = keys_and_values(3)
    for held, states in zip(cache.update(*prefix, 0), prefix, strict=True):
        assert held.equal(states)
    cache.slots = torch.tensor([[3, 1], [30, 0]])
    cache.capacity = 32
    new = keys_and_values(2)
    both = cache.update(*new, 0)
    for held, old, states in zip(both, prefix, new, strict=True):
        assert held.shape[2] == 32
        for b, slots in enumerate(cache.slots):
            assert held[b, :, slots].equal(states[b])
        assert held[0, :, [0, 2]].equal(old[0, :, [0, 2]])


@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 40),
        (1, 1, 700),
        (5, 4, 16000),
        (2, 4, 20003),
        (1, 4, 16384),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_log_probs_are_those_of_log_softmax(shape, dtype, monkeypatch):
    # no ties, which bfloat16 would have among random numbers
    logits = torch.rand(shape).to(dtype)
    expected = logits.double().log_softmax(dim=-1).topk(8)
    for chunk in (1, 2**18):
        monkeypatch.setattr(search, "_CHUNK", chunk)
        values, tokens = topk_log_probs(logits, 8)
        assert (values - expected.values).abs().max() < 1e-5
        wanted = logits.gather(-1, expected.indices)
        assert logits.gather(-1, tokens).equal(wanted)
        scores, _ = topk_log_probs(logits, 8, normalize=False)
        assert scores.equal(logits.float().topk(8).values)


def test_topk_finds_what_stands_in_one_block_and_behind_all_blocks() -> None:
    highest = [64, 65, 66, 127, 128, 20000, 20001, 20002]
    # 20003 is no multiple of the block
    scores = torch.rand(2, 20003)
    scores[:, highest] += torch.arange(1, 9)
    scores[1] = -torch.inf  # as of a constraint that allows one token
    scores[1, 20002] = 0.0
    values, tokens = topk_log_probs(scores, 8, normalize=False)
    assert values.equal(scores.topk(8).values)
    assert sorted(tokens[0].tolist()) == highest
    assert tokens[1, 0] == 20002


# Host synchronisations


@pytest.mark.covering(1)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("decoder", ["module", "packed"])
def test_host_synchronisations_are_few(
    decoder: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        optimize, "not_optimizable", lambda model: None
    )  # its parameters are of another class
    monkeypatch.setattr(captured, "recorder_of", lambda device: None)
    model: Any = on_gpu(varied_model(end=-1e4))
    if decoder == "packed":
        optimize_for_inference(model)

    def waits(steps: int) -> int:
        with counted() as count:
            model.generate(**on_gpu(source([5, 3, 7])), num_beams=beams, max_new_tokens=steps)
        return count.waits.total()

    assert 0 < waits(48) - waits(16) <= (48 - 16) // 8
