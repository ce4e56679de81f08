"""Translate with a trained model: the fast decoding engine, and the translator that feeds it."""

from .translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
