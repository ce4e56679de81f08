"""The CPU time that the machine has for this process: affinity, quotas of control groups, and other processes.

A parallel region of torch ends with its slowest thread, and the other threads spin until then. A thread on a core that
another process uses therefore costs more than it gains: the run is slower than one with fewer threads.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from .system_calls import has_low_priority, ticks_per_second, usable_cores

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")
_STATISTICS = Path("/proc/stat")

_WINDOW = 1.0  # seconds of a measurement
_MEMORY = 3  # measurements that a core has to be idle for before it gets a thread


def available_cpus() -> float:
    """Number of cores that this process may use, limited by its affinity and its quotas.

    Python ignores quotas. loky reads the quota of a container, but not of a systemd unit.
    """
    return min([float(len(usable_cores())), *_quotas()])


def _quotas() -> Iterator[float]:
    """Quotas in cores of this process's control group and of all groups above it."""
    for line in _read(_PROCESS).splitlines():
        number, _, path = line.split(":", 2)
        if number != "0":  # of version 1
            continue
        group = _CONTROL_GROUPS / path.lstrip("/")
        for folder in (group, *group.parents):  # above the root no file has this name
            limit = _read(folder / "cpu.max").split()
            if len(limit) == 2 and limit[0].isdigit():
                yield int(limit[0]) / int(limit[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class CpuTime:
    """Measures how many cores have time for this process. Thread-safe.

    The first measurement starts with the object. Only Linux tells what other processes use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_by_others: deque[float] = deque(maxlen=_MEMORY)
        self._last = self._sample()
        self._cores = available_cpus()

    def idle_cores(self) -> int:
        """Cores with time for this process, at least one. Measures after a second, and answers at once until then."""
        with self._lock:
            seconds = time.monotonic() - self._last[0]
            if seconds >= _WINDOW:
                sample = self._sample()
                _, busy, own = (
                    now - before for now, before in zip(sample, self._last, strict=True)
                )
                self._used_by_others.append((busy - own) / seconds)
                self._last = sample
                self._cores = available_cpus()
            others = max(self._used_by_others, default=0.0)
            return max(1, min(int(self._cores), round(len(usable_cores()) - others)))

    @staticmethod
    def _sample() -> tuple[float, float, float]:
        """The clock, the busy seconds of the usable cores, and the seconds of this process.

        The time of processes with a lower priority (`nice`) counts only if this process has a lower one, too.
        """
        cores = {f"cpu{core}" for core in usable_cores()}
        busy = 0
        for line in _read(_STATISTICS).splitlines():
            name, *ticks = line.split()
            if name in cores:
                user, nice, system, _, _, interrupts, soft_interrupts, steal = map(int, ticks[:8])
                busy += (
                    user
                    + system
                    + interrupts
                    + soft_interrupts
                    + steal
                    + (nice if has_low_priority() else 0)
                )
        return (
            time.monotonic(),
            busy / ticks_per_second() if busy else 0.0,
            time.process_time(),
        )


@cache
def measured_cpu_time() -> CpuTime:
    """The measurements of this process. Call it a second early, so that the first answer is a measurement."""
    return CpuTime()


def fitting_threads(limit: int) -> int:
    """How many of `limit` threads that wait for each other the machine has time for, at least one.

    All of them if `OMP_NUM_THREADS` says how many there should be. Results of fewer threads differ in rounding.
    """
    if limit == 1 or "OMP_NUM_THREADS" in os.environ:
        return limit
    return min(limit, measured_cpu_time().idle_cores())


@contextmanager
def on_fitting_threads() -> Iterator[None]:
    """Let torch compute with `fitting_threads` of its threads."""
    limit = torch.get_num_threads()
    threads = fitting_threads(limit)
    if threads == limit:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(limit)
