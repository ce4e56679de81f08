"""Metrics of the training log: throughput, padding, loss without label smoothing, perplexity, time left."""

import math
import time
from collections.abc import Callable

import torch
from transformers import TrainerState

from ...batches.batching import Batch
from ...batches.packing import token_mask
from ...loss_vanilla_transformer import IGNORED


class ThroughputMeter:
    """Counts tokens and sums losses between two log entries, on the device, so that the host does not wait for it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counts, at the start of training."""
        self._start: float | None = None
        self._updates = 0
        self._target_tokens: torch.Tensor | int = 0  # of all ranks
        self._tokens: torch.Tensor | int = 0  # source and target, of this rank
        self._positions = 0  # the same with padding
        self.nll: torch.Tensor | None = None  # the sum of `add_nll`

    def count(self, batches: list[Batch], target_tokens: torch.Tensor | int | None) -> None:
        """Count this rank's batches of an update, and its number of target tokens over all ranks, or None."""
        if self._start is None:
            self._start = time.monotonic()
        self._updates += 1
        if target_tokens is not None:
            self._target_tokens = self._target_tokens + target_tokens
        for batch in batches:
            mask = token_mask(batch)
            if mask is None or batch.get("labels") is None:
                continue
            labels = batch["labels"]
            self._tokens = self._tokens + labels.ne(IGNORED).sum() + mask.ne(0).sum()
            self._positions += labels.numel() + mask.numel()

    def add_nll(self, nll: torch.Tensor) -> None:
        """Add a batch's share of the update's loss without label smoothing."""
        self.nll = nll if self.nll is None else self.nll + nll

    def read(
        self, state: TrainerState, mean: Callable[[torch.Tensor], torch.Tensor], limit: float
    ) -> dict[str, float]:
        """The metrics since the last call.

        `tokens_per_second` counts target tokens without padding, `padding` is its share of this rank's positions,
        `minutes_left` is at most `limit`, and `nll_loss`, if the model returned it, is the `mean` over all ranks.
        """
        if self._start is None:
            return {}
        updates = self._updates
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        metrics = {"tokens_per_second": round(float(self._target_tokens) / seconds, 1)}
        if self._positions:
            metrics["padding"] = round(1 - float(self._tokens) / self._positions, 4)
        if updates and state.max_steps > 0:
            left = (state.max_steps - state.global_step) * seconds / updates / 60
            metrics["minutes_left"] = round(min(left, limit), 3)
        if self.nll is not None and updates:
            metrics["nll_loss"] = float(mean(self.nll)) / updates
        self.reset()
        self._start = now
        return metrics


def perplexities(logs: dict[str, float], exclude: str | None = None) -> dict[str, float]:
    """`perplexity` from `nll_loss` or `loss`, `eval_perplexity` from `eval_loss`, but not from `exclude`, a smoothed
    loss.
    """
    losses = [
        name
        for name in logs
        if name == "loss" or (name.startswith("eval") and name.endswith("_loss"))
    ]
    metrics = {
        name.removesuffix("loss") + "perplexity": _exp(logs[name])
        for name in losses
        if name != exclude
    }
    if "nll_loss" in logs:
        metrics["perplexity"] = _exp(logs["nll_loss"])
    return metrics


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
