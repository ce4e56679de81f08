"""Duplicates of a text that does not fit into memory, and memory that does not grow with it."""

import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from hf_vanilla_transformer.cleaning import duplicates, judging
from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs
from hf_vanilla_transformer.cleaning.rules import flaws

RULES = ["duplicate", "near_duplicate"]


class Rows:
    """Pairs that no list holds: of each four in a row, one again later and one in capitals."""

    def __init__(self, size: int):
        self.size = size

    def __iter__(self) -> Iterator[PairRow]:
        for line in range(self.size):
            number = line % (self.size // 2) if line % 4 == 1 else line
            pair = f"dog {number // 4}", f"Hund {number // 4} {number % 4 > 1}"
            yield PairRow(line, *(text.upper() if line % 4 == 2 else text for text in pair))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "SAMPLE", 50)
    monkeypatch.setattr(judging, "BLOCK", 100)
    monkeypatch.setattr(duplicates, "_IN_MEMORY", 1)


def test_duplicates_on_the_disk_are_those_of_dictionaries(small: None, tmp_path: Path) -> None:
    rows = list(Rows(2000))
    best: dict[tuple[str, ...], tuple[int, int]] = {}
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        near = tuple(text.lower() for text in row.pair)
        best[near] = min(best.get(near, (99, 0)), (flaws(row.pair), row.line))
        first.setdefault(row.pair, row.line)
    expected = {
        row.line: "duplicate" if first[row.pair] != row.line else "near_duplicate"
        for row in rows
        if first[row.pair] != row.line
        or best[tuple(text.lower() for text in row.pair)][1] != row.line
    }
    judged, _ = judge_pairs(Rows(2000), RULES, folder=tmp_path)
    assert {row.line: rule for rule, row in judged if rule} == expected
    assert set(expected.values()) == set(RULES)
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_text(small: None, tmp_path: Path) -> None:
    """A set of numbers alone would take some 60 bytes a pair."""
    peaks = []
    for size in (500, 1000, 4000):  # the first fills the caches of Python
        tracemalloc.start()
        for _ in judge_pairs(Rows(size), RULES, folder=tmp_path)[0]:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 10 * 3000


def test_text_that_changes_meanwhile_is_refused() -> None:
    class Growing:
        readings = count(10)

        def __iter__(self) -> Iterator[PairRow]:
            return iter(Rows(next(self.readings)))

    judged, _ = judge_pairs(Growing(), RULES)
    with pytest.raises(judging.UserError, match="changed while it was read"):
        list(judged)
