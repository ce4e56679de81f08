"""Searches in threads: on a CPU some that have a core each do more than one that all cores share.

The operations of a decoder are small. Cut into pieces for several cores, each waits for the slowest piece.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

#: Fewer sentences at once make poor use of a core: all weights are read for them too.
LEAST_SENTENCES = 32

#: Python lets one thread at a time say what is computed next; more would wait for each other.
MOST_WORKERS = 8

Job = TypeVar("Job")
Result = TypeVar("Result")


def worker_count(model: torch.nn.Module) -> int:
    """How many searches with this model should run beside each other: on a CPU one for each thread, up to 8.

    One where torch's settings of this thread, which others do not inherit, say how to compute.
    """
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return min(torch.get_num_threads(), MOST_WORKERS) if on_cpu and not torch.is_autocast_enabled("cpu") else 1


def shares(items: list[Job], workers: int) -> list[list[Job]]:
    """Cut sentences, sorted by length, into at most `workers` parts that take about as long as each other."""
    count = max(1, min(workers, len(items) // LEAST_SENTENCES))
    return [items[start::count] for start in range(count)]


def in_threads(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, stop: threading.Event
) -> Iterator[Result]:
    """`map(work, jobs)`, so many at a time, each in a thread with its part of torch's threads.

    Args:
        stop: set when an error or an interrupt ends it, so that work can end early. Jobs that have not begun are
            dropped.
    """
    jobs, threads = list(jobs), torch.get_num_threads()
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from map(work, jobs)
        return
    # torch keeps its number of threads for each thread, but MKL's for all
    pool = ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(max(1, threads // workers)))
    try:
        yield from pool.map(work, jobs)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
