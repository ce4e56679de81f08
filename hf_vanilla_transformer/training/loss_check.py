"""Stop a run whose loss is not finite."""

import math
from collections.abc import Callable

import torch

from ..utils.errors import UserError

MOST_UNREAD = 1000  # losses of a run that logs and saves seldom


class LossCheck:
    """Keeps the losses of batches until they are read, because reading a loss waits for a GPU."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, int, torch.Tensor]] = []

    def add(self, update: int, batch: int, loss: torch.Tensor) -> None:
        """Keep the loss of a batch of an update."""
        self._unread.append((update, batch, loss.detach().clone()))

    @property
    def is_full(self) -> bool:
        """True if the losses should be read, because they are many."""
        return len(self._unread) >= MOST_UNREAD

    def require_finite(self, lines_of: Callable[[int, int], list[int] | None]) -> None:
        """Read the losses since the last call.

        Args:
            lines_of: returns the lines of the data in a batch of an update, or None if they are unknown.

        Raises:
            UserError: a loss is not finite.
        """
        losses = self._unread
        self._unread = []
        if not losses:
            return
        values = torch.stack([loss for _, _, loss in losses]).tolist()
        for (update, batch, _), value in zip(losses, values, strict=True):
            if math.isfinite(value):
                continue
            message = f"the loss of update {update + 1} is {value}"
            lines = lines_of(update, batch)
            if lines is not None:
                message += f"; its batch contains the lines {', '.join(map(str, sorted(lines)))}"
            raise UserError(message)
