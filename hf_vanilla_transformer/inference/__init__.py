"""Translate with a trained model: the translator and what feeds it."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from ..engine.optimize import deoptimize, optimize_for_inference
    from .hypothesis import Hypothesis
    from .translator import Translator

__all__ = [
    "Hypothesis",
    "Translator",
    "deoptimize",
    "optimize_for_inference",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Hypothesis": ".hypothesis",
        "Translator": ".translator",
        "deoptimize": "..engine.optimize",
        "optimize_for_inference": "..engine.optimize",
    },
)
