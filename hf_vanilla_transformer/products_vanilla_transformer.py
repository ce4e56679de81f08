"""Linear layers for a few rows at a time: x W^T + b with weights that are laid out once.

A beam search reads one word of each beam, so a product has few rows and waits for the weights.
"""

import platform
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Numbers of a float32 matrix below which calling oneDNN costs more than it saves.
_LEAST_LAID_OUT = 2**19


class Product:
    """x W^T + b of linear layers with the same input, their outputs side by side.

    On x86 processors oneDNN multiplies by a weight that it has laid out itself, in about two thirds of the time for
    the few rows of a beam search. The layout is a second copy of the weight.
    """

    def __init__(self, linears: Sequence[nn.Linear], dtype: torch.dtype):
        def side_by_side(weights: list[Tensor]) -> Tensor:
            return (weights[0] if len(weights) == 1 else torch.cat(weights)).detach().to(dtype)

        self.weight = side_by_side([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else side_by_side([linear.bias for linear in linears])
        self.laid_out = (
            torch.ops.mkldnn._reorder_linear_weight(self.weight, None) if _can_lay_out(self.weight) else None
        )
        # A float32 row by a matrix only waits for the weights, which are as many in either layout.
        self.least_rows = 2 if dtype == torch.float32 else 1

    def __call__(self, x: Tensor) -> Tensor:
        """(R, D) to (R, outputs)."""
        if self.laid_out is None or len(x) < self.least_rows:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.laid_out, self.bias, "none", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` (R, outputs) + x W^T + b."""
        if self.laid_out is None or len(x) < self.least_rows:
            return residual + F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.laid_out, self.bias, "add")


def _can_lay_out(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _LEAST_LAID_OUT
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
