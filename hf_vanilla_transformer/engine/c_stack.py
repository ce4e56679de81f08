"""The sub-layers of a stack for few rows, in one call of `c_kernels.c`.

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
from .linear import DynamicInt8Linear, FloatLinear

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
        ("wide", _I),
    )

    @classmethod
    def of(cls, linear: FloatLinear | DynamicInt8Linear) -> "_Linear":
        if isinstance(linear, FloatLinear):
            outputs, depth = linear.weight.shape
            is_wide = linear.weight.dtype == torch.float32
            return cls(
                weight=linear.weight.data_ptr(),
                bias=address(linear.bias),
                depth=depth,
                outputs=outputs,
                wide=is_wide,
            )
        return cls(
            weight=address(linear.blocks),
            scales=linear.scales.data_ptr(),
            shift=linear.shift.data_ptr(),
            bias=address(linear.bias),
            depth=linear.depth,
            outputs=len(linear.scales),
        )


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
        ("wide", _I),
    )


class CStack:
    """The sub-layers of a `Stack`, as `run_stack` reads them.

    Args:
        sublayers: an `Attention` or a `FeedForward` each, and its last product.
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
        #: the most rows of a call. -1: none, and no empty batch
        self.most_rows = min(linear.plain_rows for linear in linears)
        if not all(sublayer.in_c for sublayer, _ in sublayers):
            self.most_rows = -1
        if self.most_rows < 0:
            return
        self.pre_norm = pre_norm
        self.in_bytes = isinstance(linears[0], DynamicInt8Linear)
        self.sublayers = (_Sublayer * len(sublayers))()
        for place, (sublayer, last) in zip(self.sublayers, sublayers, strict=True):
            place.first = _Linear.of(sublayer.first)
            place.last = _Linear.of(last)
            place.heads, place.key, place.value = sublayer.widths
            place.scaling = sublayer.scaling
        self.widest_product = max(place.first.outputs for place in self.sublayers)
        self.widest_input = max(place.last.depth for place in self.sublayers)
        self.norms = (_Norm * len(norms))()
        for place, norm in zip(self.norms, norms, strict=True):
            if norm is not None:
                place.gamma, place.beta = address(norm.weight), address(norm.bias)
                place.eps = norm.eps
        self.held = (linears, norms)  # the structures have addresses only

    def __call__(
        self, x: Tensor, caches: Sequence[tuple[Tensor, View, Tensor | None]]
    ) -> tuple[Tensor, Any]:
        """States (R, D) of embeddings `x` (R, D) in float32, in their place. In int8 also as `Rows`, else None.

        Args:
            caches: those of the attentions, in their order, each with its view, and the places (R,) of these rows.
        """
        count, width = x.shape
        rows = empty_rows(count, width) if self.in_bytes else None
        inner = Rows(empty(count, self.widest_input, dtype=torch.uint8), empty(count))
        room = empty(count, 2 * width + self.widest_product + self.widest_input)
        keys = (_Keys * len(caches))()
        for place, (cache, view, places) in zip(keys, caches, strict=True):
            place.cache, place.places = cache.data_ptr(), address(places)
            place.firsts, place.masks = view.firsts.data_ptr(), view.masks.data_ptr()
            place.visible, place.size = view.visible.data_ptr(), view.visible.shape[-1]
            place.wide = cache.dtype == torch.float32
        quantized = (None,) * 4 if rows is None else map(address, (*inner, *rows))
        library().run_stack(
            x.data_ptr(),
            count,
            width,
            self.sublayers,
            len(self.sublayers),
            self.norms,
            keys,
            self.pre_norm,
            self.widest_product,
            room.data_ptr(),
            *quantized,
        )
        return x, rows
