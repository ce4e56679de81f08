"""Using and judging a trained model: translating text, scoring it, looking at its attention."""

from .attention_maps import cross_attention, plot_attention
from .metrics import TRANSLATION_SCORE, score_translations, translation_metrics
from .translating import Hypothesis, Translator

__all__ = [
    "TRANSLATION_SCORE",
    "Hypothesis",
    "Translator",
    "cross_attention",
    "plot_attention",
    "score_translations",
    "translation_metrics",
]
