"""Evaluation of a trained model: metrics of its translations, and attention maps."""

from .attention_maps import cross_attention, plot_attention
from .metrics import TRANSLATION_SCORE, score_translations, translation_metrics

__all__ = ["TRANSLATION_SCORE", "cross_attention", "plot_attention", "score_translations", "translation_metrics"]
