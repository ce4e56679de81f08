"""Linear layers with weights that are packed once, for the few rows of a decoding step.

A step reads one token of each beam, so a product waits for its weights. Their layout in memory and
their number of bits decide its speed.

Shapes: R rows, D inputs, O outputs.
"""

import platform
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention_vanilla_transformer import joint_bias
from ..utils.system_info import cpu_name
from . import c_kernels, kernels
from .c_compiler import DEFAULT

#: The quantization of `optimize_for_inference` beside None.
INT8 = "int8"

UNSIGNED = 128  # added to signed bytes, makes them unsigned

# Sizes below which a float32 call of oneDNN costs more than it saves.
_LEAST_PREPACKED = 2**19  # elements of a weight
_LEAST_SLOW = 2**14  # elements of a weight where MKL is slow
_LEAST_PRODUCT = 2**20  # there, elements of a weight below `_LEAST_PREPACKED` times the rows of x

# Products of an element of x and one of the weight, up to so many of which a call of oneDNN costs more than it saves.
# Its products of bfloat16 are fast.
_MOST_PLAIN = {torch.int8: 2**24, torch.float32: 2**21, torch.bfloat16: 3 * 2**18}

_ALIGNED = 8  # elements of 16 bits, to whose multiples cuBLAS writes rows by its fast kernels


class PlainLinear(nn.Module):
    """x W^T + b with the weight (O, D) as it is, by torch's kernels."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        # Torch has fused products for the device. A step asks often, and buffers are slow to find.
        self.fuses = weight.device.type not in ("cpu", "mps")

    def forward(self, x: Tensor) -> Tensor:
        """(R, D) to (R, O)."""
        if not self.fuses or len(self.weight) % _ALIGNED == 0:
            return F.linear(x, self.weight, self.bias)
        outputs = len(self.weight)  # 58,101 tokens, for example
        rows = self.weight.new_empty(len(x), outputs + -outputs % _ALIGNED)
        product = torch.mm(x, self.weight.T, out=rows[:, :outputs])
        return product if self.bias is None else product.add_(self.bias)

    def linear_relu(self, x: Tensor) -> Tensor:
        """max(0, x W^T + b), (R, O)."""
        if self.fuses and self.bias is not None:
            return kernels.linear_relu(x, self.weight, self.bias)
        return self(x).relu_()

    def linear_add(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` (R, O) + x W^T + b. A GPU may overwrite the residual."""
        if self.fuses and self.bias is None:
            return residual.addmm_(x, self.weight.T)  # without a copy of the residual, one kernel
        return residual + self(x)


class PrepackedLinear(PlainLinear):
    """A weight in oneDNN's blocked layout, in about two thirds of the time. ReLU and residual are fused."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # One float32 row only waits for the weights, as many in either layout.
        self.plain_rows = 1 if weight.dtype == torch.float32 else 0
        if self.plain_rows and weight.numel() < _LEAST_PREPACKED:
            self.plain_rows = _LEAST_PRODUCT // weight.numel()
        # A view would keep it all.
        super().__init__(weight if self.plain_rows else weight.new_empty(0), bias)
        self.packed = kernels.reorder(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(R, D) to (R, O), or (B, S, D) to (B, S, O)."""
        if x.shape[:-1].numel() <= self.plain_rows:
            return super().forward(x)
        return kernels.linear_pointwise(x, self.packed, self.bias, "none")

    def linear_relu(self, x: Tensor) -> Tensor:
        if len(x) <= self.plain_rows:
            return super().linear_relu(x)
        return kernels.linear_pointwise(x, self.packed, self.bias, "relu")

    def linear_add(self, residual: Tensor, x: Tensor) -> Tensor:
        if len(x) <= self.plain_rows:
            return super().linear_add(residual, x)
        return kernels.linear_add(x, residual, self.packed, self.bias)


class DynamicInt8Linear(PlainLinear):
    """Dynamic int8: a scale for each output of the weight and, computed at each call, for each row of x.

    x becomes unsigned, from -127 … 127 to 1 … 255: CPUs with VNNI and without AMX multiply unsigned by signed bytes
    only, and oneDNN computes signed by signed there a hundred times slower. The shift adds 128 Σ_d W[o, d] to output
    o, and the bias of the product subtracts it. CPUs without VNNI add two products in 16 bits. 255 · 127 · 2 exceeds
    them, so the weight gets 7 bits there.
    """

    scales: Tensor
    zero_points: Tensor
    shift: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        integers, scales = quantize_per_row(weight, limit=largest_weight())  # (O, D), (O,)
        super().__init__(kernels.prepack_int8(integers), bias)
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros(len(weight), dtype=torch.int32))
        # (O,)
        self.register_buffer("shift", -UNSIGNED * scales * integers.sum(dim=1, dtype=torch.float32))
        # `Rows.times` multiplies at most so many rows in C. -1 excludes an empty batch, too.
        few = _MOST_PLAIN[torch.int8] // weight.numel() if multiplies_like_onednn() else 0
        self.plain_rows = few or -1
        self.blocks = c_kernels.in_blocks(integers) if few else None
        self.depth = weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        integers, scales = quantize_per_row(x, UNSIGNED, torch.uint8)  # (R, D), (R,)
        product = self.product(integers) * scales[:, None]
        return (product if self.bias is None else product + self.bias).to(x.dtype)  # (R, O)

    def product(self, integers: Tensor) -> Tensor:
        """Quantised rows (R, D) times the weight, (R, O), without the scales of the rows and without the bias."""
        return kernels.int8_product(
            integers, self.weight, self.scales, self.zero_points, self.shift
        )


class FloatLinear(NamedTuple):
    """x W^T + b for few rows in C. The weight (O, D) is the model's own where it is that of one layer."""

    weight: Tensor  # in float32 or bfloat16
    bias: Tensor | None  # in float32

    @classmethod
    def of(cls, *linears: nn.Linear, dtype: torch.dtype) -> "FloatLinear":
        """Linear layers with the same input as one."""
        weights = [linear.weight.detach().to(dtype) for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
        bias = joint_bias(linears)
        return cls(weight, None if bias is None else bias.detach().float())

    @property
    def plain_rows(self) -> int:
        """The most rows of a call in C. -1: none, and no empty batch."""
        return _MOST_PLAIN[self.weight.dtype] // self.weight.numel() or -1

    def __call__(self, x: Tensor) -> Tensor:
        """(R, D) to (R, O), both in float32."""
        product = c_kernels.multiply_floats(x, self.weight)
        return product if self.bias is None else product.add_(self.bias)


@cache
def largest_weight() -> int:
    """The largest integer of a weight whose products are exact on this CPU: 127, or 64 without VNNI."""
    weight = torch.full((1, 2), 127, dtype=torch.int8)
    scale = torch.ones(1)
    x = torch.full((1, 2), 255, dtype=torch.uint8)
    packed = kernels.prepack_int8(weight)
    # (1, 1)
    product = kernels.int8_product(x, packed, scale, torch.zeros(1, dtype=torch.int32), None)
    return 127 if product.item() == 2 * 255 * 127 else 64  # 2 · 255 · 64 < 2^15


@cache
def multiplies_like_onednn() -> bool:
    """Return whether `c_kernels.multiply` is fast on this CPU, and has oneDNN's bits.

    With others a sentence would get other numbers in a batch than alone.
    """
    if c_kernels.library() is None or c_kernels.instruction_set() == DEFAULT:
        return False
    draw = torch.Generator().manual_seed(0)
    weight, scales = quantize_per_row(torch.randn(48, 80, generator=draw), limit=largest_weight())
    weight[:2] = largest_weight() * torch.tensor([[1], [-1]])
    shift = torch.randn(48, generator=draw)
    x = torch.randint(1, 256, (5, 80), generator=draw, dtype=torch.uint8)
    x[0] = 255
    packed = kernels.prepack_int8(weight)
    zero_points = torch.zeros(48, dtype=torch.int32)
    expected = kernels.int8_product(x, packed, scales, zero_points, shift)
    return c_kernels.multiply(x, c_kernels.in_blocks(weight), scales, shift).equal(expected)


def quantize_per_row(
    matrix: Tensor, shift: int = 0, dtype: torch.dtype = torch.int8, limit: int = 127
) -> tuple[Tensor, Tensor]:
    """Integers from -limit to limit of a matrix (R, D), plus `shift`, and the scales (R,)."""
    scales = (matrix.float().abs().amax(dim=1) / limit).clamp_(min=1e-30)
    return (matrix.float() / scales[:, None]).round_().add_(shift).to(dtype), scales


def packed_linear(
    linears: Sequence[nn.Linear],
    dtype: torch.dtype,
    quantization: str | None = None,
) -> PlainLinear:
    """Linear layers with the same input as one, their outputs side by side. A single one shares its weight."""
    weights = [linear.weight.detach().to(dtype) for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # (O, D)
    bias = joint_bias(linears)
    if bias is not None:
        bias = bias.detach().to(dtype)
    if quantization == INT8:
        return DynamicInt8Linear(weight, bias)
    if not _can_prepack(weight):
        return PlainLinear(weight, bias)
    return PrepackedLinear(weight, bias)


def _is_x86(device: torch.device) -> bool:
    return device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")


def _can_prepack(weight: Tensor) -> bool:
    if not _is_x86(weight.device) or not kernels.can_reorder(weight.dtype):
        return False
    least = min(_LEAST_PREPACKED, _LEAST_SLOW) if mkl_is_slow() else _LEAST_PREPACKED
    return weight.dtype != torch.float32 or weight.numel() >= least


@cache
def mkl_is_slow() -> bool:
    """Return whether MKL has half of oneDNN's speed in float32: it uses AVX-512 on Intel CPUs only."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AMD" in cpu_name()


def int8_error(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why dynamic int8 cannot run here, or None."""
    if not _is_x86(device):
        where = f"the model is on {device}, the machine is {platform.machine()}"
        return f"quantization: {INT8!r} runs on x86 CPUs; {where}; leave it out"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"quantization: {INT8!r} computes in float32 or bfloat16, not in {dtype}; load the model in one of them"
    if not kernels.has_int8():
        return f"quantization: this build of torch has no oneDNN kernels for {INT8!r}; leave it out"
    return None
