"""Calls of the operating system that Windows or macOS lacks or answers differently, each with its other way.

Other modules of the package make none of these calls themselves. `tests/test_system_calls.py` checks it.
"""

import ctypes
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import psutil
from filelock import BaseFileLock

# Files


def sync_to_disk(path: Path) -> None:
    """Write a file, or the names in a folder, from the cache of the system to the disk.

    Windows syncs descriptors for writing only, and opens no folders. Its file system keeps their names in a journal.
    """
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    except PermissionError:
        if is_folder:
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SECONDS_OF_SCANNERS = 2.0


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder, in the place of a file `target` if there is one.

    Windows refuses it while any process has one of the files open, as virus scanners and indexers have new files for a
    moment. The call is repeated for two seconds then.
    """
    last = time.monotonic() + _SECONDS_OF_SCANNERS
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            is_of_windows = getattr(error, "winerror", None) is not None
            if not is_of_windows or time.monotonic() > last:
                raise
        time.sleep(0.05)


def rename_to_new(source: Path, target: Path) -> None:
    """Rename a file to one that does not exist. If it does, `source` may stay.

    `os.rename` replaces it, but on Windows. Some file systems have no links. There, two processes may both rename.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:
        replace(source, target)


def release_and_remove(lock: BaseFileLock) -> None:
    """Release a lock and delete its file.

    The file is deleted while the lock is held, because another process may hold it a moment later. Windows deletes no
    open file, neither this process's nor that of another one which locks it next.
    """
    file = Path(lock.lock_file)
    try:
        file.unlink(missing_ok=True)
    except PermissionError:
        lock.release()
        with suppress(OSError):
            file.unlink(missing_ok=True)
    else:
        lock.release()


def process_namespace() -> str:
    """Return the host name and its namespace of process numbers, because containers may share a host name."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def process_runs(number: int) -> bool:
    """Return whether a process with this number runs on this host, and not only until its parent asks for its end."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # of another user
        return True


# The machine


def usable_cores() -> set[int]:
    """Indices of the cores that this process may run on. Only Linux restricts them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def ticks_per_second() -> int:
    """The unit of the times in `/proc`, which only Linux has."""
    return os.sysconf("SC_CLK_TCK")


def has_low_priority() -> bool:
    """True if others on Unix come before this process (`nice`)."""
    return hasattr(os, "nice") and os.nice(0) > 0


def memory_size() -> int:
    """Bytes of memory of this machine."""
    return psutil.virtual_memory().total


def release_free_memory() -> bool:
    """Return the free pages of the C library's heap to the system, and whether the library can do so (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return False
    trim(0)
    return True


def forget_pages(files: Collection[str]) -> None:
    """Give the pages of files that this process has mapped for reading back. They are read again when needed.

    The system itself takes them back only when memory is short, and the limits of a job count them. Windows and macOS
    decide alone.
    """
    try:
        mappings = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:  # not Linux
        return
    c_library = ctypes.CDLL(None)
    for line in mappings:
        span, permissions, *_, file = line.split(maxsplit=5)
        if os.fsdecode(file) in files and b"w" not in permissions:
            start, end = (int(address, 16) for address in span.split(b"-"))
            c_library.madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED
            )


# Processes


def process_context(preload: str) -> Any:
    """How a process with threads starts others, which need the module `preload`.

    On Linux they are copies of a server that has imported it. The libraries of macOS do not permit copies, and Windows
    makes none: each process makes the imports there.
    """
    default = multiprocessing.get_all_start_methods()[0]
    if default == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def limit_process(seconds: float, memory: int, niceness: int) -> None:
    """Limit the computing of this process and the bytes that it may take from now on, and lower its priority.

    Windows has no such limits, and macOS none of memory.
    """
    try:
        import resource
    except ImportError:
        return
    os.nice(niceness)
    most = ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    with suppress(FileNotFoundError):  # of Linux
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def raise_open_files(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as it may. Return their number. Windows has no limit."""
    try:
        import resource
    except ImportError:
        return wanted
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    if limit < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def open_files() -> int:
    """How many files this process has open, or 0 if the system does not tell."""
    folder = Path("/dev/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def end_later(seconds: int) -> None:
    """End this process after some seconds, whatever it does then."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        return
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


# Standard output


def encodable(text: str) -> str:
    """The text with escapes for what standard output cannot encode: `\\u4e2d` for 中 in a code page of Windows.

    The command sets standard output up so itself. This is for other programs that call the package.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
