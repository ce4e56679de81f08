"""A run's folder and checkpoints: complete ones, atomic writing, checks before a resume, their average (§6.1)."""

import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from ...utils.atomic_write import atomic_file, replace_folder, report_full_disk, share_files
from ...utils.errors import DiskFull, UserError
from ...utils.finite import require_finite
from ...utils.system_calls import release_and_remove, replace, sync_to_disk
from ...utils.untrusted import (
    one_line,
    read_json_object,
    read_safetensors_header,
    require_file,
)
from .distributed import (
    broadcast_from_main,
    errors_on_main_rank_only,
    is_main_rank,
    lost_rank,
    print_main,
)
from .fingerprint import read_run_state

WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of PEFT, which gives further adapters a folder each
FSDP_WEIGHTS = "pytorch_model_fsdp_0"  # accelerate's folder for SHARDED_STATE_DICT
TRAINER_STATE = "trainer_state.json"
SCHEDULER = "scheduler.pt"
# By `Trainer`, by FSDP with FULL_STATE_DICT, by FSDP with SHARDED_STATE_DICT (a folder).
OPTIMIZERS = "optimizer.pt", "optimizer.bin", "optimizer_0"
STAGING_FOLDER = ".saving"  # a checkpoint is written here and renamed when it is complete


# Complete checkpoints


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in `run` that were completely written, oldest first."""
    matches = (
        (re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in run.glob("checkpoint-*")
    )
    numbered = [(int(match[1]), path) for match, path in matches if match]
    return [path for _, path in sorted(numbered) if _is_complete(path)]


def last_checkpoint(run: Path) -> Path:
    """The last complete checkpoint in `run`, which must have one."""
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        raise UserError(
            f"output_dir {run} has no complete checkpoint to resume from: start without it"
        )
    return checkpoints[-1]


def require_last(checkpoint: Path, run: Path) -> None:
    """Refuse to resume `run` from one of its older checkpoints: the newer ones would be of a different run."""
    if checkpoint.resolve().parent == run.resolve():
        last = last_checkpoint(run)
        if checkpoint.resolve() != last.resolve():
            raise UserError(
                f"resume_from_checkpoint {checkpoint}: {run} already has {last.name}; give a new output_dir to "
                "continue from the older checkpoint"
            )


def _is_complete(checkpoint: Path) -> bool:
    adapters = [*checkpoint.glob(ADAPTER_WEIGHTS), *checkpoint.glob(f"*/{ADAPTER_WEIGHTS}")]
    try:
        read_json_object(checkpoint / TRAINER_STATE)
    except (OSError, UserError):
        return False
    weights = (checkpoint / WEIGHTS).is_file() or (checkpoint / FSDP_WEIGHTS).is_dir()
    return weights or bool(adapters)


# Writing


def move_into_place(staged: Path, target: Path) -> None:
    """Sync a finished folder to disk, then rename it to `target`."""
    for path in (*staged.rglob("*"), staged):
        sync_to_disk(path)
    replace_folder(staged, target)


def remove_staging_folder(run: Path) -> None:
    """Delete the partial checkpoint that a crash or a full disk left in `run`."""
    shutil.rmtree(run / STAGING_FOLDER, ignore_errors=True)


@contextmanager
def report_failed_save(run: Path, consequence: str) -> Iterator[None]:
    """Turn a failed write, the loss of a rank or a full GPU into one line with `consequence`.

    Rank 0 deletes a partial file.
    """
    try:
        with report_full_disk(run):
            try:
                yield
            except CheckpointException as error:
                # Contains the errors of all ranks, and is no Exception.
                raise RuntimeError(str(error)) from error
    except (DiskFull, PermissionError) as error:
        if is_main_rank():
            remove_staging_folder(run)
        raise DiskFull(f"{error}: {consequence}; {resume_hint(run)}") from error
    except torch.OutOfMemoryError as error:
        remedy = "lower max_tokens_per_batch or per_device_train_batch_size"
        raise UserError(
            f"{one_line(error)}: {consequence}; {remedy}; {resume_hint(run)}"
        ) from error
    except RuntimeError as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise UserError(f"{lost}: {consequence}; {resume_hint(run)}") from error


def resume_hint(run: Path) -> str:
    """The end of an error message: the last complete checkpoint, and how to resume from it."""
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        return "no checkpoint was saved yet"
    return f"{checkpoints[-1]} is complete: resume with --resume_from_checkpoint true"


# Resuming


def require_readable(checkpoint: Path) -> None:
    """Refuse a checkpoint whose files of settings and weights are damaged or missing, as in a partial copy."""
    for file in sorted(checkpoint.rglob("*")):
        try:
            if file.suffix == ".json":
                read_json_object(file)
            elif file.suffix == ".safetensors":
                read_safetensors_header(file)
        except UserError as error:
            raise UserError(f"{error}: {_remedy(checkpoint)}") from None
    for name in read_run_state(checkpoint).files:
        if not (checkpoint / name).is_file():
            raise UserError(f"{checkpoint} has no {name}: {_remedy(checkpoint)}")


def require_training_state(checkpoint: Path, processes: int) -> None:
    """Refuse a checkpoint without optimizer, schedule or random states of all processes, or with damaged ones.

    `Trainer` would silently start them anew: Adam's moments, the warm-up, the random numbers of dropout.
    """
    optimizer = next((name for name in OPTIMIZERS if (checkpoint / name).exists()), OPTIMIZERS[0])
    random_states = [
        path.name
        for path in checkpoint.iterdir()
        if re.fullmatch(r"rng_state(_\d+)?\.pth", path.name)
    ]
    for name in (optimizer, SCHEDULER, *(sorted(random_states) or ["rng_state.pth"])):
        file = checkpoint / name
        if not file.exists():
            raise UserError(
                f"{checkpoint} has no {name}, so the run cannot continue as it was (save_only_model writes none): "
                "resume from a checkpoint that has it"
            )
        if file.is_file():
            _require_whole(file)
    if len(random_states) != processes:
        print_main(
            f"{checkpoint} was written by {len(random_states)} processes and is resumed by {processes}: "
            "the random numbers of dropout will differ"
        )


def _require_whole(file: Path) -> None:
    """`torch.save` writes a zip archive: a cut file has no directory, a changed one a wrong checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
        raise UserError(f"{file} is damaged ({one_line(error)}): {_remedy(file.parent)}") from None
    if broken is not None:
        raise UserError(f"{file} is damaged (checksum of {broken}): {_remedy(file.parent)}")


def _remedy(checkpoint: Path) -> str:
    return f"delete {checkpoint.name} to resume from the checkpoint before it"


# Averaging


def average_weights(checkpoints: Sequence[Path], target: Path) -> None:
    """Write the mean of several checkpoints' weights (§6.1 averages the last 5 or 20).

    One tensor is read at a time, so memory for one model is enough. The mean is computed in float64 and stored in the
    dtype of the checkpoints. Tied weights are stored and averaged once.

    Args:
        checkpoints: folders with `model.safetensors`, or files, with the same tensors.
        target: the safetensors file to write.

    Raises:
        UserError: no checkpoint, or two with different tensors.
    """
    if not checkpoints:
        raise UserError("there is no checkpoint to average")
    files = [each / WEIGHTS if each.is_dir() else each for each in checkpoints]
    headers = [_shapes(file) for file in files]
    for checkpoint, other in zip(checkpoints, headers, strict=True):
        different = sorted(dict(headers[0].items() ^ other.items()))
        if different:
            raise UserError(
                f"{checkpoint} and {checkpoints[0]} cannot be averaged: they differ in {different[0]}"
            )
    averaged = {name: _mean(files, name) for name in headers[0]}
    with atomic_file(target) as temporary:
        save_file(averaged, temporary, metadata={"format": "pt"})


def _shapes(file: Path) -> dict[str, tuple]:
    """Shape and dtype of each tensor in a file."""
    header = read_safetensors_header(require_file(file))
    return {name: (*each["shape"], each["dtype"]) for name, each in header.items()}


def _mean(files: Sequence[Path], name: str) -> torch.Tensor:
    total: Any = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
        require_finite([(name, tensor)], file, "average other checkpoints")
        total = total + tensor.to(torch.float64)
    return (total / len(files)).to(tensor.dtype)


# The folder of a run: new, empty, or with checkpoints of this run, and used by one run at a time

LOCK = ".lock"
# Of fine-tuning: the base model's scores, kept for a run that is resumed.
SCORES_BEFORE = "scores_before.json"
# Names in the folder of a run that ended before its first checkpoint. `runs` has TensorBoard's logs.
_BEFORE_SAVING = {LOCK, STAGING_FOLDER, SCORES_BEFORE, "runs"}


@contextmanager
def one_run_at_a_time(run: Path) -> Iterator[None]:
    """Create the folder if necessary and lock it until the block ends. A folder that stays empty is removed."""
    lock = FileLock(run / LOCK, timeout=0)
    created = [folder for folder in (run, *run.parents) if not folder.exists()]

    def acquire() -> str | None:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            return f"output_dir {run}: a process is already training in it; end it, or choose a different folder"
        except FileExistsError:
            return f"output_dir {run} is a file: name a folder"
        except OSError as error:
            return f"output_dir {run} cannot be written: {error.strerror or error}"
        return None

    try:
        with errors_on_main_rank_only():
            if refusal := broadcast_from_main(acquire):
                raise UserError(refusal)
        yield
    finally:
        if lock.is_locked:
            release_and_remove(lock)
        for folder in created:
            with suppress(OSError):  # not empty
                folder.rmdir()


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names: true, false, auto (true if there is one), or a path."""
    if resume.lower() == "true" or (resume.lower() == "auto" and complete_checkpoints(run)):
        checkpoint = last_checkpoint(run)
        print_main(f"resuming from {checkpoint}")
        require_readable(checkpoint)
        return checkpoint
    if resume.lower() in ("false", "auto"):
        require_new_folder(run)
        return None
    checkpoint = Path(resume)
    if checkpoint not in complete_checkpoints(checkpoint.parent):
        raise UserError(
            f"resume_from_checkpoint {resume} is no complete checkpoint (`true` resumes from the last)"
        )
    if checkpoint.resolve().parent == run.resolve():
        require_last(checkpoint, run)
    else:
        require_new_folder(run)
    require_readable(checkpoint)
    return checkpoint


def require_new_folder(run: Path) -> None:
    """Refuse a folder for a new run that has files."""
    names = sorted(set(os.listdir(run)) - _BEFORE_SAVING) if run.is_dir() else []
    if names:
        resume = (
            "resume its run (--resume_from_checkpoint true) or "
            if complete_checkpoints(run)
            else ""
        )
        raise UserError(
            f"output_dir {run} is not empty (it has {names[0]}): {resume}name a new folder"
        )


@contextmanager
def staged(run: Path, consequence: str) -> Iterator[Path]:
    """Make an empty folder and, when the block ends, rename each file in it into the run's folder."""
    staging = run / STAGING_FOLDER
    remove_staging_folder(run)
    try:
        with report_failed_save(run, consequence):
            staging.mkdir()
            yield staging
            share_files(staging)
            for path in sorted(path for path in staging.rglob("*") if path.is_file()):
                target = run / path.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                replace(path, target)
    finally:
        remove_staging_folder(run)
