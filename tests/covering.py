"""The marker `covering`: which cases of a test with many parameters the fast tests try, and which the slow ones."""

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

Values = frozenset[tuple[str, str]]  # (parameter, value)


def leave_to_slow_tests(items: list[pytest.Item]) -> None:
    """Mark as slow what `@pytest.mark.covering(n)` need not try for each combination of n parameter values."""
    cases_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_slow = item.get_closest_marker("slow")
        if item.get_closest_marker("covering") and parameters_of(item) and not is_slow:
            test, _, _ = item.nodeid.partition("[")
            cases_of.setdefault(test, []).append(item)
    for cases in cases_of.values():
        for case in redundant(cases):
            case.add_marker(pytest.mark.slow)


def redundant(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of one test without which all combinations still occur. The choice is greedy."""
    combinations_of = {case: combinations_in(case) for case in cases}
    missing: set[Values] = set().union(*combinations_of.values())
    chosen = set[pytest.Item]()
    uses = Counter[tuple[str, str]]()  # of each value

    def usefulness(case: pytest.Item) -> tuple[int, int]:
        """New combinations first, then values that few chosen cases have."""
        new = combinations_of[case] & missing
        often = sum(uses[value] for value in values_of(case))
        return len(new), -often

    while missing:
        best = max(cases, key=usefulness)
        missing -= combinations_of[best]
        uses.update(values_of(best))
        chosen.add(best)
    return [case for case in cases if case not in chosen]


def combinations_in(case: pytest.Item) -> set[Values]:
    marker = case.get_closest_marker("covering")
    assert marker is not None
    (size,) = marker.args
    values = values_of(case)
    size = min(size, len(values))
    return set(map(frozenset, combinations(values, size)))


def values_of(case: pytest.Item) -> list[tuple[str, str]]:
    return [(name, repr(value)) for name, value in parameters_of(case).items()]


def parameters_of(case: pytest.Item) -> dict[str, Any]:
    """Parameter -> value, fixtures with parameters included."""
    specification = getattr(case, "callspec", None)  # pytest has no public name for it
    return specification.params if specification else {}
