"""Batches, searches and warnings of lines, against what their rules say of any lengths."""

from collections import Counter

import numpy as np
import pytest
import torch

from hf_vanilla_transformer.inference.batching import (
    EncodedSentence,
    length_batches,
    search_jobs,
    with_prefixes,
)
from hf_vanilla_transformer.inference.line_warnings import LineWarnings
from hf_vanilla_transformer.inference.workers import shard_evenly, worker_count
from tests.model_helpers import error_of

RNG = np.random.default_rng(0)


def random_number(end: int) -> int:
    return int(RNG.integers(1, end))


def test_batches_are_greedy_from_the_longest_sentence_on() -> None:
    for _ in range(100):
        keys = RNG.permutation(RNG.integers(1, 30)).tolist()
        lengths = {key: random_number(12) for key in keys}
        size = random_number(6)
        tokens = random_number(40)
        expected: list[list[int]] = []
        for key in sorted(lengths, key=lambda key, lengths=lengths: -lengths[key]):
            last = expected[-1] if expected else []
            rows = len(last) + 1
            if last and rows <= size and rows * lengths[last[0]] <= tokens:
                last.append(key)
            else:
                expected.append([key])
        assert list(length_batches(lengths, size, tokens)) == expected


@pytest.mark.parametrize("refill", [False, True])
def test_searches_have_prefixes_of_one_length_and_share_full_batches(refill: bool) -> None:
    sentences = {}
    for key in range(300):
        length = 10 if key % 100 == 7 else random_number(4)
        sentences[key] = EncodedSentence([5] * length, [7] * (key >= 200))
    jobs = search_jobs(sentences, 8, 24, refill, 3)
    assert sorted(key for job in jobs for key in job.indices) == list(range(300))
    counts = Counter()
    for job in jobs:
        (prefix,) = {len(sentences[key].prefix) for key in job.indices}
        lengths = [len(sentences[key].source) for key in job.indices]
        assert lengths == sorted(lengths, reverse=True)
        assert job.batch_size == min(8, len(job.indices))
        counts[prefix, len(job.indices) > 8] += 1
        if len(job.indices) <= 8:
            assert len(job.indices) * lengths[0] <= 24
    searches = 3 if refill else 0
    assert counts[0, True] == searches
    assert counts[1, True] == searches
    assert len(jobs[0].indices) == 2
    assert refill or len(jobs[1].indices) == 8


def test_shards_have_at_least_32_sentences_and_mixed_lengths() -> None:
    for count, workers, sizes in (
        (63, 4, [63]),
        (64, 4, [32, 32]),
        (97, 3, [33, 32, 32]),
        (200, 1, [200]),
        (0, 2, [0]),
    ):
        items = list(range(count))
        shards = shard_evenly(items, workers)
        assert [len(shard) for shard in shards] == sizes
        assert all(shard == items[start :: len(shards)] for start, shard in enumerate(shards))


def test_each_sentence_has_its_prefix() -> None:
    for prefixes, given in ((None, ["", ""]), (["x", "y"], ["x", "y"])):
        assert list(with_prefixes("ab", prefixes)) == list(zip("ab", given, strict=True))
    for sentences, prefixes, has in (
        ("a", "xy", "a prefix but no source"),
        ("ab", "x", "a source but no prefix"),
    ):
        message = f"prefixes: line 8 has {has}; each source needs one"
        assert error_of(list, with_prefixes(sentences, prefixes, first_line=7)) == message


@pytest.mark.parametrize("gaps", [(1,), (2,), (1, 1, 1, 3)])
def test_lines_of_a_fault_are_ranges_of_which_a_hundred_are_shown(gaps: tuple[int, ...]) -> None:
    lines = np.cumsum(RNG.choice(gaps, 450)).tolist()
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    shown = ", ".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:100]
    )
    others = sum(last - first + 1 for first, last in ranges[100:])
    more = f" and {others:,} more" if others else ""
    whole = LineWarnings()
    parts = LineWarnings()
    for start in range(0, 450, 90):
        part = LineWarnings()
        for line in lines[start : start + 90]:
            whole.add_fault("x", line, f"s{line}")
            whole.add_fault("x", line)  # a second one of the same line
            part.add_fault("x", line - start, f"s{line}")
        part.hypotheses = 3
        part.invalid = start == 90
        parts.add(part, lambda start=start: start)
    expected = f"x, such as 's{lines[0]}' (450 lines: {shown}{more})"
    assert whole.warnings() == [expected]
    assert parts.warnings() == [expected, "normalize: 1 of 15 hypotheses are invalid"]
    one = LineWarnings()
    one.add_fault("y", 12)
    assert one.warnings() == ["y (line 12)"]


@pytest.mark.parametrize(
    ("threads", "cores", "devices", "count"),
    [
        (1, 4.0, ["cpu"], 1),
        (4, 16.0, ["cpu", "cpu"], 4),
        (4, 2.9, ["cpu"], 2),
        (4, 0.5, ["cpu"], 1),
        (16, 16.0, ["cpu"], 8),
        (4, 16.0, ["cpu", "meta"], 1),
        (4, 16.0, ["meta"], 1),
    ],
)
def test_each_thread_of_a_cpu_searches_up_to_its_quota(
    threads: int,
    cores: float,
    devices: list[str],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("hf_vanilla_transformer.inference.workers.available_cpus", lambda: cores)
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, device=device) for device in devices])
    assert worker_count(model) == count
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert worker_count(model) == 1
