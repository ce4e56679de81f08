"""Checkpoints of a run: which are complete, and their average (§6.1)."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .. import modeling_vanilla_transformer
from ..atomic_write import atomic_file, replace_folder, report_full_disk
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import DiskFull, UserError
from ..inference.loading import check_architecture, check_weights
from ..untrusted import read_json_object
from .run_folder import has_other_files, record_all_files, remove_written_folder, set_aside
from .run_state import on_branch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # maps each tensor to its shard
TRAINER_STATE = "trainer_state.json"
DATA_POSITION = "data_position.json"  # with token batches: where in the data to resume
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of PEFT; of further adapters in a folder each
FSDP_WEIGHTS = "pytorch_model_fsdp_0"  # accelerate's folder for SHARDED_STATE_DICT
STAGING_FOLDER = ".saving"  # a checkpoint is written here and renamed when it is complete


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's `output_dir` that were completely written, oldest first."""
    numbered = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _step(path))]
    return [path for _, path in sorted(numbered) if _is_complete(path)]


def branch_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run's current branch, oldest first."""
    return on_branch(run, complete_checkpoints(run))


def _step(path: Path) -> re.Match | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if (checkpoint / WEIGHTS).is_file() or (checkpoint / FSDP_WEIGHTS).is_dir():
        return True
    if (checkpoint / ADAPTER_WEIGHTS).is_file() or any(checkpoint.glob(f"*/{ADAPTER_WEIGHTS}")):
        return True
    try:
        return all(file.is_file() for file in _read_index(checkpoint / INDEX).values())
    except UserError:
        return False


def move_into_place(staged: Path, target: Path) -> None:
    """Sync a finished folder to disk, then rename it to `target`.

    A complete checkpoint of the same step is replaced. One that was pruned, or has files of the user, is set aside.
    """
    record_all_files(staged)
    for path in (*staged.rglob("*"), staged):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if os.path.lexists(target) and (target.is_symlink() or not _is_complete(target) or has_other_files(target)):
        set_aside(target)
    replace_folder(staged, target)


def remove_old_checkpoints(run: Path, limit: int, newest: Path, best: str | Path | None = None) -> None:
    """Keep the `limit` youngest complete checkpoints, and in any case the newest and the best.

    `newest` is named because checkpoints of an abandoned run may have higher step numbers. Files that no run wrote
    stay.
    """
    kept = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    others = [path for path in complete_checkpoints(run) if path.resolve() not in kept]
    others.sort(key=lambda path: (path / TRAINER_STATE).stat().st_mtime)
    for path in others[: max(0, len(others) + len(kept) - limit)]:
        remove_written_folder(path)


def remove_staging_folder(run: Path) -> None:
    """Delete the partial checkpoint that a crash or a full disk left. Checkpoints that were pruned later stay."""
    shutil.rmtree(run / STAGING_FOLDER, ignore_errors=True)


@contextmanager
def report_failed_save(run: Path, consequence: str, hint: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn a failed write of any library into a one-line error, and delete the partial checkpoint.

    Args:
        run: where the block writes. consequence: what is not saved. hint: what to do; None is `resume_hint`.

    Raises:
        UserError: the disk is full, or the folder is not writable.
    """
    try:
        with report_full_disk(run):
            yield
    except (DiskFull, PermissionError) as error:
        remove_staging_folder(run)
        raise DiskFull(f"{error}: {consequence}; {hint() if hint else resume_hint(run)}") from error


def resume_hint(run: Path) -> str:
    """For error messages: the last complete checkpoint, if any, and how to resume from it."""
    checkpoints = branch_checkpoints(run)
    if not checkpoints:
        return "no checkpoint was saved yet"
    return f"{checkpoints[-1]} is complete: resume with --resume_from_checkpoint true"


# Averaging

TensorFiles = Mapping[str, Path]  # tensor name → the file that contains it


def average_weights(checkpoints: Sequence[Path], target: Path) -> None:
    """Write the mean of several checkpoints' weights (§6.1 averages the last 5 or 20).

    One tensor is read at a time, so memory holds one model however many checkpoints there are. The mean is computed
    in float64 and stored in the dtype of the checkpoints. Tied weights are stored, and averaged, once.

    Args:
        checkpoints: folders or files with the same tensors; a folder's weights may be sharded, with an index.
        target: the safetensors file to write.

    Raises:
        UserError: no checkpoint, or two with different tensors.
    """
    if not checkpoints:
        raise UserError("there is no checkpoint to average")
    files = [_tensor_files(checkpoint) for checkpoint in checkpoints]
    shapes = [_shapes(each) for each in files]
    for checkpoint, other in zip(checkpoints, shapes, strict=True):
        different = sorted(dict(shapes[0].items() ^ other.items()))
        if different:
            raise UserError(f"{checkpoint} and {checkpoints[0]} cannot be averaged: they differ in {different[0]}")
    averaged = {name: _mean([each[name] for each in files], name) for name in shapes[0]}
    with atomic_file(target) as temporary:
        save_file(averaged, temporary, metadata={"format": "pt"})


def check_model_folder(folder: Path) -> None:
    """Refuse a folder whose weights are not those of the class that its config.json names; they are not read.

    Raises:
        UserError: what `check_architecture` and `check_tensors` raise. Models of other packages are not checked.
    """
    if read_json_object(folder / "config.json").get("model_type") != VanillaTransformerConfig.model_type:
        return
    config = VanillaTransformerConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0].removeprefix("FSDP")
    default = modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration
    model_class = getattr(modeling_vanilla_transformer, name, default)
    with torch.device("meta"):
        model = model_class(config)
    check_architecture(folder, model)
    check_tensors(model, folder)


def check_tensors(model: torch.nn.Module, checkpoint: Path) -> None:
    """Refuse a checkpoint whose tensors are not those of the model; `Trainer` would only warn.

    A checkpoint without whole weights, such as that of an adapter, is not checked. Tied weights may have any of their
    names.

    Raises:
        UserError: missing, unexpected or mismatched tensors.
    """
    if not any((checkpoint / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    names: dict[int, set[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), set()).add(name)
    saved = {name: tuple(shape) for name, (*shape, _) in _shapes(_tensor_files(checkpoint)).items()}
    info = {
        "missing_keys": [min(aliases) for aliases in names.values() if not aliases & saved.keys()],
        "unexpected_keys": saved.keys() - tensors.keys(),
        "mismatched_keys": [name for name in saved.keys() & tensors.keys() if saved[name] != tensors[name].shape],
    }
    check_weights(checkpoint, info)


def _tensor_files(checkpoint: Path) -> TensorFiles:
    if checkpoint.is_dir() and (checkpoint / INDEX).is_file() and not (checkpoint / WEIGHTS).is_file():
        return _read_index(checkpoint / INDEX)
    file = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
    return dict.fromkeys(_header(file), file)


def _read_index(index: Path) -> TensorFiles:
    """The tensors and shards that an index lists; a `UserError` if it is missing, damaged or leaves its folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name for name in names.values()):
            raise ValueError("it names files of other folders")
    except OSError:
        raise UserError(f"there is no {index}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged or no index: {error}") from None
    return {tensor: index.parent / name for tensor, name in names.items()}


def _shapes(files: TensorFiles) -> dict[str, tuple]:
    headers = {file: _header(file) for file in set(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise UserError(f"{file} has no {name}, which its index lists")
    return {name: headers[file][name] for name, file in files.items()}


def _header(file: Path) -> dict[str, tuple]:
    """Shape and dtype of each tensor in a file."""
    if not file.is_file():
        raise UserError(f"there is no {file}")
    try:
        tensors = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or no safetensors file: {error}") from None
    with tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dictionary)
        return {name: (*each.get_shape(), each.get_dtype()) for name, each in slices.items()}


def _mean(files: Sequence[Path], name: str) -> torch.Tensor:
    first = _read(files[0], name)
    total = first.to(torch.float64)
    for file in files[1:]:
        total += _read(file, name)
    return (total / len(files)).to(first.dtype)


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)
