"""Evaluation of a trained model: metrics of its translations, comparison of systems, and attention maps."""

from .comparison import compare_systems
from .metrics import example_translations, score_translations, translation_metrics
from .plots import cross_attention, plot_attention

__all__ = [
    "compare_systems",
    "cross_attention",
    "example_translations",
    "plot_attention",
    "score_translations",
    "translation_metrics",
]
