"""A stack in int8 for few rows, in one call of `c_kernels.c`.

A decoding step of one sentence multiplies few rows by weights that are in the cache of the processor. It takes longer
to call a function from Python than to compute it.

Shapes: R rows, D width.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .c_kernels import Rows, View, address, empty, empty_rows, library

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float


# The structures of c_kernels.c.


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", _P),
        ("scales", _P),
        ("shift", _P),
        ("bias", _P),
        ("depth", _I),
        ("outputs", _I),
    )

    @classmethod
    def of(cls, linear: Any) -> "_Linear":
        tensors = (linear.blocks, linear.scales, linear.shift, linear.bias)
        return cls(*map(address, tensors), linear.depth, len(linear.scales))


class _Sublayer(ctypes.Structure):
    _fields_ = (
        ("first", _Linear),
        ("last", _Linear),
        ("heads", _I),
        ("key", _I),
        ("value", _I),
        ("scaling", _F),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("gamma", _P), ("beta", _P), ("eps", _F))


class _Keys(ctypes.Structure):
    _fields_ = (
        ("cache", _P),
        ("places", _P),
        ("firsts", _P),
        ("masks", _P),
        ("visible", _P),
        ("size", _I),
    )


class CStack:
    """The sub-layers of an `Int8Stack`, as `run_stack` reads them.

    Args:
        sublayers: an `Int8Attention` or an `Int8FeedForward` each, and its last product.
        norms: before and after each sub-layer, None for none.
        pre_norm: a residual connection adds to the sum before it is normalised.
    """

    def __init__(
        self,
        sublayers: Sequence[tuple[Any, Any]],
        norms: Sequence[nn.LayerNorm | None],
        pre_norm: bool,
    ):
        linears = [linear for sublayer, last in sublayers for linear in (sublayer.first, last)]
        #: so many rows a call may have
        self.most_rows = min(linear.plain_rows for linear in linears)
        if not all(sublayer.in_c for sublayer, _ in sublayers):
            self.most_rows = -1
        if self.most_rows < 0:
            return
        self.pre_norm = pre_norm
        self.widest_input = max(linear.depth for linear in linears)
        self.widest_product = max(len(linear.scales) for linear in linears)
        self.sublayers = (_Sublayer * len(sublayers))()
        for place, (sublayer, last) in zip(self.sublayers, sublayers, strict=True):
            place.first = _Linear.of(sublayer.first)
            place.last = _Linear.of(last)
            place.heads, place.key, place.value = sublayer.widths
            place.scaling = sublayer.scaling
        self.norms = (_Norm * len(norms))()
        for place, norm in zip(self.norms, norms, strict=True):
            if norm is not None:
                place.gamma, place.beta = address(norm.weight), address(norm.bias)
                place.eps = norm.eps
        self.held = (linears, norms)  # the structures have addresses only

    def __call__(
        self, x: Tensor, caches: Sequence[tuple[Tensor, View, Tensor | None]]
    ) -> tuple[Tensor, Rows]:
        """States (R, D) of embeddings `x` (R, D), in their place, also quantised. `caches` as of `Int8Stack`."""
        count, width = x.shape
        rows = empty_rows(count, width)
        room = empty(count, width + self.widest_product)
        inner = Rows(empty(count, self.widest_input, dtype=torch.uint8), empty(count))
        keys = (_Keys * len(caches))()
        for place, (cache, view, places) in zip(keys, caches, strict=True):
            place.cache, place.places = cache.data_ptr(), address(places)
            place.firsts, place.masks = view.firsts.data_ptr(), view.masks.data_ptr()
            place.visible, place.size = view.visible.data_ptr(), view.visible.shape[-1]
        library().run_stack(
            x.data_ptr(),
            count,
            width,
            self.sublayers,
            len(self.sublayers),
            self.norms,
            keys,
            self.pre_norm,
            room.data_ptr(),
            *map(address, inner),
            *map(address, rows),
        )
        return x, rows
