"""Worker processes of a benchmark, and their memory.

Each engine runs in a separate process, so that peak memory is measured separately. Engines take turns (A B C A B C …),
so that a noisy machine slows all of them alike.
"""

import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.untrusted import one_line


def check_choices(**choices: tuple[Sequence[str], Sequence[str]]) -> None:
    """Raise a UserError for unknown values. Each argument is (values, known values)."""
    for name, (values, known) in choices.items():
        if unknown := set(values) - set(known):
            raise UserError(f"{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")


# Worker processes


class Worker:
    """A process that answers requests, and idles while other workers take their turn.

    `serve` runs in the process with a pipe and `args`. It sends something when it is ready, and an answer to each of
    `requests(pipe)`. It must be picklable by name. `threads` is the number of torch's threads in the process.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        *args: Any,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ):
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_end = context.Pipe()
        arguments = worker_end, serve, args, threads, dict(environment or {})
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        worker_end.close()  # only the process keeps its end open, so that its death is an EOFError here

    def end(self) -> None:
        """End the process, if necessary during a request."""
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()

    def send(self, request: str, *args: Any) -> None:
        """Send a request without waiting. `receive` must follow."""
        with suppress(BrokenPipeError, ConnectionResetError):
            # `receive` reports that the process died.
            self.pipe.send((request, args))

    def receive(self) -> Any:
        """Wait for the next message of the process, or raise a UserError if it raised one or died."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise UserError("its process died; its message is above") from error
        if isinstance(answer, UserError):
            raise answer
        return answer


def _run(
    pipe: Connection,
    serve: Callable[..., None],
    args: Any,
    threads: int,
    environment: dict[str, str],
) -> None:
    import hf_vanilla_transformer  # noqa: F401  (registers the model)

    # set, or accelerate chooses a number of threads when there are several processes
    os.environ.update(environment, OMP_NUM_THREADS=str(threads))
    # The main process reports first, and then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    with suppress(BrokenPipeError):  # the main process was interrupted and does not wait any more
        try:
            serve(pipe, *args)
        except UserError as error:
            pipe.send(error)
        except Exception as error:  # of an engine: a missing library, a full GPU
            traceback.print_exc()
            pipe.send(UserError(f"{type(error).__name__}: {one_line(error)}"))


class Teams:
    """The worker processes of each engine. A context manager.

    An engine that fails is left out with a line, so that the others are measured. If all fail, that is an error.
    """

    def __init__(self) -> None:
        self._workers: dict[Hashable, list[Worker]] = {}

    def __enter__(self) -> "Teams":
        return self

    def __exit__(self, *_: Any) -> None:
        for engine in self.engines():
            self._end(engine)

    def engines(self) -> list[Any]:
        """The names of the engines that have not failed."""
        return list(self._workers)

    def add(self, engine: Hashable, workers: Sequence[Worker]) -> None:
        """Add the processes of an engine. `receive` waits until they are ready."""
        self._workers[engine] = list(workers)

    def send(self, engine: Hashable, request: str, *args: Any) -> None:
        """Send a request to the processes of an engine. `receive` must follow."""
        for worker in self._workers[engine]:
            worker.send(request, *args)

    def receive(self, engine: Hashable) -> list[Any]:
        """The answers of the processes of an engine, or no answer if it is left out."""
        if engine not in self._workers:
            return []
        try:
            return [worker.receive() for worker in self._workers[engine]]
        except UserError as error:
            self._end(engine)
            if not self._workers:
                raise UserError(f"engines: {engine}: {error}") from error
            print(f"left out: {engine}: {error}", file=sys.stderr, flush=True)
            return []

    def ask(self, engine: Hashable, request: str, *args: Any) -> list[Any]:
        """Send a request and wait for the answers."""
        if engine not in self._workers:
            return []
        self.send(engine, request, *args)
        return self.receive(engine)

    def _end(self, engine: Hashable) -> None:
        for worker in self._workers.pop(engine):
            worker.end()


def requests(pipe: Connection) -> Iterator[tuple[str, Any]]:
    """The requests to a `Worker`, name and arguments, until the main process closes the pipe."""
    while True:
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            return


# Memory


def reset_peak_memory(on_gpu: bool) -> None:
    """Reset the peak memory of this process. Only Linux can. Elsewhere the peak includes earlier settings."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib(on_gpu: bool) -> float | None:
    """Peak memory since the last reset, of this process or of torch on the GPU."""
    if on_gpu:  # 0 for CTranslate2, which does not use torch's allocator
        return torch.cuda.max_memory_allocated() / 2**20 or None
    if (peak := _proc_status_mib("VmHWM")) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_mib(on_gpu: bool) -> float | None:
    """Memory in use now. None if the system does not report it."""
    return torch.cuda.memory_allocated() / 2**20 if on_gpu else _proc_status_mib("VmRSS")


def _proc_status_mib(name: str) -> float | None:
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if match := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) / 1024
    return None
