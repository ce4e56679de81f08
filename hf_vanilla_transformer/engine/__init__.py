"""The inference engine: fast decoding with packed, int8 and compiled weights. It imports the bundle only."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .optimize import deoptimize, optimize_for_inference

__all__ = [
    "deoptimize",
    "optimize_for_inference",
]

__getattr__ = lazy_names(
    __name__,
    {
        "deoptimize": ".optimize",
        "optimize_for_inference": ".optimize",
    },
)
