"""Stop training at Ctrl-C or after a time limit, with a complete checkpoint in both cases."""

import math
import signal
import time
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .distributed import any_rank, print_main


class StopWithCheckpoint(TrainerCallback, ExportableState):
    """Stop after `max_minutes` or at the first Ctrl-C: finish the step, save a checkpoint, end training.

    A second Ctrl-C stops immediately.

    Args:
        max_minutes: limit of the training time, including evaluations and the time before a resume; None for none.

    Attributes:
        interrupted: whether Ctrl-C was pressed.
        spent: seconds of training before the resume, from the checkpoint.
    """

    def __init__(self, max_minutes: float | None = None):
        self.max_seconds = None if max_minutes is None else 60 * max_minutes
        self.interrupted = False
        self.spent = 0.0
        self._previous: Any = None
        self._start: float | None = None

    def seconds(self) -> float:
        """Training time so far, including the time before a resume."""
        return self.spent + (0.0 if self._start is None else time.monotonic() - self._start)

    def minutes_left(self) -> float:
        """Minutes until the limit; infinite without one."""
        return math.inf if self.max_seconds is None else max(0.0, self.max_seconds - self.seconds()) / 60

    def state(self) -> dict[str, Any]:
        """The state that `Trainer` saves in a checkpoint."""
        return {"args": {}, "attributes": {"spent": self.seconds()}}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.monotonic()
        self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        print_main("\nstopping: this step is finished and saved first (Ctrl-C again stops at once)")
        signal.signal(signal.SIGINT, self._previous)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # Clocks and signals differ between ranks, but all ranks must stop after the same step.
        over = self.max_seconds is not None and self.seconds() > self.max_seconds
        self.interrupted, over = any_rank(self.interrupted, over, device=args.device)
        if over or self.interrupted:
            control.should_training_stop = control.should_save = True
            # Evaluate at the time limit; after Ctrl-C leave without it.
            control.should_evaluate = over and not self.interrupted and args.eval_strategy != "no"
        return control
