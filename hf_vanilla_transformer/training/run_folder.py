"""The folder of a run: which files in it a run wrote, one run at a time, and the replacement of an old run.

Each run and each checkpoint lists the files that were written into it, in `MANIFEST`. Only listed files are ever
deleted or replaced; whatever else is in the folder is the user's.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..atomic_write import atomic_file
from ..errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = ".files.json"  # relative path: digest of a text, which a person may edit; null for other files
LOCK = ".lock"
# What a finished run always has.
MODEL_FOLDER = ("config.json", "generation_config.json", "README.md", "all_results.json", "trainer_state.json")
_TEXT = {".md", ".json", ".jinja", ".txt", ".py"}
# Files of runs that have no manifest because an earlier version wrote them. A card may have been edited.
_EARLIER = (
    *("*.json", "*.safetensors", "*.jinja", "*.pt", "*.pth", "*.bin", "*_vanilla_transformer.py", "curve.png"),
    *("attention.png", "target_tokenizer/*", "pytorch_model_fsdp_0/*", "optimizer_0/*"),
)


# 1. Files that a run wrote


def record_files(folder: Path, names: Iterable[str]) -> None:
    """Add files, by their paths relative to `folder`, to its manifest."""
    recorded = _recorded(folder) | {name: _digest(folder / name) for name in names}
    with atomic_file(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def record_all_files(folder: Path) -> None:
    """Make a manifest of everything in `folder`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    record_files(folder, [path.relative_to(folder).as_posix() for path in paths])


def written_files(folder: Path) -> list[str]:
    """The files that a run wrote into `folder` and that have not been edited, replaced or linked since."""
    recorded = _recorded(folder)
    if not recorded and (folder / "trainer_state.json").is_file():
        paths = (path for pattern in _EARLIER for path in folder.glob(pattern))
        recorded = {path.relative_to(folder).as_posix(): None for path in paths}
    return [name for name, digest in recorded.items() if _is_unchanged(folder, name, digest)]


def remove_written_files(folder: Path) -> None:
    """Delete what a run wrote into `folder`, and the folders that this leaves empty; `folder` itself stays."""
    parents = set()
    # A checkpoint without its state is incomplete: an interrupted deletion leaves none that looks complete.
    for name in sorted(written_files(folder), key=lambda name: name != "trainer_state.json"):
        (folder / name).unlink(missing_ok=True)
        parents |= set((folder / name).relative_to(folder).parents)
    (folder / MANIFEST).unlink(missing_ok=True)
    for parent in sorted(parents - {Path(".")}, key=lambda path: -len(path.parts)):
        _remove_if_empty(folder / parent)


def remove_written_folder(folder: Path) -> None:
    """Delete what a run wrote into `folder`, then `folder` if it is empty; a symbolic link is left alone."""
    if folder.is_dir() and not folder.is_symlink():
        remove_written_files(folder)
        _remove_if_empty(folder)


def has_other_files(folder: Path) -> bool:
    """Whether `folder` has something that no run wrote, or that was changed since."""
    written = {MANIFEST, *written_files(folder)}
    return any(path.relative_to(folder).as_posix() not in written for path in folder.rglob("*") if not path.is_dir())


def set_aside(path: Path) -> None:
    """Rename something that is not the run's and whose name the run needs, to NAME.bak, and report it."""
    numbers = [path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000)]
    target = next(each for each in numbers if not os.path.lexists(each))
    path.rename(target)
    print(f"kept: {path} was not written by this run, or was changed; it is now {target}", flush=True)


def move_into_run(staged: Path, run: Path) -> None:
    """Rename each file in `staged` into the run's folder and record it; what is not the run's is set aside."""
    names = [path.relative_to(staged).as_posix() for path in sorted(staged.rglob("*")) if path.is_file()]
    make_way(run, names)
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / name, run / name)
    record_files(run, names)


def make_way(run: Path, names: Iterable[str]) -> None:
    """Set aside what has one of the names of files that are about to be written, unless the run wrote it."""
    written = set(written_files(run))
    for name in names:
        for part in reversed((run / name).relative_to(run).parents[:-1]):
            if (run / part).is_symlink() or (os.path.lexists(run / part) and not (run / part).is_dir()):
                set_aside(run / part)
        if os.path.lexists(run / name) and name not in written:
            set_aside(run / name)


def _recorded(folder: Path) -> dict[str, str | None]:
    try:
        recorded = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(recorded, dict):
        return {}
    # A path that leaves the folder was written by somebody else.
    return {name: digest for name, digest in recorded.items() if ".." not in name and not os.path.isabs(name)}


def _digest(path: Path) -> str | None:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.suffix in _TEXT else None


def _is_unchanged(folder: Path, name: str, digest: str | None) -> bool:
    path = folder / name
    parents = [folder / parent for parent in Path(name).parents if parent != Path(".")]
    if path.is_symlink() or not path.is_file() or any(parent.is_symlink() for parent in parents):
        return False
    return digest is None or digest == _digest(path)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty, or a mount point
        folder.rmdir()


# 2. One run at a time


class RunLock:
    """The right to write into a run's folder, held until the process ends.

    A record lock (`fcntl.lockf`): the system releases it when the process dies, however it dies, child processes do
    not inherit it, and NFS has it too. On a file system without locks, the file itself tells who is training.

    Args:
        run: the folder; created if necessary, and removed by `release` if it is still empty.
    """

    def __init__(self, run: Path):
        self.run, self.file = run, run / LOCK
        self._descriptor: int | None = None
        self._created: list[Path] = []

    def acquire(self) -> str | None:
        """Take the lock. Returns None, or in one line why it cannot be taken."""
        self._created = [folder for folder in (self.run, *self.run.parents) if not folder.exists()]
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            return self._lock()
        except OSError as error:
            self.release()
            return f"output_dir {self.run} cannot be written: {error.strerror or error}"

    def _lock(self) -> str | None:
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            holder = _read_holder(descriptor)
            if not _lock_file(descriptor, holder):
                os.close(descriptor)
                return (
                    f"output_dir {self.run}: process {holder.get('process', '?')} on {holder.get('host', '?')} has "
                    f"been training in it since {holder.get('since', '?')}; end it, or choose another folder"
                )
            # The holder of before may have removed the file between `open` and the lock.
            if self.file.exists() and os.path.samestat(os.fstat(descriptor), self.file.stat()):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        return None

    def release(self) -> None:
        """Release the lock, and remove the folders that `acquire` created if nothing was written into them."""
        if self._descriptor is not None:
            self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
        for folder in self._created:
            _remove_if_empty(folder)
        self._created = []


def _read_holder(descriptor: int) -> dict[str, object]:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _lock_file(descriptor: int, holder: dict[str, object]) -> bool:
    if fcntl is not None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            return False
        except OSError:  # a file system without locks
            pass
        else:
            return True
    return not _is_alive(holder)


def _is_alive(holder: dict[str, object]) -> bool:
    """Whether the process that a lock file names runs on this host; other hosts cannot be asked."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int) or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


# 3. A new run


def check_new_run(run: Path, overwrite: bool) -> None:
    """Raise a UserError if a new run in this folder would replace what is not to be replaced.

    Args:
        run: the folder, which may not exist yet.
        overwrite: whether an old run may be replaced. It stays until the new one has something to replace it with.
    """
    if holds_run(run):
        if not overwrite:
            raise UserError(
                f"output_dir {run} already has a run: resume it (--resume_from_checkpoint true), "
                f"replace it (--overwrite_output_dir true) or choose another folder"
            )
        if not _is_of_a_run(run):
            raise UserError(f"output_dir {run} has a model that no run wrote: choose another folder")
        return
    for name in (*MODEL_FOLDER, "target_tokenizer", "tokenizer.json", "tokenizer_config.json"):
        if os.path.lexists(run / name):
            raise UserError(f"output_dir {run}: its {name} would be replaced: choose another folder, or move the file")


def holds_run(run: Path) -> bool:
    """Whether the folder has weights or checkpoints."""
    return any(os.path.lexists(path) for path in (run / MANIFEST, *run.glob("model*.safetensors"), *_checkpoints(run)))


def remove_run(run: Path) -> None:
    """Delete the files of an old run and of its checkpoints, and nothing else."""
    for checkpoint in _checkpoints(run):
        remove_written_folder(checkpoint)
    remove_written_files(run)


def _is_of_a_run(run: Path) -> bool:
    return (
        any((folder / "trainer_state.json").is_file() for folder in (run, *_checkpoints(run)))
        or (run / MANIFEST).is_file()
    )


def _checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
