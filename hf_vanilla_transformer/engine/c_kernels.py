"""The passes between products (`c_kernels.c`), from the library that the installation has built.

torch's operators read and write a matrix of rows ten times between two int8 products. These functions do it once.
Attention reads only the slots that are visible to a beam. torch's reads all slots of the sentence, and is slow for few
queries. In a source tree without the library each process compiles the functions for its processor, which takes two
seconds of processor time. Without a compiler torch's operators compute the same.

On x86 the functions are compiled for AVX-512 with and without VNNI, AVX2 and SSE2, and torch names the set that the
processor has. On ARM64 the compiler makes NEON instructions of them.

All tensors are contiguous and on the CPU. The calls release the GIL, and run in the calling thread.

Shapes: R rows, D width, O outputs, N keys of a sentence, H heads.
"""

import ctypes
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import logging

from ..utils.untrusted import one_line
from .c_compiler import DEFAULT, SOURCE, BuildError, build, instruction_sets, library_name
from .kernels import has_vnni

logger = logging.get_logger(__name__)

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
_ARGUMENTS = {
    "multiply": [_P, _I, _I, _P, _I, _P, _P, _P],
    "multiply_floats": [_P, _I, _I, _P, _I, _I, _P],
    "finish": [_P, _I, _I, _P, _P, _I, _P, _I, _P, _P, _F, _P, _P],
    "write_cache": [_P, _I, _I, _P, _P, _I, _P, _P, _I],
    "attend": [_P, _I, _I, _P, _P, _I, _I, _I, _F, _P, _I, _P, _P, _P, _I, _P, _P, _P],
    "run_stack": [_P, _I, _I, _P, _I, _P, _P, _I, _I, _P, _P, _P, _P, _P],
    "best": [_P, _I, _I, _I, _P, _P, _P, _I, _I, _I, _P, _P],
}


# With more threads torch's operators are faster.
_MOST_THREADS = 2

_loading = threading.Lock()


@cache
def library() -> Any:
    """The functions for this processor, or None if there is neither a built library nor a C compiler."""
    with _loading:
        return _functions()


def instruction_set() -> str:
    """The one of `instruction_sets` for this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and has_vnni():
        return "AVX512_VNNI"
    return capability if capability in instruction_sets() else DEFAULT


@cache
def _functions() -> Any:
    chosen = instruction_set()
    try:
        return _opened(SOURCE.with_name(library_name()), chosen)
    except OSError:  # a source tree, or no compiler at installation
        pass
    try:
        # Windows does not delete a library that is in use
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _opened(build(Path(folder), [chosen]), chosen)
    except (OSError, BuildError) as error:
        logger.warning_once(
            f"decoding on a CPU takes up to twice the time, because the C functions are not built: {one_line(error)}"
        )
        return None


def _opened(file: Path, chosen: str) -> Any:
    opened = ctypes.CDLL(str(file))
    functions = SimpleNamespace()
    for name, types in _ARGUMENTS.items():
        function: Any = opened[f"{name}_{chosen}"]
        function.argtypes = types
        function.restype = None
        setattr(functions, name, function)
    return functions


def kernels_compute(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether these functions compute for weights of this dtype on this device."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    return library() is not None


def has_few_threads() -> bool:
    """Return whether these functions, which use one thread, are faster than torch's operators, which use all."""
    return torch.get_num_threads() <= _MOST_THREADS


class Rows(NamedTuple):
    """Rows as unsigned bytes (≥ R, D), 128 for a zero, and their scales (R,)."""

    bytes: Tensor
    scales: Tensor

    def times(self, linear: Any) -> Tensor:
        """The product (R, O) with the weight of a `DynamicInt8Linear`, without the scales of the rows and the bias."""
        count = len(self.scales)
        if count <= linear.plain_rows:
            return multiply(self.bytes[:count], linear.blocks, linear.scales, linear.shift)
        return linear.product(self.bytes)[:count]


class View(NamedTuple):
    """The keys that each row sees, of a cache with N places for each sentence."""

    firsts: Tensor  # (R,), the first place of its sentence
    visible: Tensor  # Boolean, the masks of sentences or rows, N each
    masks: Tensor  # (R,), where the mask of the row begins


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for the functions to write to, whatever the default dtype and device are."""
    return torch.empty(*shape, dtype=dtype, device="cpu")


def empty_rows(count: int, width: int) -> Rows:
    """Room for rows. A few more have bytes: oneDNN takes a millisecond to compile a product with another count."""
    unit = 1 << max(0, count.bit_length() - 3)  # at most a quarter of the rows
    numbers = empty(-(-count // unit) * unit, width, dtype=torch.uint8)
    return Rows(numbers, empty(count))


def in_blocks(weight: Tensor) -> Tensor:
    """A weight of bytes (O, D) as `multiply` takes it, (O / 16, D / 4, 16, 4), padded with zeros."""
    outputs, depth = weight.shape
    padded = F.pad(weight, (0, -depth % 16, 0, -outputs % 16))
    # (O, D) -> (O / 16, 16, D / 4, 4) -> (O / 16, D / 4, 16, 4)
    return padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def multiply(rows: Tensor, blocks: Tensor, scales: Tensor, shift: Tensor) -> Tensor:
    """`scales` (O,) · x W^T + `shift` (O,) of unsigned bytes x (R, D) and a weight `in_blocks`, with oneDNN's bits."""
    outputs = len(scales)
    product = empty(len(rows), outputs)
    library().multiply(
        rows.data_ptr(),
        *rows.shape,
        blocks.data_ptr(),
        outputs,
        scales.data_ptr(),
        shift.data_ptr(),
        product.data_ptr(),
    )
    return product


def multiply_floats(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of x (R, D) in float32 and a weight (O, D) in float32 or bfloat16, (R, O) in float32."""
    outputs, depth = weight.shape
    product = empty(len(x), outputs)
    is_wide = weight.dtype == torch.float32
    library().multiply_floats(
        x.data_ptr(), len(x), depth, weight.data_ptr(), is_wide, outputs, product.data_ptr()
    )
    return product


def finish(
    x: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
    norm: nn.LayerNorm | None = None,
    norm_first: bool = False,
    quantized: bool = True,
) -> Any:
    """Scale the rows of a product `x` (R, O), add `bias` and `residual` (R, O), normalise and quantise, in place.

    Returns the rows, if `quantized`. With `norm_first`, `x` stays the sum, and only what is quantised is normalised.
    """
    rows = empty_rows(*x.shape) if quantized else None
    gamma, beta, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    library().finish(
        x.data_ptr(),
        *x.shape,
        address(scales),
        address(bias),
        relu,
        address(residual),
        norm_first,
        address(gamma),
        address(beta),
        eps,
        *((None, None) if rows is None else map(address, rows)),
    )
    return rows


def write_cache(
    product: Tensor, first: int, scales: Tensor, bias: Tensor | None, places: Tensor, cache: Tensor
) -> None:
    """Write the columns of a product (R, O) from `first` on into the rows `places` (R,) of a cache."""
    shift = None if bias is None else bias[first:]
    library().write_cache(
        product[:, first:].data_ptr(),
        *product.shape,
        address(scales),
        address(shift),
        cache.shape[-1],
        places.data_ptr(),
        cache.data_ptr(),
        cache.dtype == torch.float32,
    )


def attend(
    query: Tensor,
    widths: Sequence[int],
    scaling: float,
    cache: Tensor,
    view: View,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    quantized: bool = False,
) -> Any:
    """Eq. 1: queries (R, ≥ H · d_k) in float32, `widths` H, d_k, d_v, over the keys and values of a cache.

    Rows of queries may be strided. With `scales` and `bias` they are a product of `Rows.times`. Returns (R, H · d_v)
    in float32, or `Rows` if `quantized`.
    """
    heads, _, value = widths
    shape = (len(query), heads * value)
    found = empty_rows(*shape) if quantized else empty(*shape)
    outputs = (None, *found) if quantized else (found, None, None)
    library().attend(
        query.data_ptr(),
        len(query),
        query.stride(0),
        address(scales),
        address(bias),
        *widths,
        scaling,
        cache.data_ptr(),
        cache.dtype == torch.float32,
        *map(address, view),
        view.visible.shape[-1],
        *map(address, outputs),
    )
    return found


def best(
    logits: Tensor,
    count: int,
    normalize: bool,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The highest log-probabilities (without `normalize`: logits) of each row (R, V), and their tokens, (R, count).

    Args:
        logits: in float32 or bfloat16. With `scales` (R,) a product of `Rows.times`, which becomes logits in place.
        bias: (V,), of that product.
        hidden: (B, 1, V), the tokens that the rows of each sentence do not have.
    """
    shape = (len(logits), count)
    beams = 1 if hidden is None else len(logits) // len(hidden)
    values = empty(*shape)
    tokens = empty(*shape, dtype=torch.int64)
    library().best(
        logits.data_ptr(),
        *logits.shape,
        logits.dtype == torch.float32,
        *map(address, (scales, bias, hidden)),
        beams,
        count,
        bool(normalize),  # of num_beams, which may be a number of NumPy
        values.data_ptr(),
        tokens.data_ptr(),
    )
    return values, tokens
