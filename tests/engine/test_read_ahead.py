"""Sentences that are encoded while others are decoded. `LateStream` has their states only after the wait for them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer.decoding_vanilla_transformer import EncodedSource
from hf_vanilla_transformer.engine import captured, read_ahead
from hf_vanilla_transformer.engine.read_ahead import ReadAhead, Sentences
from hf_vanilla_transformer.inference import optimize_for_inference
from hf_vanilla_transformer.search_vanilla_transformer import BeamSearch, BeamState
from tests.engine.pretended_cuda import NO_END, narrow_model
from tests.engine.recorded_steps import LateStream, Recorder, recording
from tests.model_helpers import PAD, START, padded, sentences
from tests.pretended_gpu import counted, on_gpu
from tests.search_helpers import AS_DICT, batches, source, varied_model

LATER = [4, 9, 2, 6, 5, 3, 8, 1, 7, 4, 4, 2]  # sources of a `next_batch`


def encoded(numbers: list[int], width: int) -> Sentences:
    """Sentences of these numbers, each with its number as states and first token."""
    values = torch.tensor(numbers)
    states = values[:, None, None].repeat(1, width, 2).float()
    mask = torch.ones(len(numbers), width, dtype=torch.long)
    return EncodedSource(states, mask, 10 * mask), values[:, None]


def reader(
    widths: list[int],
    most: int,
    asked: list[int],
) -> ReadAhead:
    """Of sentences 0, 1, 2, …, read at most `most` at a time, whose sources have these widths."""
    waiting = list(range(len(widths)))

    def read(count: int) -> Sentences | None:
        asked.append(count)
        numbers = [waiting.pop(0) for _ in range(min(count, most, len(waiting)))]
        return encoded(numbers, max(widths[number] for number in numbers)) if numbers else None

    return ReadAhead(read, 4, LateStream())


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_sentences_keep_their_order_and_their_tokens(most: int) -> None:
    asked: list[int] = []
    widths = [6, 5, 5, 4, 3, 2, 2, 1]
    ahead = reader(widths, most, asked)
    found = []
    for count in (3, 1, 2, 4, 4, 4, 4, 4, 4):
        ahead.fill()
        taken = ahead.take(count)
        if taken is None:
            break
        sources, first_tokens = taken
        assert 0 < len(first_tokens) <= count
        for states, mask, first in zip(sources.states, sources.mask, first_tokens, strict=True):
            assert states[mask.bool()].eq(first).all()
            assert mask.sum() >= widths[first]
        found += first_tokens[:, 0].tolist()
    assert found == list(range(8))
    assert max(asked) <= 4


def test_batches_of_several_sizes_give_the_number_that_is_wanted() -> None:
    sizes = [[0], [1, 2, 3], [4, 5]]
    ahead = ReadAhead(lambda count: encoded(sizes.pop(0), 3) if sizes else None, 8, LateStream())
    for _ in range(3):
        ahead.fill()
    for wanted, numbers in ((5, [0, 1, 2, 3, 4]), (5, [5])):
        taken = ahead.take(wanted)
        assert taken is not None
        assert taken[1][:, 0].tolist() == numbers


def test_no_more_sentences_wait_than_the_search_has_rows() -> None:
    asked: list[int] = []
    ahead = reader([3] * 20, 100, asked)
    ahead.fill()
    ahead.fill()
    ahead.take(3)
    ahead.fill()
    assert asked == [4, 3]
    assert sum(len(first_tokens) for _, first_tokens in ahead.waiting) == 4


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"no_repeat_ngram_size": 2}], ids=["captured", "processors"]
)
def test_search_that_reads_ahead_finds_what_another_one_finds(
    beams: int, settings: dict[str, Any]
) -> None:
    def translate(asked: list[int]) -> Any:
        return optimize_for_inference(varied_model()).generate(
            **source([5, 3, 8, 6]),
            **settings,
            **AS_DICT,
            num_beams=beams,
            next_batch=batches(LATER, asked),
        )

    expected = translate([])
    asked: list[int] = []
    with recording(Recorder(), steps_at_once=3):
        found = translate(asked)
    assert asked[0] == 4, "a batch is read in the first step"
    assert found.sequences.equal(expected.sequences)
    if beams > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)


def test_prefixes_of_sentences_that_are_read_ahead_stay_with_them() -> None:
    later = sentences(LATER, 24, seed=9)

    def translate() -> list[list[int]]:
        waiting = [(row, [START, 5 + number]) for number, row in enumerate(later)]

        def next_batch(count: int) -> tuple[Tensor, ...] | None:
            some = waiting[:count]
            del waiting[:count]
            if not some:
                return None
            rows, prefixes = zip(*some, strict=True)
            ids = padded(list(rows))
            return ids, ids.ne(PAD).long(), torch.tensor(prefixes)

        found = optimize_for_inference(varied_model()).generate(
            **source([5, 3]),
            decoder_input_ids=torch.tensor([[START, 4], [START, 3]]),
            next_batch=next_batch,
            max_new_tokens=9,
        )
        return found.tolist()

    expected = translate()
    with recording(Recorder(), steps_at_once=2):
        assert translate() == expected
    prefixes = [row[1] for row in expected]
    assert prefixes == [4, 3, *range(5, 5 + len(later))]


def test_reading_ahead_fails_as_reading_does() -> None:
    with recording(Recorder()):
        model = optimize_for_inference(varied_model())
        too_many = tuple(source([3, 3, 3]).values())
        with pytest.raises(ValueError, match=r"next_batch: .* brought 3"):
            model.generate(**source([4, 2]), next_batch=lambda count: too_many)


class CountedStream:
    """A side stream of the pretended GPU, which runs everything at once."""

    def __init__(self) -> None:
        self.waits: list[int] = []  # and copies from the host, of each call of `run`

    def run(self, function: Callable[[], Any]) -> Any:
        with counted() as count:
            result = function()
        self.waits.append(sum((count.waits + count.copies).values()))
        return result

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        pass


@pytest.mark.usefixtures("eager_recorder")
def test_gpu_encodes_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is launched between the steps and the wait for them, and waits for nothing itself."""
    stream = CountedStream()
    monkeypatch.setattr(read_ahead, "side_stream_of", lambda device: stream)
    events: list[str] = []
    read_done = captured.CapturedDecoder.read_done

    def seen_read_done(self: captured.CapturedDecoder, state: BeamState) -> list[bool]:
        events.append("wait")
        return read_done(self, state)

    monkeypatch.setattr(captured.CapturedDecoder, "read_done", seen_read_done)
    model: Any = optimize_for_inference(on_gpu(narrow_model()))
    waiting = [tuple(on_gpu(source([4, 3])).values())]

    def next_batch(count: int) -> tuple[Tensor, ...] | None:
        events.append("read")
        return waiting.pop() if waiting else None

    with counted(), torch.no_grad():
        found = model.generate(
            **on_gpu(source([5, 4])),
            next_batch=next_batch,
            num_beams=2,
            max_new_tokens=16,
            eos_token_id=NO_END,
        )
    assert len(found) == 4
    assert events == ["read", "wait", "read", "wait"]
    assert stream.waits == [0, 0]


def test_cpu_reads_when_there_is_room() -> None:
    model = optimize_for_inference(varied_model())
    assert model.read_ahead(lambda count: None, 4) is None
    assert BeamSearch.meanwhile is None


@pytest.mark.parametrize(("device", "has_one"), [("cuda", True), ("cpu", False), ("mps", False)])
def test_streams_are_those_of_cuda(
    device: str, has_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "CudaSideStream", lambda device: device)
    stream = read_ahead.side_stream_of(torch.device(device))
    assert (stream == torch.device(device)) is has_one
