"""Atomic writing: a file or folder is written under a temporary name next to its target, and renamed when complete."""

import errno
import os
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import DiskFull, UserError
from .system_calls import process_namespace, process_runs, rename_to_new, replace

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the allowed size (ulimit -f)",
    0: "no space left on the disk, or within a quota or ulimit -f",
}
# The messages of libraries that do not pass an OSError on: Rust (tokenizers, safetensors), Arrow, torch.save.
_SIGNS = {
    errno.ENOSPC: ("No space left", "os error 28", "code: 28"),
    errno.EDQUOT: ("Disk quota exceeded", "os error 122"),
    errno.EFBIG: ("File too large", "os error 27"),
    0: ("unexpected pos", "PytorchStreamWriter failed"),  # torch.save does not say which
}


@contextmanager
def report_full_disk(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the error of any library about a full disk, a quota or a limit into a `DiskFull` that names the folder.

    If the error names a file, the folder of that file is reported.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = full_disk_reason(error)
        if reason is None:
            raise
        # Copying names source and target.
        file = getattr(error, "filename2", None) or getattr(error, "filename", None)
        raise DiskFull(f"{Path(os.fsdecode(file)).parent if file else folder}: {reason}") from error


def full_disk_reason(error: BaseException | None) -> str | None:
    """Why a write failed, if the disk is the reason for the error or for one that caused it, or None."""
    reasons: list[int] = []
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            reasons.append(error.errno)
        reasons += [
            number for number, signs in _SIGNS.items() if any(sign in str(error) for sign in signs)
        ]
        error = error.__cause__ or error.__context__
    # The last is the first that was raised: torch.save replaces the operating system's error.
    return _FULL[reasons[-1]] if reasons else None


def write_first(path: Path, text: str) -> str:
    """Write a file of text, if no process has written it before, and return its text. Its folder may be new.

    Of several processes that write it at the same time, one does, and all get its text.
    """
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(_mark_of_process(path) + path.name)
        try:
            with report_full_disk(path.parent):
                temporary.write_text(text, encoding="utf-8")
                rename_to_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path next to `path`: renamed to `path` when the block ends, deleted if it raises.

    It has the suffix of `path`, for libraries that choose a format by it. A device or a named pipe cannot be replaced,
    so that it is written directly.

    Raises:
        UserError: its folder does not exist.
        DiskFull: the file could not be written for want of space.
    """
    target = Path(path)
    require_parent(target)
    if target.exists() and not target.is_file():
        yield target
        return
    # Not mkstemp: its files have mode 0600 whatever the umask is.
    temporary = target.with_name(_mark_of_process(target) + target.name)
    try:
        with report_full_disk(target.parent):
            yield temporary
            share_files(temporary)
            replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def require_parent(path: Path) -> None:
    """Refuse a file to be written in a folder that does not exist, which may be a mistyped one."""
    if not path.parent.exists():
        raise UserError(f"{path}: there is no folder {path.parent}: make it, or name another file")


@contextmanager
def new_folder(output: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary path next to `output` to write a folder to: renamed to `output` when the block ends."""
    require_new(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    mark = _mark_of_process(output)
    with tempfile.TemporaryDirectory(
        suffix=f".{output.name}", prefix=mark[:-1], dir=output.parent
    ) as temporary:
        folder = Path(temporary) / "new"
        with report_full_disk(output.parent):
            yield folder
            replace_folder(folder, output)


def _mark_of_process(target: Path) -> str:
    """The start of a temporary name next to `target`. Removes what a killed process of this host has left there."""
    host = f"{zlib.crc32(process_namespace().encode()):08x}"
    left = re.compile(rf"\.{host}-(\d{{1,7}})-\w+\.{re.escape(target.name)}")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        match = left.fullmatch(path.name)
        if match is None or process_runs(int(match[1])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return f".{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}."


def require_new(output: Path, overwrite: bool) -> None:
    """Raise a UserError if `output` is a file, or a folder that is not empty and not to be overwritten."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file: name a folder")
    if not overwrite and output.exists() and any(output.iterdir()):
        raise UserError(f"output {output} exists already: name a new folder, or give --overwrite")


def require_apart(output: str | Path, source: str | Path) -> None:
    """Refuse an output that contains the model's folder: replacing it would delete the model."""
    folder = Path(source).resolve()
    if Path(output).resolve() in (folder, *folder.parents):
        raise UserError(f"output {output} contains the model itself: name a new folder")


def share_files(path: Path) -> None:
    """Give a file, or all of a folder, the mode that the umask allows. safetensors writes for their owner alone."""
    for file in (path, *path.rglob("*")):
        if file.is_file() and not file.stat().st_mode & 0o077:
            probe = file.with_name(f".{uuid.uuid4().hex[:8]}")
            probe.touch()
            file.chmod(probe.stat().st_mode)
            probe.unlink()


def replace_folder(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. An old `target` is deleted afterwards, or restored if renaming fails."""
    share_files(folder)
    if not target.exists():
        replace(folder, target)
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        old = Path(temporary) / "old"
        replace(target, old)
        try:
            replace(folder, target)
        except BaseException:
            replace(old, target)
            raise
