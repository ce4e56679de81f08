"""Jobs of workers of Ray, without a cluster."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hf_vanilla_transformer.inference.ray_workers import JOBS_OF_A_WORKER, _results


class Pending:
    """A result that is to come."""

    def __init__(self, value: Any):
        self.value = value


class Method(NamedTuple):
    function: Callable[..., Any]

    def remote(self, *arguments: Any) -> Pending:
        return Pending(self.function(*arguments))


class Worker:
    """Doubles numbers."""

    def __init__(self, problem: str | None = None):
        self.problem = Method(lambda: problem)
        self.run = Method(lambda number: 2 * number)


class PretendedRay:
    """Finishes the calls in the order in which they are given."""

    @staticmethod
    def wait(pending: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        return pending[:1], pending[1:]

    @staticmethod
    def get(pending: Pending) -> Any:
        return pending.value


@pytest.mark.parametrize("jobs", [0, 1, JOBS_OF_A_WORKER, 10 * JOBS_OF_A_WORKER])
@pytest.mark.parametrize("workers", [1, 3])
def test_each_job_has_one_result(workers: int, jobs: int) -> None:
    """And is read as the workers need it."""
    read = []

    def numbers() -> Iterator[int]:
        for number in range(jobs):
            read.append(number)
            yield number

    found = []
    for result in _results(PretendedRay, [Worker() for _ in range(workers)], numbers()):
        found.append(result)
        assert len(read) <= len(found) + JOBS_OF_A_WORKER * workers
    assert sorted(found) == [2 * number for number in range(jobs)]


def test_problem_of_a_worker_is_a_result() -> None:
    found = [*_results(PretendedRay, [Worker("no GPU"), Worker()], iter([1]))]
    assert sorted(map(str, found)) == ["2", "no GPU"]
