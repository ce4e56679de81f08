"""Work that several processes share, with its results in the order of the work."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import starmap
from typing import Any, TypeVar

from .errors import UserError
from .system_calls import process_context

Result = TypeVar("Result")


def in_order(
    function: Callable[..., Result], work: Iterable[tuple[Any, ...]], workers: int, preload: str
) -> Iterator[Result]:
    """Yield `function(*arguments)` for the items of `work`. The error is that of the first item that has one.

    Args:
        function: can be pickled. Each process gets it once.
        work: read as far as the processes need it, so that few items wait in memory.
        workers: processes. One works in this process.
        preload: the module of the function.

    Raises:
        UserError: a process was ended from outside.
    """
    if workers <= 1:
        yield from starmap(function, work)
        return
    pool = ProcessPoolExecutor(workers, process_context(preload), _start_worker, (function,))
    waiting: deque[Future[Result]] = deque()
    try:
        for arguments in work:
            waiting.append(pool.submit(_call, arguments))
            if len(waiting) > 2 * workers:  # the others would wait in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"workers: one of {workers} processes was ended, perhaps for want of memory: give fewer"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# In the processes of workers


class _Worker:
    """What a worker calls."""

    function: Callable[..., Any]


def _start_worker(function: Callable[..., Any]) -> None:
    _Worker.function = staticmethod(function)
    # Ctrl-C in a terminal reaches all processes. The main process decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has a core
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process after the main process was killed, which could not tell it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(arguments: tuple[Any, ...]) -> Any:
    return _Worker.function(*arguments)
