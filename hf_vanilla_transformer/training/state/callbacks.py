"""Callbacks of a run: a stop with a complete checkpoint, an average of the weights, memory and threads of a CPU."""

import math
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from ...utils.cpu_time import fitting_threads
from ...utils.errors import Interrupted, UserError
from ...utils.finite import require_finite
from ...utils.system_calls import release_free_memory
from ...utils.untrusted import reading_weights
from .distributed import StopSignals, print_main

IN_TRAINING = "the current update is finished and a checkpoint saved first"


class StopWithCheckpoint(TrainerCallback, ExportableState):
    """Stop after `max_minutes`, or at Ctrl-C or SIGTERM: finish the update, save a checkpoint, end training.

    A signal also ends an evaluation, at its next batch. The resumed run makes it first (`evaluation_due`). The end of
    training is saved for any `save_strategy`, so that nothing is lost if scoring fails (`saved_for_scoring`). The time
    includes evaluations and the time before a resume (`spent`). Without `signals` they are noted during training only.
    """

    def __init__(self, max_minutes: float | None = None, signals: StopSignals | None = None):
        self.max_seconds = None if max_minutes is None else 60 * max_minutes
        self.signals = signals or StopSignals()
        self.signals.message = IN_TRAINING  # also before the first update
        self.evaluation_due = self.saved_for_scoring = False
        self.spent = 0.0
        self.evaluation_seconds = 0.0  # of the training time
        self.saved_step: int | None = None
        self._start: float | None = None
        self._training = False

    def seconds(self) -> float:
        """Training time so far, including the time before a resume."""
        return self.spent + (0.0 if self._start is None else time.monotonic() - self._start)

    def minutes_left(self) -> float:
        """Minutes until the limit, or infinity."""
        return (
            math.inf
            if self.max_seconds is None
            else max(0.0, self.max_seconds - self.seconds()) / 60
        )

    def state(self) -> dict[str, dict[str, object]]:
        """State for `Trainer` to save in a checkpoint."""
        attributes: dict[str, object] = {
            "spent": self.seconds(),
            "evaluation_seconds": self.evaluation_seconds,
            "evaluation_due": self.evaluation_due,
        }
        return {"args": {}, "attributes": attributes}

    @property
    def interrupted(self) -> bool:
        """A signal was received on any rank."""
        return self.signals.agreed is not None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._start = time.monotonic()
        self._training = True
        self.signals.__enter__()

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._training:
            self._training = False
            self.signals.__exit__(None, None, None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        # Clocks and signals differ between ranks, but all ranks must stop after the same update. They agree at once if
        # the device is waited for anyway, and else one update later.
        over = self.max_seconds is not None and self.seconds() > self.max_seconds
        waits = (
            control.should_log
            or control.should_evaluate
            or control.should_save
            or control.should_training_stop
        )
        (over,) = self.signals.agree(args.device, over, at_once=waits)
        # The evaluation at the end of an epoch follows a checkpoint of its last update.
        self.evaluation_due = (
            args.eval_strategy == "epoch"
            and state.epoch is not None
            and args.eval_delay <= state.epoch
            and (control.should_epoch_stop or state.epoch == round(state.epoch))
        )
        if self.interrupted:
            self.evaluation_due = self.evaluation_due or control.should_evaluate
            control.should_evaluate = False
        elif over:
            control.should_evaluate = args.eval_strategy != "no"
        if over or self.interrupted:
            control.should_training_stop = control.should_save = True
        return control

    def on_prediction_step(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self.signals.agree(args.device)
        if self.interrupted:
            self.evaluation_due = True
            raise Interrupted("the evaluation was interrupted", self.signals.received or 0)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        self.evaluation_due = False
        if control.should_training_stop and self.saved_step != state.global_step:  # early stopping
            control.should_save = True
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        self.saved_step = state.global_step
        self.signals.agree(args.device)
        if self.interrupted:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        unsaved = self.saved_step != state.global_step
        self.signals.agree(args.device)
        if self.interrupted:
            # `Trainer` would log and evaluate as at the end of an epoch, even in its middle.
            control.should_training_stop = True
            control.should_log = control.should_evaluate = False
            control.should_save = unsaved
        elif unsaved and (control.should_training_stop or state.global_step >= state.max_steps):
            self.saved_for_scoring = not control.should_save
            control.should_save = True
        return control


EMA_WEIGHTS = "ema.safetensors"  # in a checkpoint


class WeightAverage(TrainerCallback):
    """After update t: average ← average + (1 - d) (weights - average), d = min(decay, (1 + t) / (10 + t)).

    With the second term of the minimum the average forgets the initial weights, as in TensorFlow's
    `ExponentialMovingAverage(num_updates=…)`. Tied weights are averaged once, in float32.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_begin(self, *_: object, model: nn.Module, **__: object) -> None:
        weights = trained_weights(model)
        if not self.average:
            self.average = {
                name: weight.detach().float().clone() for name, weight in weights.items()
            }
        for name, weight in weights.items():  # a loaded average is on the CPU
            self.average[name] = self.average[name].to(weight.device)

    @torch.no_grad()
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        model: nn.Module,
        **__: object,
    ) -> None:
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        weights = {name: weight.float() for name, weight in trained_weights(model).items()}
        averages = [self.average[name] for name in weights]
        update = get_ema_multi_avg_fn(decay)  # all of them with a few kernels
        update(averages, list(weights.values()), 0)

    def save(self, checkpoint: Path) -> None:
        """Write the average into a checkpoint."""
        average = {name: weight.cpu() for name, weight in self.average.items()}
        save_file(average, checkpoint / EMA_WEIGHTS, metadata={"format": "pt"})

    def load(self, checkpoint: Path) -> None:
        """Continue from the average in a checkpoint.

        Raises:
            UserError: it has none, or a damaged one.
        """
        file = checkpoint / EMA_WEIGHTS
        if not file.is_file():
            raise UserError(
                f"{checkpoint} has no {file.name}: resume with ema_decay 0, as it was trained"
            )
        with reading_weights(file):
            self.average = load_file(file, backend="pread")
        require_finite(self.average.items(), file, "resume from the checkpoint before it")


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, tied ones once, under the names of its unwrapped form."""
    model = getattr(model, "module", model)  # DistributedDataParallel
    return dict(model.named_parameters())


# In bfloat16 on a CPU, oneDNN compiles and keeps kernels for every shape of a matrix product. They leave gaps between
# temporary tensors on glibc's heap. glibc reuses the gaps, but does not return them. The trainer rounds B · S and
# B · T of token batches to multiples of the loss's `ROW_UNIT`, 64: the products of multi30k_en_de_tiny_tokens.yaml
# then have 26 distinct row counts instead of 84, with 7.8 % more padding.
#: Updates between two returns. One return takes 0.07 s with that recipe, and 20 updates take 11 s on one core.
UPDATES = 20


class ReleaseFreeMemory(TrainerCallback):
    """Calls `release_free_memory` every 20 updates of a run on a CPU."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        if args.device.type == "cpu" and state.global_step % UPDATES == 0:
            release_free_memory()


class FitThreads(TrainerCallback):
    """Trains on a CPU with as many threads as the machine has time for, but not more than torch had before."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._reported = False

    def on_step_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if args.device.type != "cpu":
            return
        if self._limit is None:
            self._limit = torch.get_num_threads()
        threads = fitting_threads(self._limit)
        if threads < self._limit and not self._reported:
            self._reported = True
            reason = f"{threads} of {self._limit} threads while other processes or a quota leave no time for more"
            print_main(f"{reason}; OMP_NUM_THREADS={self._limit} keeps all of them")
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._limit is not None:
            torch.set_num_threads(self._limit)
