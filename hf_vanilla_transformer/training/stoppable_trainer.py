"""`Seq2SeqTrainer` that a signal or a time limit can stop at any time without losing an evaluation or a checkpoint."""

import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Seq2SeqTrainer

from ..errors import Interrupted
from .callbacks import StopWithCheckpoint
from .signals import leave_signals_to_main_process


class StoppableTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with the parts that `StopWithCheckpoint` needs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._resumed_from: Path | None = None
        self._epoch = 0

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return leave_signals_to_main_process(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return leave_signals_to_main_process(super().get_test_dataloader(*args, **kwargs))

    def _training_is_over(self) -> bool:
        """Whether a resumed run had ended before: at its last update, by early stopping or by the time limit."""
        if self.state.global_step == 0:
            return False
        callbacks = self.callback_handler.callbacks
        stopping = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]
        return (
            self.state.global_step >= self.state.max_steps
            or any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in stopping)
            or self._minutes_left() == 0
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Seq2SeqTrainer`; the random state stays as it is, because a resumed run may evaluate at another time."""
        device = self.args.device
        # A DataLoader draws a seed from the global generator, also if it shuffles nothing.
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            return super().evaluation_loop(*args, **kwargs)

    def _stop_callbacks(self) -> list[StopWithCheckpoint]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, StopWithCheckpoint)]

    def _minutes_left(self) -> float:
        return min((stop.minutes_left() for stop in self._stop_callbacks()), default=math.inf)

    def _evaluate_if_due(self, start_time: float) -> None:
        """Make the evaluation of the update that is resumed from, if a signal prevented it.

        The checkpoint is not saved again: a run that is killed before its next one repeats the evaluation.
        """
        if self._resumed_from is None or not any(stop.evaluation_due for stop in self._stop_callbacks()):
            return
        self._load_rng_state(str(self._resumed_from))  # if it is interrupted again, this is saved
        self.control.should_evaluate = True
        self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, self._epoch, None, start_time)
        if self.state.best_global_step == self.state.global_step:
            best = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            self.state.best_model_checkpoint = str(best if best.is_dir() else self._resumed_from)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As `Seq2SeqTrainer`; a signal ends the evaluation, and the checkpoint is saved without its scores."""
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except Interrupted:
            self.control.should_evaluate = False
            self.control.should_save = self.control.should_training_stop = True
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """As `Seq2SeqTrainer`, which with `save_total_limit=1` would delete every checkpoint but the best, also those
        that a resumed or interrupted run needs."""
        self._evaluate_if_due(start_time)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit
