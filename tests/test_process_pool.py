"""Work of several processes: the order of its results, and what ends it."""

import os
from collections.abc import Iterator

import pytest

from hf_vanilla_transformer.utils import process_pool
from hf_vanilla_transformer.utils.errors import UserError

PRELOAD = process_pool.__name__


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_those_of_one_process(workers: int) -> None:
    read = []

    def work() -> Iterator[tuple[str]]:
        for number in [*range(30), "x", 31, "y"]:
            read.append(number)
            yield (f"{number}",)

    results = process_pool.in_order(int, work(), workers, PRELOAD)
    assert next(results) == 0
    assert len(read) == {1: 1, 2: 5}[workers]
    with pytest.raises(ValueError, match="'x'"):
        for number in range(1, 40):
            assert next(results) == number
    assert number == 30


def test_process_that_is_ended_is_named() -> None:
    with pytest.raises(UserError, match="workers: one of 2 processes was ended"):
        list(process_pool.in_order(os._exit, [(1,)], 2, PRELOAD))
