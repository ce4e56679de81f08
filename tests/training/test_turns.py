"""Steps that one process of a host does first: the others wait in the store, and hear of an error."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from hf_vanilla_transformer.training.state.distributed import _turns
from hf_vanilla_transformer.utils.errors import UserError

HOSTS = ("a", "a", "b", "b")  # of four ranks


def outcomes(work: Callable[[int], object], calls: int = 1) -> list[object]:
    """The error of each rank, or the times at which it started and left the last step."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))  # nothing waits within the store itself

    def run(rank: int) -> object:
        try:
            for _ in range(calls):
                with _turns(store, (rank, len(HOSTS)), "reading", rank % 2 == 0, HOSTS[rank]):
                    started = time.monotonic()
                    work(rank)
                    ended = time.monotonic()
        except Exception as error:
            return error
        return started, ended, time.monotonic()

    with ThreadPoolExecutor(len(HOSTS)) as threads:
        return list(threads.map(run, range(len(HOSTS))))


@pytest.mark.parametrize("calls", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_first_of_each_host_goes_ahead_and_all_leave_together(calls: int) -> None:
    times = outcomes(lambda rank: time.sleep([0.3, 0.1, 0, 0][rank]), calls)
    started, ended, left = zip(*times, strict=True)
    assert started[1] >= ended[0]
    assert started[3] >= ended[2]
    assert min(left) >= max(ended)
    assert started[3] < ended[0], "the hosts do not wait for each other to start"


@pytest.mark.parametrize(
    ("failing", "error", "heard"),
    [
        (0, UserError("train: no such file"), "train: no such file"),  # rank 0 reports it for all
        (2, UserError("disk full"), "b: disk full"),
        (2, RuntimeError("bug"), "b: reading failed on b: its own output says why"),
    ],
)
def test_error_of_one_rank_ends_the_step_on_all(failing: int, error: Exception, heard: str) -> None:
    def work(rank: int) -> None:
        if rank == failing:
            raise error

    errors = outcomes(work)
    assert errors[failing] is error
    of_host = heard.removeprefix("b: ")
    for rank, each in enumerate(errors):
        if rank != failing:
            assert isinstance(each, UserError)
            assert str(each) == (of_host if rank == failing + 1 else heard)
