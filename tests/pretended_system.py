"""A pretended Windows ("win32") or macOS ("darwin"): the package and the command find what they find there.

Names, modules and files that the system lacks are taken away from the package only. The libraries have other ways for
them, and on this machine only Linux's can run. Windows' rules for files hold for everybody.

  with pytest.MonkeyPatch.context() as patch:
      pretend(patch, "win32")
      main(["train", ...])

As a program (SYSTEM, a file for the results, a JSON list of commands) it runs commands with the real standard streams,
and writes the exit status or the traceback of each. The processes that they spawn pretend the same system.
"""

import builtins
import errno
import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import urllib.request
import warnings
from collections.abc import Callable
from multiprocessing.context import DefaultContext, SpawnContext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.system_names import lacking, names

PACKAGES = {"hf_vanilla_transformer", "vanilla_transformer_cli"}
POSIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
FILES_OF_LINUX = ("/proc", "/sys")
METHODS = {"win32": ["spawn"], "darwin": ["spawn", "fork", "forkserver"]}

# https://learn.microsoft.com/windows/win32/fileio/naming-a-file
PORTS = {f"{port}{number}" for port in ("COM", "LPT") for number in range(1, 10)}
RESERVED = {"CON", "PRN", "AUX", "NUL"} | PORTS
FORBIDDEN = set('<>:"|?*\\') | set(map(chr, range(32)))


def pretend(patch: pytest.MonkeyPatch, system: str) -> None:
    """Make this process one on `system`, until the patch is undone."""
    importlib.import_module(
        "psutil"
    )  # its part for Linux asks for names that are hidden afterwards
    for module in (os, signal):
        _hide_names(patch, module, lacking(module.__name__, system))
    hidden = {name for name in POSIX_MODULES if not names(name, system)}
    _hide_modules(patch, hidden | {"uvloop"} if system == "win32" else hidden)
    folders = (*FILES_OF_LINUX, "/dev/fd") if system == "win32" else FILES_OF_LINUX
    _hide_files(patch, folders)
    _spawn(patch, METHODS[system])
    if system == "win32":
        _use_rules_of_windows(patch)


def _top(name: str) -> str:
    """The package of a module."""
    package, _, _ = name.partition(".")
    return package


def _package_of(frame: Any) -> str:
    """The package whose function a frame is of."""
    return _top(frame.f_globals.get("__name__", ""))


def _asks(frame: Any) -> bool:
    """A function of the package makes a call, by itself or by the standard library."""
    between = {"pathlib", "genericpath", "posixpath", "os", _top(__name__)}
    while frame is not None and _package_of(frame) in between:
        frame = frame.f_back
    return frame is not None and _package_of(frame) in PACKAGES


def _hide_names(patch: pytest.MonkeyPatch, module: ModuleType, hidden: frozenset[str]) -> None:
    kept = {name: getattr(module, name) for name in hidden if hasattr(module, name)}

    def get(name: str) -> Any:
        if name in kept and _package_of(sys._getframe(1)) not in PACKAGES:
            return kept[name]
        raise AttributeError(
            f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module
        )

    patch.setattr(module, "__getattr__", get, raising=False)
    for name in kept:
        patch.delattr(module, name)


def _hide_modules(patch: pytest.MonkeyPatch, hidden: set[str]) -> None:
    load = builtins.__import__

    def load_others(name: str, scope: Any = None, *more: Any, **named: Any) -> Any:
        caller = _top((scope or {}).get("__name__", ""))
        if _top(name) in hidden and (caller in PACKAGES or name == "uvloop"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, scope, *more, **named)

    patch.setattr(builtins, "__import__", load_others)


def _hide_files(patch: pytest.MonkeyPatch, folders: tuple[str, ...]) -> None:
    def hide(path: Any = ".", *_: Any, **__: Any) -> None:
        is_hidden = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folders)
        if is_hidden and _asks(sys._getframe(2)):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    for name in ("stat", "listdir", "scandir"):
        _check_first(patch, os, name, hide)
    for module in (io, builtins):
        _check_first(patch, module, "open", hide)


def _check_first(
    patch: pytest.MonkeyPatch, module: ModuleType, name: str, check: Callable[..., object]
) -> None:
    """Make a function of a module call `check` with its arguments, which may raise an error."""
    call = getattr(module, name)

    def checked(*arguments: Any, **named: Any) -> Any:
        check(*arguments, **named)
        return call(*arguments, **named)

    patch.setattr(module, name, checked)


def _spawn(patch: pytest.MonkeyPatch, methods: list[str]) -> None:
    get_context = multiprocessing.get_context

    def get(method: str | None = None) -> Any:
        if method is not None and method not in methods:
            raise ValueError(f"cannot find context for {method!r}")
        return get_context(method)

    context = multiprocessing.context._default_context  # type: ignore[attr-defined]
    assert isinstance(context, DefaultContext)
    patch.setattr(context, "_actual_context", SpawnContext())
    patch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    patch.setattr(multiprocessing, "get_context", get)


def windows_error(number: int, path: Any) -> PermissionError:
    """Windows' error about a file that is in use (32) or must not be made (5)."""
    error = PermissionError(errno.EACCES, f"[WinError {number}]", str(path))
    error.winerror = number  # type: ignore[attr-defined]
    return error


LISTDIR = os.listdir
READLINK = os.readlink
REALPATH = os.path.realpath
OPEN_TEXT = open


def _open_files() -> set[str]:
    """The files that this process has open or mapped."""
    found = set()
    for descriptor in LISTDIR("/proc/self/fd"):
        try:
            found.add(READLINK(f"/proc/self/fd/{descriptor}"))
        except OSError:  # closed
            continue
    with OPEN_TEXT("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            if "/" in line:
                *_, path = line.split(maxsplit=5)
                found.add(path.rstrip())
    return found


def _refuse_open(path: Any, dir_fd: int | None = None) -> None:
    """Refuse to delete or rename a file that is open, or a folder with one."""
    full = path
    if dir_fd is not None:
        full = os.path.join(READLINK(f"/proc/self/fd/{dir_fd}"), path)
    full = REALPATH(full)
    if any(each == full or each.startswith(f"{full}{os.sep}") for each in _open_files()):
        raise windows_error(32, path)


def _refuse_name(path: Any) -> None:
    """Refuse a name that no file of Windows has."""
    name = os.path.basename(os.fsdecode(path))
    stem, _, _ = name.partition(".")
    is_reserved = stem.rstrip().upper() in RESERVED
    ends_wrong = name.strip(".") and name.endswith((".", " "))
    if is_reserved or ends_wrong or set(name) & FORBIDDEN:
        raise OSError(errno.EINVAL, "[WinError 123] the file name is incorrect", str(path))


def _use_rules_of_windows(patch: pytest.MonkeyPatch) -> None:
    import fcntl
    import shutil

    def opens(path: Any, flags: int, *_: Any, **__: Any) -> None:
        if flags & os.O_CREAT:
            _refuse_name(path)
        if _asks(sys._getframe(2)) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def syncs(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def moves(source: Any, target: Any, **_: Any) -> None:
        _refuse_name(target)
        _refuse_open(source)
        _refuse_open(target)

    def moves_nowhere_else(source: Any, target: Any, **_: Any) -> None:
        moves(source, target)
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, "[WinError 183]", str(target))

    def writes(file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        if not isinstance(file, int) and set(mode) & set("wax"):
            _refuse_name(file)

    def makes(path: Any, *_: Any, **__: Any) -> None:
        _refuse_name(path)

    def links(source: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "[WinError 1314] a required privilege is not held", str(source))

    for name, check in {
        "open": opens,
        "fsync": syncs,
        "unlink": _refuse_open,
        "remove": _refuse_open,
        "mkdir": makes,
        "replace": moves,
        "rename": moves_nowhere_else,
        "symlink": links,
    }.items():
        _check_first(patch, os, name, check)
    for module in (io, builtins):
        _check_first(patch, module, "open", writes)
    patch.setattr(shutil, "_use_fd_functions", False)


# A server that has one request


def _ask_then_stop(port: str, answers: list[Any], has_ended: threading.Event) -> None:
    fields = {"q": "two hundred", "source": "en", "target": "de"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/translate",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    while not answers and not has_ended.wait(0.05):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(json.load(answer))
        except OSError as error:
            if not isinstance(getattr(error, "reason", None), ConnectionRefusedError):
                answers.append(repr(error))
    if not has_ended.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def run(arguments: list[str]) -> Any:
    """The exit status of a command, or its traceback. A server gets one request, and then Ctrl-C."""
    from vanilla_transformer_cli.main import main

    answers: list[Any] = []
    has_ended = threading.Event()
    if arguments[0] == "serve" and "--port" in arguments:
        port = arguments[arguments.index("--port") + 1]
        request = threading.Thread(
            target=_ask_then_stop,
            args=(port, answers, has_ended),
            daemon=True,
        )
        request.start()
    try:
        main(arguments)
    except SystemExit as leaving:
        return [leaving.code or 0, *answers]
    except BaseException:
        return [traceback.format_exc()]
    finally:
        has_ended.set()
    return ["did not exit"]


if __name__ in ("__main__", "__mp_main__") and len(sys.argv) == 4:
    warnings.filterwarnings("error", category=EncodingWarning, module="|".join(PACKAGES))
    if sys.argv[1] != "linux":
        pretend(pytest.MonkeyPatch(), sys.argv[1])
    if __name__ == "__main__":
        _, _, file, commands = sys.argv
        results = [run(each) for each in json.loads(commands)]
        Path(file).write_text(json.dumps(results), encoding="utf-8")
