"""Calls that Windows or macOS lacks, where they are taken away as there."""

import errno
import io
import mmap
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.training.run import argument_checks
from hf_vanilla_transformer.training.run.argument_checks import check_size
from hf_vanilla_transformer.training.run.report import _write
from hf_vanilla_transformer.training.state.checkpoints import (
    LOCK,
    move_into_place,
    one_run_at_a_time,
)
from hf_vanilla_transformer.utils import system_calls
from hf_vanilla_transformer.utils.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")

OPEN = os.open
FSYNC = os.fsync
UNLINK = os.unlink
REPLACE = os.replace


def refusal(winerror: int, path: Any) -> PermissionError:
    """Windows' error about a file that is in use."""
    error = PermissionError(
        errno.EACCES,
        f"[WinError {winerror}] of Windows",
        str(path),
    )
    error.winerror = winerror  # type: ignore[attr-defined]
    return error


@pytest.fixture
def files_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are not opened, descriptors for reading not synced, and open files neither deleted nor replaced."""
    import fcntl

    def open_file(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return OPEN(path, flags, *more, **named)

    def fsync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        FSYNC(descriptor)

    def refuse_open(path: Any) -> None:
        if ".filelock-probe-" in str(path):  # of filelock's part for Linux
            return
        for each in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{each}") == os.path.realpath(path):
                raise refusal(32, path)

    def unlink(path: Any, **named: Any) -> None:
        refuse_open(path)
        UNLINK(path, **named)

    def replace(source: Any, target: Any) -> None:
        refuse_open(source)
        refuse_open(target)
        REPLACE(source, target)

    for function in (open_file, fsync, unlink, replace):
        monkeypatch.setattr(os, function.__name__.removesuffix("_file"), function)


@pytest.mark.usefixtures("files_of_windows")
def test_checkpoint_is_synced_where_only_descriptors_for_writing_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = tmp_path / "staged"
    (staged / "folder").mkdir(parents=True)
    (staged / "weights").write_bytes(b"1")
    (staged / "folder" / "tokens").write_bytes(b"2")
    synced: list[str] = []
    of_windows = os.fsync

    def fsync(descriptor: int) -> None:
        of_windows(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    move_into_place(staged, tmp_path / "checkpoint-1")
    assert sorted(synced) == ["tokens", "weights"]
    assert (tmp_path / "checkpoint-1" / "folder" / "tokens").read_bytes() == b"2"


def test_folders_are_synced_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    system_calls.sync_to_disk(tmp_path)
    assert len(synced) == 1


@pytest.mark.usefixtures("files_of_windows")
def test_run_ends_with_its_own_result_where_open_files_stay(tmp_path: Path) -> None:
    with one_run_at_a_time(tmp_path / "run"):
        (tmp_path / "run" / "weights").touch()
    assert os.listdir(tmp_path / "run") == ["weights"]
    with pytest.raises(UserError, match="of the run"), one_run_at_a_time(tmp_path / "failed"):
        raise UserError("of the run")
    assert not (tmp_path / "failed").exists()


def test_lock_is_never_deleted_under_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts between the release of a lock and the deletion of its file would lose it."""
    lock, following = (FileLock(tmp_path / LOCK, timeout=0, is_singleton=False) for _ in range(2))
    lock.acquire()
    release = lock.release

    def release_and_start(force: bool = False) -> None:
        release(force)
        following.acquire()

    monkeypatch.setattr(lock, "release", release_and_start)
    system_calls.release_and_remove(lock)
    with pytest.raises(Timeout):
        FileLock(tmp_path / LOCK, timeout=0, is_singleton=False).acquire()
    following.release()


def test_replacing_waits_for_a_scanner_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "new"
    target = tmp_path / "file"
    source.write_text("new")
    target.write_text("old")
    refusals = [refusal(5, source), refusal(32, source)]

    def replace(*paths: Any) -> None:
        if refusals:
            raise refusals.pop()
        REPLACE(*paths)

    monkeypatch.setattr(os, "replace", replace)
    system_calls.replace(source, target)
    assert target.read_text() == "new"
    assert not source.exists()


def test_replacing_ends_if_the_file_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def replace(*paths: Any) -> None:
        calls.append(paths)
        raise error

    def count_calls() -> int:
        calls.clear()
        with pytest.raises(PermissionError):
            system_calls.replace("new", "file")
        return len(calls)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(system_calls, "_SECONDS_OF_SCANNERS", 0.1)
    error = refusal(32, "file")
    assert count_calls() > 1
    error = PermissionError(errno.EACCES, "of another system")
    assert count_calls() == 1


def test_memory_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    kilobytes = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert kilobytes is not None
    assert system_calls.memory_size() == pytest.approx(1024 * int(kilobytes[1]), rel=0.01)
    monkeypatch.setattr(argument_checks, "memory_size", lambda: 2**34)
    with pytest.raises(UserError, match="this machine has 17 GB"):
        check_size(VanillaTransformerConfig(d_model=512, encoder_ffn_dim=2**40))


def test_cores_are_counted_where_no_process_is_bound_to_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert system_calls.usable_cores() == {0, 1, 2}


@pytest.mark.parametrize(
    "methods", [["spawn"], ["spawn", "fork", "forkserver"], ["fork", "spawn", "forkserver"]]
)
def test_processes_are_spawned_where_the_system_spawns(
    methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: methods)
    expected = "forkserver" if methods[0] == "fork" else "spawn"
    assert system_calls.process_context(__name__).get_start_method() == expected


INF = -1  # RLIM_INFINITY of Linux


@pytest.mark.parametrize(
    ("limit", "hard", "wanted", "allowed"),
    [
        (9, 20, 15, 15),
        (9, 20, 21, 20),
        (9, 20, 9, 9),
        (9, 20, 5, 9),
        (9, INF, 30, 30),
        (INF, INF, 40, 40),
    ],
)
def test_limit_of_open_files_is_raised_as_far_as_permitted(
    limit, hard, wanted, allowed, monkeypatch
):
    resource = pytest.importorskip("resource")
    calls: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, hard))
    monkeypatch.setattr(
        resource,
        "setrlimit",
        lambda *arguments: calls.append(arguments),
    )
    assert system_calls.raise_open_files(wanted) == allowed
    assert calls == [(resource.RLIMIT_NOFILE, (allowed, hard))] * (limit not in (allowed, INF))


def test_limits_of_a_process_count_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    calls: dict[Any, Any] = {}
    monkeypatch.setattr(resource, "setrlimit", calls.__setitem__)
    monkeypatch.setattr(os, "nice", lambda niceness: calls.update(nice=niceness))
    monkeypatch.setattr(time, "process_time", lambda: 10.25)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "300 200 100\n")
    system_calls.limit_process(2.5, 7, 11)
    most = 300 * resource.getpagesize() + 7
    assert calls == {
        resource.RLIMIT_CPU: (13, 13),
        resource.RLIMIT_AS: (most, most),
        "nice": 11,
    }


def test_system_is_asked_for_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system_calls.ticks_per_second() == os.sysconf("SC_CLK_TCK")
    assert system_calls.open_files() == len(os.listdir("/dev/fd"))
    assert (
        system_calls.process_namespace()
        == f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"
    )
    for niceness in (-1, 0, 1):
        monkeypatch.setattr(
            os,
            "nice",
            lambda more, niceness=niceness: niceness + more,
        )
        assert system_calls.has_low_priority() == (niceness > 0)
    monkeypatch.delattr(os, "nice")
    assert not system_calls.has_low_priority()
    monkeypatch.setattr(os, "readlink", lambda _: os.stat("/no/such/file"))
    assert system_calls.process_namespace() == f"{os.uname().nodename} "
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not system_calls.release_free_memory()


def test_open_files_have_no_limit_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert system_calls.raise_open_files(600) == 600
    system_calls.limit_process(1.0, 10, 10)  # nothing


@pytest.mark.slow
def test_process_ends_later_without_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    monkeypatch.delattr(signal, "SIGALRM")
    start = time.monotonic()
    system_calls.end_later(1)
    assert ended.wait(10)
    assert time.monotonic() - start > 0.9


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("cp1252", r"für \u4e2d \u2500 \ud800"),
        ("cp437", r"für \u4e2d ─ \ud800"),
        ("ascii", r"f\xfcr \u4e2d \u2500 \ud800"),
    ],
)
def test_progress_is_escaped_where_the_output_lacks_characters(
    encoding: str,
    written: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding)  # strict, as Python's
    monkeypatch.setattr(sys, "stdout", output)
    _write("für 中 ─ \ud800")
    assert output.buffer.getvalue().decode(encoding).rstrip() == written  # type: ignore[attr-defined]


def resident_of(file: Path) -> int:
    """The kilobytes of a mapped file that are in this process's memory, as Linux reports them."""
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index(str(file)) :]
    return int(re.search(r"\nRss: +(\d+) kB", mapping)[1])


def test_pages_of_a_mapped_file_leave_the_memory(tmp_path: Path) -> None:
    read = tmp_path / "read.bin"
    other = tmp_path / "other.bin"
    content = bytes(range(256)) * 4096
    mapped = []
    for file in (read, other):
        file.write_bytes(content)
        with file.open("rb") as handle:
            mapped.append(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        assert mapped[-1][:] == content
        assert resident_of(file) == 1024
    system_calls.forget_pages({str(read)})
    assert resident_of(read) == 0
    assert resident_of(other) == 1024
    assert mapped[0][:] == content


def test_ended_process_whose_parent_has_not_asked_for_it_does_not_run() -> None:
    assert system_calls.process_runs(os.getpid())
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    ended = os.posix_spawn(
        sys.executable,
        [sys.executable, "--version"],
        {},
        file_actions=silent,
    )
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # leave it to be asked for
    os.kill(ended, 0)  # a signal finds it still
    assert not system_calls.process_runs(ended)
    os.waitpid(ended, 0)
    assert not system_calls.process_runs(ended)
