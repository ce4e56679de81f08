"""When a run ends: at Ctrl-C, or after a given time; in both cases with a whole checkpoint."""

import math
import signal
import time
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .processes import anywhere, is_first


class StopWithCheckpoint(TrainerCallback, ExportableState):
    """Stop after `max_minutes`, or at the first Ctrl-C: finish the step, save a checkpoint, leave.

    A second Ctrl-C stops at once.

    Args:
        max_minutes: time for training, evaluations and the parts before a resumption included; None for no limit.

    Attributes:
        interrupted: whether it was Ctrl-C.
        spent: seconds of training before this process; each checkpoint knows its own.
    """

    def __init__(self, max_minutes: float | None = None):
        self.max_seconds = None if max_minutes is None else 60 * max_minutes
        self.interrupted = False
        self.spent = 0.0
        self._previous: Any = None
        self._start: float | None = None

    def seconds(self) -> float:
        """Time of training so far, in all parts of the run."""
        return self.spent + (0.0 if self._start is None else time.monotonic() - self._start)

    def minutes_left(self) -> float:
        """Until `max_minutes` are over; without them infinitely many."""
        return math.inf if self.max_seconds is None else max(0.0, self.max_seconds - self.seconds()) / 60

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"args": {}, "attributes": {"spent": self.seconds()}}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.monotonic()
        self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if is_first():
            print("\nstopping: this step is finished and saved first (Ctrl-C again stops at once)", flush=True)
        signal.signal(signal.SIGINT, self._previous)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # Clocks differ and Ctrl-C comes between any two instructions: all processes must stop after the same step.
        over = self.max_seconds is not None and self.seconds() > self.max_seconds
        self.interrupted, over = anywhere(self.interrupted, over, device=args.device)
        if over or self.interrupted:
            control.should_training_stop = True
            control.should_save = True
            # An evaluation is wanted at the end of the time, and a quick exit after Ctrl-C.
            control.should_evaluate = over and not self.interrupted and args.eval_strategy != "no"
        return control
