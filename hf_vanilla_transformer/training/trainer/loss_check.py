"""Stop a run whose losses, gradients or weights are not finite."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...utils.errors import UserError
from ...utils.finite import first_not_finite, not_finite
from .muon import MuonAdamW

MOST_UNREAD = 1000  # numbers of a run that logs and saves seldom

LEAST_SCALE = 1e-4  # of fp16's losses, as in fairseq: after some thirty updates with gradients that are not finite

#: The lines of the data in a batch of an update, or in all of this rank. None if they are unknown.
LinesOf = Callable[[int, int | None], list[int] | None]


class LossCheck:
    """Keeps the losses of batches and the norms of gradients until they are read, because reading waits for a GPU."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, int | None, Tensor]] = []
        self.skipped = 0  # updates that were left out since this was logged

    def add(self, update: int, batch: int | None, number: Tensor) -> None:
        """Keep the loss of a batch of an update, or without a batch the norm of the gradient of the update."""
        self._unread.append((update, batch, number.detach().float().clone()))

    @property
    def is_full(self) -> bool:
        """True if the numbers should be read, because they are many."""
        return len(self._unread) >= MOST_UNREAD

    def require_finite(self, lines_of: LinesOf, skips: bool = False) -> None:
        """Read the numbers since the last call.

        Args:
            skips: count the gradients that are not finite, because their updates were left out.

        Raises:
            UserError: a loss or, unless it `skips`, a gradient is not finite.
        """
        unread = self._unread
        self._unread = []
        if not unread:
            return
        values = torch.stack([number for _, _, number in unread]).tolist()
        for (update, batch, _), value in zip(unread, values, strict=True):
            if math.isfinite(value):
                continue
            if batch is None and skips:
                self.skipped += 1
            elif batch is None:
                raise gradient_error(update, value, lines_of(update, None))
            else:
                message = f"the loss of update {update + 1} is {value}"
                raise UserError(message + _in_lines("its batch", lines_of(update, batch)))


def gradient_error(update: int, norm: float, lines: list[int] | None) -> UserError:
    """The error of a gradient that is not finite, with the lines of the batches in question."""
    message = f"the gradient of update {update + 1} is not finite (its norm is {norm}), although its loss is"
    remedy = "; skip_nonfinite_gradients leaves such updates out"
    return UserError(message + _in_lines("its data", lines) + remedy)


def _in_lines(batch: str, lines: list[int] | None) -> str:
    if not lines:
        return ""
    return f"; {batch} contains the lines {', '.join(map(str, sorted({*lines})))}"


def require_loss_scale(scaler: torch.amp.GradScaler | None) -> None:
    """Stop a run in fp16 whose scaler leaves out every update. A device is waited for."""
    if scaler is not None and scaler.get_scale() < LEAST_SCALE:
        raise UserError(
            f"fp16: the gradients are not finite with any scale of the loss, down to {scaler.get_scale():.1e}: "
            "train in bf16, or find the data or the layer that they come from"
        )


def leave_out_on_device(optimizer: Any, norm: Tensor) -> bool:
    """Let a fused optimizer of torch leave out its step if the norm is not finite, without a wait for the device.

    False if it is not one. GradScaler tells it in the same way.
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    is_fused = getattr(plain, "_step_supports_amp_scaling", False)
    if not is_fused or isinstance(plain, MuonAdamW):
        return False
    plain.grad_scale = None
    plain.found_inf = norm.isfinite().logical_not().float()
    return True


def require_finite_on_all_ranks(
    weights: Iterable[tuple[str, Tensor]], where: object, remedy: str
) -> None:
    """`require_finite` for a run. All ranks must call it, and all raise, also for the shard of another one."""
    names = gather_object([first_not_finite(weights)])
    if name := next(filter(None, names), None):
        raise not_finite(where, name, remedy)
