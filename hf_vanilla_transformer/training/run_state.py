"""What determines a run, kept in each checkpoint and in the run's folder: compared on resume, and the run's branch.

A run that resumes from an older checkpoint begins a new branch. The newer checkpoints stay in the folder, but belong
to an abandoned branch: they are neither resumed from by default nor averaged.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..atomic_write import atomic_file
from ..errors import UserError

RUN_STATE = "run_state.json"


@dataclass(frozen=True)
class RunState:
    """The state of a run at a checkpoint, or at the beginning of a branch.

    Attributes:
        data: what determines the batches: name → value. Not compared if the data is restarted (`ignore_data_skip`).
        fixed: what cannot change within a run: name → value.
        id: unique.
        ancestors: the ids of all states before it on its branch, oldest first.
    """

    data: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ancestors: list[str] = field(default_factory=list)

    def next(self, data: Mapping[str, Any], fixed: Mapping[str, Any]) -> "RunState":
        """The state that follows this one on its branch."""
        return RunState(dict(data), dict(fixed), ancestors=[*self.ancestors, self.id])

    def write(self, folder: Path) -> None:
        """Write `run_state.json` into a folder, atomically."""
        with atomic_file(folder / RUN_STATE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_run_state(folder: Path) -> RunState | None:
    """The state in a checkpoint or in the run's folder; None if there is no file (version 0.1.0 wrote none).

    Raises:
        UserError: the file is damaged.
    """
    file = folder / RUN_STATE
    try:
        state = RunState(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): resume from another checkpoint") from None
    return state


def state_to_resume(checkpoint: Path) -> RunState:
    """The state of a checkpoint. One of version 0.1.0 gets its name for an id, and those below it for ancestors."""
    state = read_run_state(checkpoint)
    if state is not None:
        return state
    step = _step(checkpoint)
    older = [path for path in checkpoint.parent.glob("checkpoint-*") if _step(path) < step and _id(path) == path.name]
    return RunState(id=checkpoint.name, ancestors=[path.name for path in sorted(older, key=_step)])


def on_branch(run: Path, checkpoints: Sequence[Path]) -> list[Path]:
    """Those of the checkpoints that belong to the run's current branch; all of them if the run has no state."""
    head = read_run_state(run)
    if head is None:
        return list(checkpoints)
    current = {*head.ancestors, head.id}

    def belongs(checkpoint: Path) -> bool:
        try:
            state = read_run_state(checkpoint) or RunState(id=checkpoint.name)
        except UserError:
            return False
        # A killed run may have left a checkpoint that is newer than the state in the run's folder.
        return state.id in current or head.id in state.ancestors

    return [checkpoint for checkpoint in checkpoints if belongs(checkpoint)]


def _id(checkpoint: Path) -> str:
    try:
        state = read_run_state(checkpoint)
    except UserError:
        return ""
    return checkpoint.name if state is None else state.id


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def plain_values(arguments: Any, names: Sequence[str]) -> dict[str, Any]:
    """The named arguments as JSON values."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def require_same(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Refuse to resume with a value that differs from the checkpoint's.

    Args:
        saved, now: name → value; only names in both are compared.
        remedy: the end of the message.

    Raises:
        UserError: names the value, what it is, what it was, and the remedy.
    """
    for name in now:
        if name in saved and saved[name] != now[name]:
            raise UserError(f"{name}: {now[name]}, but {checkpoint} was trained with {saved[name]}: {remedy}")
