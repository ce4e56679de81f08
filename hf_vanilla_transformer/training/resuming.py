"""Checks of a checkpoint before training resumes from it: everything is there, whole, and of the same run."""

import os
import re
import zipfile
import zlib
from pathlib import Path

from ..errors import UserError
from ..untrusted import one_line, read_json_object
from .checkpoints import TRAINER_STATE
from .distributed import print_main

SCHEDULER = "scheduler.pt"
# By `Trainer`, by FSDP with FULL_STATE_DICT, by FSDP with SHARDED_STATE_DICT (a folder).
OPTIMIZERS = "optimizer.pt", "optimizer.bin", "optimizer_0"


def checkpoint_path(given: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; a `UserError` if it has no readable trainer state."""
    checkpoint = Path(given)
    if not (checkpoint / TRAINER_STATE).is_file():
        raise UserError(f"resume_from_checkpoint {checkpoint} is no complete checkpoint: it has no {TRAINER_STATE}")
    read_json_object(checkpoint / TRAINER_STATE)
    return checkpoint


def require_training_state(checkpoint: Path, processes: int) -> None:
    """Refuse a checkpoint whose optimizer, schedule or random states are missing or damaged.

    Without them `Trainer` silently begins anew: Adam's moments, the warm-up, the random numbers of dropout.

    Args:
        checkpoint: its folder, not one of DeepSpeed, which has files of other names.
        processes: the number that will resume.

    Raises:
        UserError: names the file.
    """
    optimizer = next((name for name in OPTIMIZERS if (checkpoint / name).exists()), OPTIMIZERS[0])
    random_states = [path.name for path in checkpoint.iterdir() if re.fullmatch(r"rng_state(_\d+)?\.pth", path.name)]
    for name in (optimizer, SCHEDULER, *(sorted(random_states) or ["rng_state.pth"])):
        file = checkpoint / name
        if not file.exists():
            raise UserError(
                f"{checkpoint} has no {name}, without which a resumed run would be another one "
                "(save_only_model writes none): resume from a checkpoint that has it"
            )
        if file.is_file():
            _require_whole(file)
    if len(random_states) != processes:
        print_main(
            f"{checkpoint} was written by {len(random_states)} processes and is resumed by {processes}: "
            "the random numbers of dropout will differ"
        )


def _require_whole(file: Path) -> None:
    """`torch.save` writes a zip archive: a cut file has no directory, a changed one another checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
        raise UserError(f"{file} is damaged ({one_line(error)}): resume from another checkpoint") from None
    if broken is not None:
        raise UserError(f"{file} is damaged (checksum of {broken}): resume from another checkpoint")
