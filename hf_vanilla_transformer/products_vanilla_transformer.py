"""Linear layers for a few rows at a time: x W^T + b with weights that are laid out once.

A beam search reads one word of each beam, so a product has few rows and waits for the weights. So what counts is how
the weights stand in memory, and in how many bits.

Shapes: R rows, D inputs, O outputs.
"""

import math
import platform
import threading
import warnings
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Numbers of a float32 matrix below which calling oneDNN costs more than it saves.
_LEAST_LAID_OUT = 2**19

#: What `decoder_weights` of `generate` may be, beside None.
EIGHT_BITS = "int8"

# Rows up to which FBGEMM is the fastest with 8 bits. For more of them bfloat16 is as fast as oneDNN with 8 bits, but
# for a matrix of so many numbers, an output layer.
_MOST_FEW, _LEAST_WIDE = 12, 2**22

_LAYING_OUT = threading.Lock()


class Product(nn.Module):
    """x W^T + b of linear layers with the same input, their outputs side by side.

    On x86 processors oneDNN multiplies by a weight that it has laid out itself, in about two thirds of the time for
    the few rows of a beam search. The layout is a second copy of the weight.

    Args:
        linears: D inputs each.
        dtype: of x and of what comes back.
        kind: "int8" computes with weights of 8 bits where the processor can (`can_use_eight_bits`): a float32 product
            always, a bfloat16 one where it has few rows or a large weight. It has weights for one, few and many rows.
            None is `dtype` alone.
        compiled: for `torch.compile`, which lays weights out itself.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], dtype: torch.dtype, kind: str | None = None, compiled: bool = False
    ):
        super().__init__()

        def side_by_side(weights: list[Tensor]) -> Tensor:
            return (weights[0] if len(weights) == 1 else torch.cat(weights)).detach().to(dtype)

        weight = side_by_side([linear.weight for linear in linears])  # (O, D)
        bias = None if linears[0].bias is None else side_by_side([linear.bias for linear in linears])
        eight = kind == EIGHT_BITS and can_use_eight_bits(weight)
        self.plain = EightBitsOfBoth(weight, bias) if compiled and eight else AsItStands(weight, bias)
        self.ways = [] if compiled else self._ways(eight)

    def _ways(self, eight: bool) -> "list[tuple[float, Way]]":
        """Up to how many rows to multiply in which way; the last is for all others."""
        weight, bias = self.plain.weight, self.plain.bias
        full, many = weight.dtype == torch.float32, cast(Way, self.plain)
        if eight and (full or weight.numel() >= _LEAST_WIDE):
            many = EightBitsOfMany(weight, bias)
        elif _can_lay_out(weight):
            many = LaidOut(weight, bias)
        if eight:
            return [(1, EightBitsOfWeight(weight, bias)), (_MOST_FEW, EightBits(weight, bias)), (math.inf, many)]
        # A float32 row by a matrix only waits for the weights, which are as many in either layout.
        return [(1, self.plain), (math.inf, many)] if full else [(math.inf, many)]

    def _way(self, x: Tensor) -> "Way":
        for rows, way in self.ways:
            if len(x) <= rows:
                return way
        return self.plain

    def __call__(self, x: Tensor) -> Tensor:
        """(R, D) to (R, O)."""
        return self._way(x)(x)

    def with_relu(self, x: Tensor) -> Tensor:
        """max(0, x W^T + b), (R, O)."""
        return self._way(x).with_relu(x)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` (R, O) + x W^T + b."""
        return self._way(x).added_to(residual, x)


# Ways to multiply


class AsItStands(nn.Module):
    """The weight (O, D) as it is, by torch's own choice."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def with_relu(self, x: Tensor) -> Tensor:
        return self(x).relu_()

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class LaidOut:
    """A weight that oneDNN has laid out, and its sums with what comes after the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def with_relu(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "relu", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class EightBitsOfWeight(AsItStands):
    """A weight with 8 bits a number and a scale for each output; x stays as it is. The quickest for one row."""

    steps: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        numbers, steps = _in_eight_bits(weight)
        super().__init__(numbers, bias)
        self.register_buffer("steps", steps.to(weight.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        product = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.steps)
        return product if self.bias is None else product + self.bias


class EightBitsOfBoth(AsItStands):
    """A weight with 8 bits a number and a scale for each output; x gets 8 bits and a scale for each row.

    For `torch.compile`: the scales become parts of the operations before and after, and the product of whole numbers
    is made by AMX or VNNI also for one row.
    """

    steps: Tensor
    zero: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        numbers, steps = _in_eight_bits(weight)
        super().__init__(torch.ops.onednn.qlinear_prepack(numbers, None), bias)
        self.register_buffer("steps", steps)
        self.register_buffer("zero", torch.zeros(len(weight), dtype=torch.int32))

    def __call__(self, x: Tensor) -> Tensor:
        numbers, steps = _in_eight_bits(x)  # (R, D), (R,)
        weight = self.weight, self.steps, self.zero, None
        product = torch.ops.onednn.qlinear_pointwise.default(
            numbers, 1.0, 0, *weight, 1.0, 0, torch.float32, "none", [], ""
        )
        product = product * steps[:, None]  # (R, O)
        return (product if self.bias is None else product + self.bias).to(x.dtype)


class EightBits:
    """A weight with 8 bits a number and a scale for each output; x gets 8 bits and one scale while it is multiplied.

    So the words that are read together have a little influence on each other.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        step = _steps(weight).double()
        zero = torch.zeros(len(weight), dtype=torch.long)
        # torch means to take quantised tensors away one day, and says so to everybody who makes one; the products,
        # which have the best speed for few rows, need them. The lock is for the filters, which all threads share.
        with _LAYING_OUT, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_channel(weight.float(), step, zero, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, None if bias is None else bias.float())
        # Without these instructions sums of two products have 16 bits, for which x may have only 7.
        self.seven = not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, self.seven).to(x.dtype)

    def with_relu(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_relu_dynamic(x.float(), self.packed, self.seven).to(x.dtype)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        product = torch.ops.quantized.linear_dynamic(x.float(), self.packed, self.seven)
        return product.add_(residual).to(residual.dtype)


class EightBitsOfMany:
    """As `EightBits`, by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        numbers, self.steps = _in_eight_bits(weight)
        self.zero = torch.zeros(len(weight), dtype=torch.int32)
        self.packed = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, "none")

    def with_relu(self, x: Tensor) -> Tensor:
        return self._product(x, "relu")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product(x, "none").add_(residual)

    def _product(self, x: Tensor, after: str) -> Tensor:
        low, high = x.float().aminmax()
        step = max(-low.item(), high.item()) / 127 or 1.0
        eight = (x.float() * (1 / step)).round_().to(torch.int8)
        weight = self.packed, self.steps, self.zero, self.bias
        return torch.ops.onednn.qlinear_pointwise.default(eight, step, 0, *weight, 1.0, 0, x.dtype, after, [], "")


def _steps(matrix: Tensor) -> Tensor:
    """Of 8 bits on either side of 0, for each row of a matrix, (rows,)."""
    return (matrix.float().abs().amax(dim=1) / 127).clamp_(min=1e-30)


def _in_eight_bits(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (rows, D), and the steps (rows,) that they count."""
    steps = _steps(matrix)
    return (matrix.float() / steps[:, None]).round_().to(torch.int8), steps


Way = AsItStands | LaidOut | EightBits | EightBitsOfMany


# What this processor can


def _on_x86(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")


def _can_lay_out(weight: Tensor) -> bool:
    if not _on_x86(weight) or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _LEAST_LAID_OUT
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_use_eight_bits(weight: Tensor) -> bool:
    """Whether products with this weight can have 8 bits: float32 or bfloat16, on an x86 processor, by FBGEMM."""
    return (
        _on_x86(weight)
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and hasattr(torch, "quantize_per_channel")
    )
