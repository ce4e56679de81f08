"""Translate with a trained model: the fast decoding engine, and the translator that feeds it."""

from .optimize import deoptimize, optimize_for_inference
from .translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator", "deoptimize", "optimize_for_inference"]
