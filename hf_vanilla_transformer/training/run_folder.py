"""The folder of a run: new, empty, or with checkpoints of this run, and used by one run at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..atomic_write import share_files
from ..errors import UserError
from .checkpoints import (
    STAGING_FOLDER,
    complete_checkpoints,
    last_checkpoint,
    remove_staging_folder,
    report_failed_save,
    require_last,
)
from .distributed import broadcast_from_main, errors_on_main_rank_only, print_main

LOCK = ".lock"
SCORES_BEFORE = "scores_before.json"  # of fine-tuning: the base model's scores, kept for a run that is resumed
# Names in the folder of a run that ended before its first checkpoint. `runs` has TensorBoard's logs.
_BEFORE_SAVING = {LOCK, STAGING_FOLDER, SCORES_BEFORE, "runs"}


@contextmanager
def one_run_at_a_time(run: Path) -> Iterator[None]:
    """Create the folder if necessary and lock it until the block ends. A folder that stays empty is removed.

    Raises:
        UserError: `run` is a file, cannot be written, or a different process trains in it.
    """
    lock = FileLock(run / LOCK, timeout=0)
    created = [folder for folder in (run, *run.parents) if not folder.exists()]

    def acquire() -> str | None:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            return f"output_dir {run}: a process is already training in it; end it, or choose a different folder"
        except FileExistsError:
            return f"output_dir {run} is a file; name a folder"
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
            (run / LOCK).unlink(missing_ok=True)
            lock.release()
        for folder in created:
            with suppress(OSError):  # not empty
                folder.rmdir()


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """Find the checkpoint to resume from, or return None for a new run.

    Args:
        resume: `resume_from_checkpoint`: true, false, auto (true if there is a checkpoint), or the path of one.
    """
    if resume.lower() == "true" or (resume.lower() == "auto" and complete_checkpoints(run)):
        checkpoint = last_checkpoint(run)
        print_main(f"resuming from {checkpoint}")
        return checkpoint
    if resume.lower() in ("false", "auto"):
        require_new_folder(run)
        return None
    checkpoint = Path(resume)
    if checkpoint not in complete_checkpoints(checkpoint.parent):
        raise UserError(f"resume_from_checkpoint {resume} is no complete checkpoint (`true` resumes from the last)")
    if checkpoint.resolve().parent == run.resolve():
        require_last(checkpoint, run)
    else:
        require_new_folder(run)
    return checkpoint


def require_new_folder(run: Path) -> None:
    """Refuse a folder for a new run that has files."""
    names = sorted(set(os.listdir(run)) - _BEFORE_SAVING) if run.is_dir() else []
    if names:
        resume = "resume its run (--resume_from_checkpoint true) or " if complete_checkpoints(run) else ""
        raise UserError(f"output_dir {run} is not empty (it has {names[0]}): {resume}name a new folder")


@contextmanager
def staged(run: Path, consequence: str) -> Iterator[Path]:
    """Make an empty folder and, when the block ends, rename each file in it into the run's folder.

    A failed write is reported with `consequence` (see `report_failed_save`).
    """
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
                os.replace(path, target)
    finally:
        remove_staging_folder(run)
