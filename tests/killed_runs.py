"""Runs that are killed, with all of their processes, at places of their work on files. Each is a fork.

A place is an operation of Python on a file or folder of the run, or a table that is made to be written.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_vanilla_transformer.utils import process_pool

_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "tempfile.mkdtemp"}


def attempt(run: Callable[[], Any], folder: Path, places: Path, last: int | None = None) -> int:
    """Run in a process group of its own, which is killed at place number `last`. Return the exit status.

    Args:
        folder: of all files of the run.
        places: a file that gets a byte for each place.
    """
    sys.stdout.flush()
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        with suppress(ProcessLookupError):  # until all have ended
            for _ in range(1000):
                os.killpg(pid, 0)
                time.sleep(0.01)
        return os.waitstatus_to_exitcode(status)
    status = 1
    try:
        os.setpgid(0, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        _watch(str(folder), os.open(places, flags), last)
        run()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(folder: str, places: int, last: int | None) -> None:
    """Count the places of this process and of those that it forks, and kill them all at the last one."""

    def count() -> None:
        os.write(places, b".")
        if last is not None and os.fstat(places).st_size >= last:
            os.killpg(0, signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPERATIONS and str(arguments[0]).startswith(folder):
            count()

    make_table = pa.table

    def table(*arguments: Any, **settings: Any) -> pa.Table:
        count()
        return make_table(*arguments, **settings)

    pa.table = table
    # A server would import the libraries in each attempt, and its processes would not be watched.
    process_pool.process_context = lambda _: multiprocessing.get_context("fork")
    sys.addaudithook(hook)


def check_kills(
    run: Callable[[Path], Any], reference: Callable[[Path], Any], folder: Path, count: int
) -> None:
    """Kill a run into a new folder at `count` places, one drawn from each of as many equal parts of its places.

    Each of its files must be complete or not there, and all must be complete, with no others, after it was repeated.

    Args:
        run: gets the folder.
        reference: the same with other settings that must not count, such as one worker. It is not killed.
    """
    places = folder / "places"
    complete: dict[str, bytes] = {}

    def start(
        name: str, run: Callable[[Path], Any] = run, last: int | None = None
    ) -> tuple[int, dict[str, bytes]]:
        case = folder / name
        case.mkdir(exist_ok=True)
        status = attempt(lambda: run(case), case, places, last)
        files = (path for path in case.rglob("*") if path.is_file())
        return status, {str(file.relative_to(case)): file.read_bytes() for file in files}

    def check_complete(name: str) -> None:
        status, files = start(name)
        assert status == 0
        assert set(files) == set(complete)
        assert files == complete

    _, complete = start("reference", reference)
    assert complete
    check_complete("whole")
    total = places.stat().st_size
    edges = [1 + total * part // count for part in range(count + 1)]
    dice = random.Random(0)
    for first, end in pairwise(edges):
        last = dice.randrange(first, end)
        name = f"killed at {last} of {total}"
        status, files = start(name, last=last)
        assert status == -signal.SIGKILL
        for file, content in files.items():
            hidden = any(part.startswith((".", "tmp")) for part in Path(file).parts)
            assert hidden or content == complete[file], (name, file)
        check_complete(name)
