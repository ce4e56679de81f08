"""Translate with a trained model: the fast decoding engine, and the translator that feeds it."""

from typing import TYPE_CHECKING, Any

from .optimize import deoptimize, optimize_for_inference

if TYPE_CHECKING:
    from .translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator", "deoptimize", "optimize_for_inference"]


def __getattr__(name: str) -> Any:
    """Import the translator on first use: its tokenizers need `datasets`, 90 MB that an optimized model does not."""
    if name not in ("Hypothesis", "Translator"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import translator

    return getattr(translator, name)
