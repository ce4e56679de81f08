"""Weights are numbers: those that are not finite are refused, wherever they come from."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .errors import UserError

# Other classes are quantised weights, which compute numbers only when they are used.
_PLAIN = (Tensor, nn.Parameter)


def first_not_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a number that is not finite, or None.

    Each tensor is read once, of a sharded one the part of this rank. A device is waited for once.
    """
    names = []
    are_finite = []
    for name, tensor in weights:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if type(local) not in _PLAIN or not local.is_floating_point():
            continue
        if local.is_meta or local.numel() == 0:
            continue
        if local.element_size() == 1:  # torch has no extremes of float8
            local = local.float()
        # If a number is NaN, so are both. Twenty times as fast as `isfinite` of all numbers on a CPU.
        extremes = torch.stack(local.detach().aminmax())
        names.append(name)
        are_finite.append(extremes.isfinite().all())
    if not names:
        return None
    on_one_device = torch.stack([each.to(are_finite[0].device) for each in are_finite])
    pairs = zip(names, on_one_device.tolist(), strict=True)
    return next((name for name, is_finite in pairs if not is_finite), None)


def require_finite(weights: Iterable[tuple[str, Tensor]], where: object, remedy: str) -> None:
    """Refuse weights that are not finite, in one line from `where` over the tensor's name to the `remedy`."""
    if (name := first_not_finite(weights)) is not None:
        raise not_finite(where, name, remedy)


def not_finite(where: object, name: str, remedy: str) -> UserError:
    """The error of `require_finite`."""
    return UserError(f"{where}: {name} contains numbers that are not finite; {remedy}")
