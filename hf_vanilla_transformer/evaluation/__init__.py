"""Evaluation of a trained model: metrics of its translations, and attention maps."""

from .metrics import example_translations, score_translations, translation_metrics
from .plots import cross_attention, plot_attention

__all__ = ["cross_attention", "example_translations", "plot_attention", "score_translations", "translation_metrics"]
