"""Searches in parallel threads: on a CPU, several searches with one core each beat one search on all cores.

The operators of a decoding step are small. Split over several cores, each waits for the slowest part.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..utils.cpu_time import available_cpus

#: Fewer sentences per search make poor use of a core, because every step reads all weights whatever the batch size.
MIN_SENTENCES = 32

#: The GIL serialises operator dispatch. Beyond 8 workers the threads contend.
MAX_WORKERS = 8

Job = TypeVar("Job")
Result = TypeVar("Result")


def worker_count(model: torch.nn.Module) -> int:
    """How many searches with this model should run in parallel: one per torch thread on a CPU, up to 8.

    Fewer with a smaller CPU quota. They do not wait for each other, so that they also use cores that are partly busy.
    One on other devices, and under autocast, because other threads do not inherit it.
    """
    workers = min(torch.get_num_threads(), MAX_WORKERS)
    if workers == 1 or torch.is_autocast_enabled("cpu"):
        return 1
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return max(1, min(workers, int(available_cpus()))) if on_cpu else 1


def shard_evenly(items: list[Job], workers: int) -> list[list[Job]]:
    """Split sentences, sorted by length, into at most `workers` shards that take about the same time."""
    count = max(1, min(workers, len(items) // MIN_SENTENCES))
    return [items[start::count] for start in range(count)]


def map_in_threads(
    function: Callable[[Job], Result], jobs: Iterable[Job], workers: int, stop: threading.Event
) -> Iterator[Result]:
    """`map(function, jobs)` in `workers` threads, each with its share of torch's threads.

    `stop` is set on an error or an interrupt, so that running jobs can end early. Pending jobs are dropped.
    """
    jobs = list(jobs)
    threads = torch.get_num_threads()
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from map(function, jobs)
        return
    # torch keeps its number of threads per thread, but MKL per process
    pool = ThreadPoolExecutor(
        workers, initializer=lambda: torch.set_num_threads(max(1, threads // workers))
    )
    try:
        yield from pool.map(function, jobs)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
