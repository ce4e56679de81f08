"""Checkpoints of a run: which are whole, how several become one (§6.1), how finished files appear."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..atomic_write import atomic_file, replace_folder
from ..errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # which tensor is in which of several files
STATE = "trainer_state.json"
POSITION = "data_position.json"  # where in the data a checkpoint is, for batches of tokens
SHARDS = "pytorch_model_fsdp_0"  # accelerate's folder of weights that several processes wrote
WAITING_ROOM = ".saving"  # where a checkpoint is written before it appears


def whole_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, oldest first.

    Args:
        run: the `output_dir` of a training run.
    """
    numbered = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _step(path))]
    return [path for _, path in sorted(numbered) if _is_whole(path)]


def _step(path: Path) -> re.Match | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if (checkpoint / WEIGHTS).is_file() or (checkpoint / SHARDS).is_dir():
        return True
    try:
        return all(file.is_file() for file in _indexed(checkpoint / INDEX).values())
    except UserError:
        return False


def move_in(beside: Path, target: Path) -> None:
    """Let a finished folder take its place, at once; what was written is on the disk before.

    Args:
        beside: the folder, on the same file system.
        target: its place; a folder that is there already (of an earlier attempt at the same step) goes.
    """
    for path in (*beside.rglob("*"), beside):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    replace_folder(beside, target)


def remove_old_checkpoints(run: Path, limit: int, newest: Path, best: str | Path | None = None) -> None:
    """Keep the `limit` youngest whole checkpoints, the newest and the best one among them.

    Args:
        run: the folder that they are in.
        limit: how many to keep, at least; 1 keeps the newest and the best.
        newest: the one that was just written: it stays even if those of an abandoned run have higher numbers.
        best: the best one so far, if there is one.
    """
    kept = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    others = [path for path in whole_checkpoints(run) if path.resolve() not in kept]
    others.sort(key=lambda path: (path / STATE).stat().st_mtime)
    for path in others[: max(0, len(others) + len(kept) - limit)]:
        shutil.rmtree(path, ignore_errors=True)


def remove_broken_checkpoints(run: Path) -> None:
    """Delete what a crash or a full disk left of a checkpoint, so that it is neither resumed from nor counted."""
    shutil.rmtree(run / WAITING_ROOM, ignore_errors=True)
    whole = set(whole_checkpoints(run))
    for path in run.glob("checkpoint-*"):
        if _step(path) and path not in whole:
            shutil.rmtree(path, ignore_errors=True)


# What the operating system, safetensors and torch.save say of a full disk.
_DISK_FULL = "No space left", "code: 28", "unexpected pos", "PytorchStreamWriter failed"


@contextmanager
def disk_may_fill(run: Path, consequence: str) -> Iterator[None]:
    """Turn a failure to write, whichever library met it, into one line; what was half written is deleted.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = any(sign in str(error) for sign in _DISK_FULL) or shutil.disk_usage(run).free < 2**20
        if not (full or isinstance(error, PermissionError)):
            raise
        remove_broken_checkpoints(run)
        reason = "no space left on the disk" if full else str(error)
        raise UserError(f"{reason}: {consequence}; {how_to_resume(run)}") from error


def how_to_resume(run: Path) -> str:
    """In words, from which checkpoint, if there is one."""
    checkpoints = whole_checkpoints(run)
    if not checkpoints:
        return "no checkpoint was saved yet"
    return f"{checkpoints[-1]} is whole: go on with --resume_from_checkpoint true"


Places = Mapping[str, Path]  # tensor → the file that it is in


def average_weights(checkpoints: Sequence[Path], target: Path) -> None:
    """Write the mean of several checkpoints' weights (§6.1 averages the last 5 or 20).

    One tensor is read at a time, so that memory holds one model however many there are; the mean is taken in
    float64 and stored in the checkpoints' own type. Tied weights stand in the file once, and so count once.

    Args:
        checkpoints: folders or files with the same tensors; a folder's may lie in several files, with an index.
        target: the file to write, safetensors.

    Raises:
        UserError: no checkpoint, or two that do not hold the same tensors.
    """
    if not checkpoints:
        raise UserError("there is no checkpoint to average")
    places = [_places(checkpoint) for checkpoint in checkpoints]
    shapes = [_shapes(each) for each in places]
    for checkpoint, other in zip(checkpoints, shapes, strict=True):
        different = sorted(dict(shapes[0].items() ^ other.items()))
        if different:
            raise UserError(f"{checkpoint} and {checkpoints[0]} cannot be averaged: they differ in {different[0]}")
    averaged = {name: _mean([each[name] for each in places], name) for name in shapes[0]}
    with atomic_file(target) as beside:
        save_file(averaged, beside, metadata={"format": "pt"})


def _places(checkpoint: Path) -> Places:
    if checkpoint.is_dir() and (checkpoint / INDEX).is_file() and not (checkpoint / WEIGHTS).is_file():
        return _indexed(checkpoint / INDEX)
    file = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
    return dict.fromkeys(_header(file), file)


def _indexed(index: Path) -> Places:
    """What an index of weights in several files says.

    Raises:
        UserError: there is none, it is damaged, or it names a file that is not beside it.
    """
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name for name in names.values()):
            raise ValueError("it names files of other folders")
    except OSError:
        raise UserError(f"there is no {index}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged or no index: {error}") from None
    return {tensor: index.parent / name for tensor, name in names.items()}


def _shapes(places: Places) -> dict[str, tuple]:
    headers = {file: _header(file) for file in set(places.values())}
    for name, file in places.items():
        if name not in headers[file]:
            raise UserError(f"{file} has no {name}, which the index beside it says is there")
    return {name: headers[file][name] for name, file in places.items()}


def _header(file: Path) -> dict[str, tuple]:
    """Shape and type of each tensor in a file."""
    if not file.is_file():
        raise UserError(f"there is no {file}")
    try:
        tensors = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or no safetensors file: {error}") from None
    with tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no dictionary)
        return {name: (*each.get_shape(), each.get_dtype()) for name, each in slices.items()}


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def _mean(files: Sequence[Path], name: str) -> torch.Tensor:
    first = _read(files[0], name)
    total = first.to(torch.float64)
    for file in files[1:]:
        total += _read(file, name)
    return (total / len(files)).to(first.dtype)
