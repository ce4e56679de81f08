"""Evaluation of a trained model: metrics of its translations, and attention maps."""

from .attention_maps import cross_attention, plot_attention
from .metrics import example_translations, score_translations, translation_metrics

__all__ = ["cross_attention", "example_translations", "plot_attention", "score_translations", "translation_metrics"]
