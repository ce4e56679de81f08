"""What the benchmarks have in common: engines in processes of their own, asked in turn; memory, spread, tables, bars.

Each engine lives in a process of its own, so that its memory is its own, and all of them work in turn (A B C A B C …),
so that a noisy machine is noisy for all.
"""

import multiprocessing
import os
import re
import resource
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..errors import UserError
from ..plotting import figure_file

#: Told apart by eyes that see no red or no green (Okabe and Ito 2008).
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#f0e442", "#cc79a7")


# Processes


class Worker:
    """A process that does what it is asked, and waits while others work.

    Args:
        serve: runs there, with a pipe and `args`: it sends something when it is ready, and an answer to each of
            `requests(pipe)`. A function that `pickle` finds by its name.
        threads: of torch in that process.
        environment: variables for that process only.

    Raises:
        UserError: whatever `serve` raises of that kind before it is ready.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        *args: Any,
        threads: int,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = theirs, serve, args, threads, dict(environment or {})
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # the other end is the process' alone, so that its end can be seen here
        if wait:
            self.receive()

    def ask(self, what: str, *args: Any) -> Any:
        """The answer to a request."""
        self.send(what, *args)
        return self.receive()

    def send(self, what: str, *args: Any) -> None:
        """Ask without waiting: `receive` must follow."""
        self.pipe.send((what, args))

    def receive(self) -> Any:
        """The next word of the process."""
        try:
            answer = self.pipe.recv()
        except EOFError as error:
            raise UserError("engines: one of them ended without a word; its message stands above") from error
        if isinstance(answer, UserError):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, in the middle of its work if need be."""
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()


def _run(pipe: Connection, serve: Callable[..., None], args: Any, threads: int, environment: dict[str, str]) -> None:
    import hf_vanilla_transformer  # noqa: F401  (registers the model)

    os.environ.update(environment, OMP_NUM_THREADS=str(threads))  # or accelerate chooses for several processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that asks, who ends the others
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    try:
        serve(pipe, *args)
    except UserError as error:
        pipe.send(error)


def requests(pipe: Connection) -> Iterator[tuple[str, Any]]:
    """What a `Worker` is asked, name and arguments, until nobody is there to ask."""
    while True:
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            return


# Memory


def forget_peak(on_gpu: bool) -> None:
    """Count the highest memory of this process anew; only Linux can, elsewhere it is that of the whole run."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(on_gpu: bool) -> float | None:
    """The most memory that has been held since then, by this process or, there, by torch on the GPU."""
    if on_gpu:  # where CTranslate2 does not tell
        return torch.cuda.max_memory_allocated() / 2**20 or None
    if (found := _status("VmHWM")) is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held_mib(on_gpu: bool) -> float | None:
    """What is held now; None where nobody tells."""
    return torch.cuda.memory_allocated() / 2**20 if on_gpu else _status("VmRSS")


def _status(name: str) -> float | None:
    """MiB, from what Linux says of this process."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if found := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
            return int(found[1]) / 1024
    return None


# What is said of it


def spread(values: Sequence[float]) -> float:
    """How far the rounds lie apart: the largest less the smallest, over the median."""
    return (max(values) - min(values)) / statistics.median(values)


def family(engine: str) -> str:
    """What stands before the first `_` of an engine's name: whose it is."""
    return engine.partition("_")[0]


def precision(engine: str) -> str:
    """What stands after the last `_` of an engine's name."""
    return engine.rpartition("_")[2]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(" ".join(["|", *(f"{cell} |" if cell else "|" for cell in line)]) for line in lines)


def draw_panels(panels: Mapping[str, Mapping[str, Sequence[float]]], label: str, path: str | Path) -> Path:
    """Draw panels side by side, with a bar for each engine: as long as the median rate, the slowest and the fastest
    round at its end.

    Args:
        panels: from a title to the rates of each engine, round by round.
        label: what the rates are.
        path: of the picture.

    Raises:
        UserError: no matplotlib, or a kind of picture that it does not know.
    """
    engines = list(dict.fromkeys(engine for rates in panels.values() for engine in rates))
    size = (2.5 + 2.2 * len(panels), 1.5 + 0.35 * len(engines))
    with figure_file(path, figsize=size, layout="constrained") as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (title, rates) in zip(axes, panels.items(), strict=True):
            for engine, rounds in rates.items():
                _bar(axis, engines.index(engine), rounds)
            axis.set_title(title, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.locator_params(axis="x", nbins=4)
        axes[0].set_yticks(range(len(engines)), engines)
        axes[0].invert_yaxis()
        figure.supxlabel(label, fontsize=10)
    return Path(path)


def _bar(axis: Any, place: int, rates: Sequence[float]) -> None:
    rate = statistics.median(rates)
    error = [[rate - min(rates)], [max(rates) - rate]]
    axis.barh(place, rate, xerr=error, color=COLORS[place % len(COLORS)], ecolor="0.3", capsize=2)
