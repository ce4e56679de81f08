"""An exponential moving average of the weights, beside the average of checkpoints (§6.1)."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import UserError

EMA_WEIGHTS = "ema.safetensors"  # in a checkpoint


class WeightAverage(TrainerCallback):
    """After update t: average ← average + (1 - d) (weights - average), d = min(decay, (1 + t) / (10 + t)).

    The second term of the minimum lets the average forget the initial weights, as in TensorFlow's
    `ExponentialMovingAverage(num_updates=…)`. Tied weights are averaged once.

    `torch.optim.swa_utils.AveragedModel` would keep a second module in the dtype of the first. Here the average is a
    dictionary of float32 tensors, as a checkpoint stores them.

    Args:
        decay: d of a long run, at least 0 and below 1; about 1 / (1 - d) updates count.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        weights = trained_weights(model)
        if not self.average:
            self.average = {name: weight.detach().float().clone() for name, weight in weights.items()}
        for name, weight in weights.items():  # what a checkpoint brought lies on the CPU
            self.average[name] = self.average[name].to(weight.device)

    @torch.no_grad()
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        for name, weight in trained_weights(model).items():
            self.average[name].lerp_(weight.float(), 1 - decay)

    def save(self, checkpoint: Path) -> None:
        """Write the average into a checkpoint."""
        average = {name: weight.cpu() for name, weight in self.average.items()}
        save_file(average, checkpoint / EMA_WEIGHTS, metadata={"format": "pt"})

    def load(self, checkpoint: Path) -> None:
        """Continue from the average in a checkpoint.

        Raises:
            UserError: it has none, or a damaged one.
        """
        try:
            self.average = load_file(checkpoint / EMA_WEIGHTS)
        except OSError:
            message = f"{checkpoint} has no {EMA_WEIGHTS}: resume with ema_decay 0, as it was trained"
            raise UserError(message) from None
        except SafetensorError as error:
            raise UserError(f"{checkpoint / EMA_WEIGHTS} is damaged: {error}") from None


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, tied ones once, under the names of its unwrapped form."""
    model = getattr(model, "module", model)  # DistributedDataParallel
    return dict(model.named_parameters())
