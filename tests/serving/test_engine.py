"""Threads share a queue: every sentence is translated once, and neither errors nor leaving clients stop them."""

import re
import threading
import time
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.engine.continuous import ContinuousSearch, FoundHypothesis
from hf_vanilla_transformer.serving import engine as engine_module
from hf_vanilla_transformer.serving.engine import Engine, QueuedSentence, QueueFull
from tests.serving_helpers import CORPUS, echo_translator

LINES = [f"{line} {number}" for number in range(5) for line in CORPUS]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.fixture(scope="module")
def sources(translator: Translator) -> list[list[int]]:
    return [translator.encode(line, 1) for line in LINES]


def engine_of(translator: Translator, workers: int = 1, **settings: Any) -> Engine:
    return Engine(
        Translator(translator.model, translator.source_tokenizer, workers=workers),
        **settings,
    )


def submit_and_start(engine: Engine, sources: list[list[int]]) -> list[Future]:
    """Submit sentences and wait until all of them are in the batch."""
    futures = engine.submit(sources)
    while engine.waiting:
        time.sleep(0.01)
    return futures


def texts(translator: Translator, futures: list[Future]) -> list[str]:
    tokens = [future.result(timeout=60)[0].tokens for future in futures]
    return translator.target_tokenizer.batch_decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_engine_translates_like_the_translator(
    translator: Translator, sources: list[list[int]], workers: int
) -> None:
    engine = engine_of(translator, workers, batch_size=4, num_beams=2)
    futures = engine.submit(sources[:7]) + engine.submit(sources[7:])
    assert texts(translator, futures) == list(translator.translate(LINES, num_beams=2))
    engine.close()
    assert engine.translated == len(LINES)
    assert engine.waiting == engine.running == 0
    assert not any(thread.is_alive() for thread in engine._threads)


def test_full_queue_takes_all_of_a_request_or_nothing(translator, sources, held):
    engine = engine_of(translator, batch_size=1, max_queue=3)
    futures = submit_and_start(engine, sources[:1])
    futures += engine.submit(sources[1:3])
    with pytest.raises(QueueFull):
        engine.submit(sources[3:5])
    assert engine.waiting == 2
    futures += engine.submit(sources[3:4])
    held.set()
    assert texts(translator, futures) == list(translator.translate(LINES[:4]))
    engine.close()
    with pytest.raises(QueueFull):
        engine.submit(sources[:1])


def test_queue_takes_as_many_sentences_as_it_has_places(translator, sources, held):
    engine = engine_of(translator, batch_size=1, max_queue=3)
    with pytest.raises(QueueFull):
        engine.submit(sources[:4])
    running = submit_and_start(engine, sources[:1])
    assert engine.ready
    assert engine.alive
    assert engine.running == 1
    (left, *futures) = engine.submit(sources[1:2])
    assert left.cancel()
    futures += engine.submit(sources[2:5])
    assert engine.waiting == 3
    assert not engine.ready
    assert engine.alive
    futures[0].cancel()
    assert engine.waiting == 2
    assert engine.ready
    held.set()
    texts(translator, running + futures[1:])
    assert all(thread.daemon for thread in engine._threads)
    engine.close()
    assert not engine.ready
    assert not engine.alive


def test_closing_engine_is_not_ready(
    translator: Translator, sources: list, held: threading.Event
) -> None:
    engine = engine_of(translator, batch_size=1)
    submit_and_start(engine, sources[:1])
    closing = threading.Thread(target=engine.close)
    closing.start()
    while engine.ready:
        time.sleep(0.01)
    assert engine.alive
    with pytest.raises(QueueFull):
        engine.submit(sources[:1])
    held.set()
    closing.join()


def test_engine_is_dead_after_a_thread_has_ended(
    translator: Translator,
) -> None:
    engine = engine_of(translator, workers=2)
    with engine._changed:
        threads = engine._threads
        engine._threads = [threads[0], threading.Thread()]
    assert not engine.alive
    assert not engine.ready
    engine._threads = threads
    assert engine.alive
    assert engine.ready
    engine.close()


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_log_probability_undoes_the_length_penalty(translator: Translator, power: float) -> None:
    engine = engine_of(translator, num_beams=2, length_penalty=power)
    hypothesis = FoundHypothesis([5, 6, 7, 2], -0.5)
    assert engine.log_probability(hypothesis) == pytest.approx(-0.5 * 4**power)
    assert engine.log_probability(hypothesis, 1) == pytest.approx(-0.5 * 3**power)
    assert engine.log_probability(FoundHypothesis([5, 2], None)) is None
    engine.close()


class Batch:
    """A search with some sentences in its batch and places for some more."""

    def __init__(self, size: int, places: int) -> None:
        self.size = size
        self.places = places
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def wants(self, waiting: int) -> bool:
        self.asked.append(waiting)
        return self.places > 0

    def fits(self, sources: list[list[int]]) -> bool:
        return len(sources) <= self.places


@pytest.mark.parametrize(
    ("waiting", "running", "places", "taken"),
    [
        (0, [0], 9, 0),
        (5, [0], 9, 5),
        (5, [0], 3, 3),
        (5, [0], 0, 0),
        (5, [0, 0], 9, 3),  # half of them, rounded up
        (6, [0, 0], 9, 3),
        (1, [0, 0, 0], 9, 1),
        (4, [1, 3], 9, 3),  # so that both have four
        (4, [3, 1], 9, 1),
        (2, [4, 0], 9, 0),
        (7, [2, 2, 2], 9, 3),
    ],
)
def test_workers_take_their_share_of_the_queue(
    waiting: int, running: list[int], places: int, taken: int
) -> None:
    queue = [QueuedSentence([5], 1, turn, []) for turn in range(10, 10 + waiting)]
    engine = SimpleNamespace(_waiting=[*queue], _running=[*running], _turn=9)
    batch = Batch(running[0], places)
    found = Engine._next_sentences(engine, 0, batch)  # type: ignore[arg-type]
    assert found == queue[:taken]
    assert engine._waiting == queue[taken:]
    assert engine._running == [running[0] + taken, *running[1:]]
    assert engine._turn == 9 + taken
    assert batch.asked == [waiting] * (waiting > 0)


def test_workers_pass_cancelled_sentences_over() -> None:
    queue = [QueuedSentence([5], 1, turn, []) for turn in range(4)]
    for place in (0, 2):
        queue[place].future.cancel()
    engine = SimpleNamespace(_waiting=[*queue], _running=[0], _turn=0)
    taken = Engine._next_sentences(engine, 0, Batch(0, 9))  # type: ignore[arg-type]
    assert taken == [queue[1], queue[3]]
    assert (engine._waiting, engine._turn, engine._running) == ([], 3, [2])


def test_requests_take_turns(
    translator: Translator, sources: list[list[int]], held: threading.Event
) -> None:
    done: list[str] = []
    engine = engine_of(translator, batch_size=1)
    for name, own in (
        ("large", sources[:8]),
        ("small", sources[8:10]),
        ("last", sources[10:11]),
    ):
        for future in engine.submit(own):
            future.add_done_callback(lambda _, name=name: done.append(name))
    held.set()
    engine.close()
    assert len(done) == 11
    assert done.index("last") < 4
    assert done[-5:] == ["large"] * 5


def test_closing_engine_translates_its_queue(
    translator: Translator, sources: list[list[int]]
) -> None:
    engine = engine_of(translator, workers=2, batch_size=2)
    futures = engine.submit(sources)
    engine.close()
    assert all(future.done() for future in futures)
    assert texts(translator, futures) == list(translator.translate(LINES))


def test_cancelled_sentences_are_dropped(translator, sources, held, monkeypatch):
    drop = ContinuousSearch.drop
    dropped = []
    monkeypatch.setattr(
        ContinuousSearch,
        "drop",
        lambda self, keys: dropped.extend(keys) or drop(self, keys),
    )
    engine = engine_of(translator, batch_size=2)
    futures = engine.submit(sources[:6])
    while engine.waiting == 6:
        time.sleep(0.01)
    assert futures[0].cancel() and futures[4].cancel(), "one is running, one waits"
    held.set()
    left = [future for future in futures if not future.cancelled()]
    assert texts(translator, left) == list(translator.translate([LINES[i] for i in (1, 2, 3, 5)]))
    engine.close()
    with pytest.raises(CancelledError):
        futures[0].result()
    assert engine.translated == 4
    assert [sentence.source for sentence in dropped] == [sources[0]]


def test_cancelled_sentences_make_room_in_the_queue(translator, sources, held):
    engine = engine_of(translator, batch_size=1, max_queue=3)
    running = submit_and_start(engine, sources[:1])
    assert all(future.cancel() for future in engine.submit(sources[1:4]))
    assert engine.waiting == 0
    futures = engine.submit(sources[4:7])
    held.set()
    assert texts(translator, running + futures) == list(
        translator.translate([LINES[i] for i in (0, 4, 5, 6)])
    )
    engine.close()


def test_sentence_that_cannot_start_fails_alone(
    translator: Translator, sources: list[list[int]], caplog: Any
) -> None:
    engine = engine_of(translator)
    futures = engine.submit([*sources[:2], [10**6], *sources[2:4]])
    with pytest.raises((ValueError, IndexError)):
        futures.pop(2).result(timeout=60)
    assert texts(translator, futures) == list(translator.translate(LINES[:4]))
    engine.close()


@pytest.mark.parametrize(("threads", "workers", "share"), [(4, 2, 2), (3, 2, 1), (1, 2, 1)])
def test_workers_share_the_threads_of_torch(
    threads, workers, share, translator, sources, monkeypatch
):
    seen = set()
    step = ContinuousSearch.step

    def recording(self: ContinuousSearch) -> Any:
        seen.add(torch.get_num_threads())
        return step(self)

    monkeypatch.setattr(ContinuousSearch, "step", recording)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = engine_of(translator, workers)
        texts(translator, engine.submit(sources[:6]))
        engine.close()
    finally:
        torch.set_num_threads(before)
    assert seen == {share}


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("place", ["step", "join"])
def test_batch_without_memory_is_halved_and_loses_no_sentence(
    place, most, translator, sources, monkeypatch, caplog
):
    original = getattr(ContinuousSearch, place)
    sizes = []

    def with_memory_for_few(self: ContinuousSearch, *sentences: Any) -> Any:
        sizes.append(len(self) + len(sentences and sentences[0]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *sentences)

    monkeypatch.setattr(ContinuousSearch, place, with_memory_for_few)
    engine = engine_of(translator, batch_size=8)
    futures = engine.submit(sources[:7])
    assert texts(translator, futures) == list(translator.translate(LINES[:7]))
    engine.close()
    assert engine.translated == 7
    assert most < max(sizes) <= 8
    assert sizes[-1] <= most
    halved = re.findall(
        r"no memory for (\d+) sentences at once: worker 0 translates (\d+)",
        caplog.text,
    )
    assert halved
    assert all(int(half) == int(before) // 2 for before, half in halved)


def test_sentence_without_memory_fails_alone(translator, sources, monkeypatch, caplog):
    original = ContinuousSearch.step

    def step(self: ContinuousSearch) -> list:
        if any(len(key.source) == len(longest) for key in self.keys):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self)

    longest = max(sources, key=len)
    others = [number for number, source in enumerate(sources) if len(source) < len(longest)]
    monkeypatch.setattr(ContinuousSearch, "step", step)
    engine = engine_of(translator)
    futures = engine.submit([longest, *(sources[number] for number in others)])
    with pytest.raises(torch.OutOfMemoryError):
        futures[0].result(timeout=60)
    expected = list(translator.translate([LINES[number] for number in others]))
    assert texts(translator, futures[1:]) == expected
    engine.close()


def test_error_fails_its_batch_and_not_the_next(translator, sources, monkeypatch, caplog):
    original = ContinuousSearch.step
    calls = []

    def step(self: ContinuousSearch) -> list:
        calls.append(len(self))
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return original(self)

    monkeypatch.setattr(ContinuousSearch, "step", step)
    engine = engine_of(translator)
    for future in engine.submit(sources[:3]):
        with pytest.raises(MemoryError):
            future.result(timeout=60)
    assert texts(translator, engine.submit(sources[:3])) == list(translator.translate(LINES[:3]))
    engine.close()
    assert "translation failed" in caplog.text
    assert engine.translated == 3


def test_c_functions_are_loaded_before_the_first_sentence(
    translator: Translator, monkeypatch
) -> None:
    asked = []
    monkeypatch.setattr(
        engine_module,
        "library",
        lambda: asked.append(threading.current_thread()),
    )
    engine_of(translator).close()
    assert asked == [threading.current_thread()]
