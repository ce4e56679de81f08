"""What a training log tells beside the loss: speed in real tokens, padding, the loss without smoothing, perplexity,
time left."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerState

IGNORED = -100  # the label of what does not count


class Meter:
    """Counts the tokens between two lines of the log."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything: training starts."""
        self._start: float | None = None
        self._updates = 0
        self._words: Any = 0  # target tokens of all processes; a tensor, so that no device is waited for
        self._real: Any = 0
        self._padded = 0
        self._nll: torch.Tensor | None = None

    def count(self, batches: list[Any], words: torch.Tensor | int | None) -> None:
        """Count the batches of an update.

        Args:
            batches: of this process, each with `input_ids`, `labels` and perhaps `attention_mask`.
            words: target tokens of the update, over all processes; None where nobody counted.
        """
        if self._start is None:
            self._start = time.monotonic()
        self._updates += 1
        if words is not None:
            self._words = self._words + words
        for batch in batches:
            if not {"labels", "attention_mask"} <= batch.keys():
                continue
            labels, mask = batch["labels"], batch["attention_mask"]
            self._real = self._real + labels.ne(IGNORED).sum() + mask.sum()
            self._padded += labels.numel() + mask.numel()

    def add_nll(self, nll: torch.Tensor) -> None:
        """Add a batch's share of its update's loss without smoothing; a tensor, so that no device is waited for."""
        self._nll = nll if self._nll is None else self._nll + nll

    def read(self, state: TrainerState, mean: Callable[[torch.Tensor], torch.Tensor], most: float) -> dict[str, float]:
        """What happened since the last reading.

        Args:
            state: of the trainer. mean: of a number over all processes. most: minutes after which training ends
                in any case.

        Returns:
            `tokens_per_second` (target tokens, without padding), `padding` (share of source and target tokens, of
            this process), `minutes_left` to the end, and where the model told it `nll_loss`, the mean over the
            updates of their cross-entropy per target token.
        """
        if self._start is None:
            return {}
        updates, now = self._updates, time.monotonic()
        seconds = max(now - self._start, 1e-9)
        found = {"tokens_per_second": round(float(self._words) / seconds, 1)}
        if self._padded:
            found["padding"] = round(1 - float(self._real) / self._padded, 4)
        if updates and state.max_steps > 0:
            left = (state.max_steps - state.global_step) * seconds / updates / 60
            found["minutes_left"] = round(min(left, most), 1)
        if self._nll is not None and updates:
            found["nll_loss"] = float(mean(self._nll)) / updates
        self.begin()
        self._start = now
        return found


def perplexities(logs: dict[str, float], but: str | None = None) -> dict[str, float]:
    """exp(loss) of a line of the log: `perplexity` of `nll_loss` or `loss`, `eval_perplexity` of `eval_loss`.

    Args:
        logs: what is logged. but: a name to leave out: a smoothed loss is no cross-entropy.
    """
    losses = [name for name in logs if name == "loss" or (name.startswith("eval") and name.endswith("_loss"))]
    found = {name.removesuffix("loss") + "perplexity": _exp(logs[name]) for name in losses if name != but}
    if "nll_loss" in logs:
        found["perplexity"] = _exp(logs["nll_loss"])
    return found


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
