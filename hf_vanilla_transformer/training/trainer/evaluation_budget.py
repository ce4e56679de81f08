"""Keep the evaluations of a run with `max_minutes` within a tenth of its minutes, from the first one on.

A model that has hardly been trained repeats words until the length limit, on every sentence: its evaluations would
take several times as long as later ones. So translations are cut shortly after the length of their references until
those of an evaluation end by themselves, and an evaluation has no more sentences than its share of the minutes allows.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..state.callbacks import StopWithCheckpoint
from ..state.distributed import broadcast_from_main

SHARE = 0.1  # of the minutes
PROBE = 4  # sentences that are translated before the first evaluation, to measure the time
_ENDED = 0.9  # share of the translations that must end before they are cut no longer


def longest_cut(references: int) -> int:
    """The tokens after which a translation is cut, for the longest reference of its batch."""
    return math.ceil(1.5 * references) + 5


class EvaluatingTrainer(Protocol):
    """What the budget reads of a trainer, and calls."""

    args: TrainingArguments
    state: TrainerState
    eval_dataset: Dataset
    ended: float  #: share of the translations of the last evaluation that end before their limit

    def translate_rows(self, rows: np.ndarray) -> None:
        """Translate some evaluation sentences."""


class EvaluationBudget(TrainerCallback, ExportableState):
    """Chooses the sentences of each evaluation in training, and measures its time.

    If scores select the weights or end the run, all evaluations have the sentences of the first one, because scores of
    different sentences cannot be compared.

    Attributes:
        cuts: translations are cut (`longest_cut`).
        rows: the sentences of the current evaluation by row, or None for all.
    """

    def __init__(self, stop: StopWithCheckpoint):
        self.stop = stop
        self.cuts = True
        self.rows: np.ndarray | None = None
        self._seconds_per_sentence: float | None = None
        self._sentences: int | None = None  # of all evaluations of a run that selects weights

    def state(self) -> dict[str, dict[str, object]]:
        """State for `Trainer` to save in a checkpoint."""
        names = ("cuts", "_seconds_per_sentence", "_sentences")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    @contextmanager
    def evaluation(self, trainer: EvaluatingTrainer) -> Iterator[None]:
        """Choose the sentences of an evaluation of `trainer`, measure it, and look if its translations end."""
        start = time.monotonic()
        total = len(trainer.eval_dataset)
        try:
            count = self._count(trainer, total)
            self.rows = (
                None if count == total else np.linspace(0, total - 1, count).round().astype(int)
            )
            first = time.monotonic()
            yield
            self._seconds_per_sentence = (time.monotonic() - first) / count
            self.cuts = trainer.ended < _ENDED
        finally:
            self.rows = None
            self.stop.evaluation_seconds += time.monotonic() - start

    @property
    def is_whole(self) -> bool:
        """True if the current evaluation has all sentences and does not cut their translations."""
        return self.rows is None and not self.cuts

    def _count(self, trainer: EvaluatingTrainer, total: int) -> int:
        """The number of sentences of the next evaluation, the same on all ranks."""
        if self._sentences is not None:
            return min(self._sentences, total)
        allowed = self._allowed_seconds(trainer)
        if self._seconds_per_sentence is None:
            few = min(PROBE, total)
            start = time.monotonic()
            trainer.translate_rows(np.linspace(0, total - 1, few).round().astype(int))
            self._seconds_per_sentence = (time.monotonic() - start) / few
            allowed -= time.monotonic() - start
        affordable = int(allowed / max(self._seconds_per_sentence, 1e-9))
        count = broadcast_from_main(lambda: min(total, max(1, affordable)))
        if trainer.args.metric_for_best_model:
            self._sentences = count
        return count

    def _allowed_seconds(self, trainer: EvaluatingTrainer) -> float:
        """The next evaluation's share of the time that is left for evaluations."""
        args = trainer.args
        state = trainer.state
        limit = self.stop.max_seconds or math.inf
        updates_left = max(0, state.max_steps - state.global_step)
        training_seconds = self.stop.seconds() - self.stop.evaluation_seconds
        if state.global_step:
            in_time = (
                max(0.0, limit - self.stop.seconds())
                * state.global_step
                / max(training_seconds, 1e-9)
            )
            updates_left = min(updates_left, int(in_time))
        apart = state.eval_steps
        if args.eval_strategy == "epoch":
            apart = state.max_steps / max(state.num_train_epochs, 1)
        evaluations = 1 + int(updates_left / max(apart or 1, 1))
        return max(0.0, SHARE * limit - self.stop.evaluation_seconds) / evaluations
