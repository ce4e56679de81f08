"""Stages of a run: mixtures of its inputs by fractions, one after the other, with one optimizer and one schedule.

An epoch of a stage ends when one of its inputs has been read through. Each input is read in shuffled order, and from
the place where the epoch before has stopped, also that of another stage: no pair is repeated before the others of its
input.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..utils.errors import UserError


class Stage(NamedTuple):
    """A mixture of the inputs, and when it ends. At most one of `epochs`, `updates` and `patience` is finite."""

    text: str  #: as in a recipe
    fractions: tuple[float, ...]  #: of the pairs of an epoch, one for each input
    epochs: float = math.inf
    updates: float = math.inf
    patience: float = math.inf  #: evaluations in a row without a new best score of the run


def parse_stages(items: Sequence[str]) -> list[Stage]:
    """Parse stages such as `{fractions: [0.8, 0.2], epochs: 3}`. All but the last must end."""
    stages = []
    for number, item in enumerate(items, 1):
        text = item.replace("'", "").strip("{} ")
        try:
            stage = Stage(text, **yaml.safe_load(f"{{{text}}}"))
            total, least = sum(stage.fractions), min(stage.fractions)
        except (TypeError, ValueError, yaml.YAMLError):
            raise UserError(f"stages: {text}: write fractions: [0.8, 0.2], epochs: 3") from None
        if not (least >= 0 and math.isclose(total, 1, abs_tol=1e-3)):
            raise UserError(f"stages: {text}: fractions must be at least 0 and add up to 1, not to {total:g}")
        limits = [limit for limit in stage[2:] if limit != math.inf]
        if len(limits) > 1 or not (limits or number == len(items)) or any(type(x) is not int or x < 1 for x in limits):
            raise UserError(f"stages: {text}: give all but the last one of epochs, updates and patience, from 1")
        stages.append(stage)
    return stages


class StageSchedule(TrainerCallback, ExportableState):
    """Draws the pairs of each epoch by the fractions of its stage, and ends stages. The trainer starts the next one.

    Args:
        stages: from `parse_stages`.
        parts: the number of each row's input, (number of pairs,).
        seed: of the order of each input.

    Raises:
        UserError: a stage needs an input that has no pair.
    """

    def __init__(self, stages: Sequence[Stage], parts: np.ndarray, seed: int):
        self.stages, self.seed = stages, seed
        self.inputs = [np.flatnonzero(parts == part) for part in range(len(stages[0].fractions))]
        shares = []
        for stage in stages:
            pairs = min(len(rows) / part for rows, part in zip(self.inputs, stage.fractions, strict=True) if part)
            if not pairs:
                raise UserError(f"stages: {stage.text}: an input of this stage has no pair within the length limits")
            shares.append([pairs * fraction for fraction in stage.fractions])
        self.shares = np.array(shares)  # pairs of each input in an epoch, (stages, inputs)
        self.restart()

    def restart(self) -> None:
        """Return to the first stage."""
        self.first_epochs = [0]  # of the stages that have started
        self.first_update: float = 0  # of the current stage
        self.stalled = 0  # evaluations without a new best score

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.stages[len(self.first_epochs) - 1]

    @property
    def is_last(self) -> bool:
        return len(self.first_epochs) == len(self.stages)

    def __str__(self) -> str:
        return f"stage {len(self.first_epochs)} of {len(self.stages)}: {self.stage.text}"

    def is_over(self, epoch: int, update: float) -> bool:
        """True if the current stage ends before this epoch, or after this number of updates."""
        lasted = epoch - self.first_epochs[-1], update - self.first_update, self.stalled
        return any(done >= limit for done, limit in zip(lasted, self.stage[2:], strict=True))

    def start_next(self, epoch: int, update: float) -> None:
        """Start the next stage with this epoch."""
        self.first_epochs.append(epoch)
        self.first_update, self.stalled = update, 0

    def rows(self, epoch: int) -> np.ndarray:
        """The rows of an epoch of the current stage, by input."""
        borders = enumerate(zip(self._read_before(epoch), self._read_before(epoch + 1), strict=True))
        return np.concatenate([self._read(part, start, end) for part, (start, end) in borders if start < end])

    def _read_before(self, epoch: int) -> list[int]:
        """The number of pairs of each input in the epochs before."""
        epochs = np.diff([*self.first_epochs, epoch])  # of each stage
        return np.rint(epochs @ self.shares[: len(epochs)]).astype(np.int64).tolist()

    def _read(self, part: int, start: int, end: int) -> np.ndarray:
        rows = self.inputs[part]
        first, last = start // len(rows), -(-end // len(rows))
        passes = [np.random.default_rng((self.seed, part, number)).permutation(rows) for number in range(first, last)]
        return np.concatenate(passes)[start - first * len(rows) : end - first * len(rows)]

    def state(self) -> dict[str, Any]:
        """State for `Trainer` to save in a checkpoint."""
        names = "first_epochs", "first_update", "stalled"
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        control.should_epoch_stop = self.is_over(self.first_epochs[-1], state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, metrics: Any, **_: Any) -> None:
        if self.stage.patience == math.inf:
            return
        score, best = metrics[f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"], state.best_metric
        improved = best is None or (score > best if args.greater_is_better else score < best)
        self.stalled = 0 if improved else self.stalled + 1
        if self.stalled >= self.stage.patience:
            control.should_epoch_stop = True
            control.should_training_stop = control.should_training_stop or self.is_last

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        ends_run = self.is_last and self.is_over(math.ceil(state.epoch or 0), state.global_step)
        if ends_run and not control.should_training_stop:
            control.should_training_stop = True
            control.should_evaluate = control.should_evaluate or args.eval_strategy == "steps"
