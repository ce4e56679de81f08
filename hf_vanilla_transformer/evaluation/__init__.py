"""Evaluation of a trained model: metrics of its translations, comparison of systems, and attention maps."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .comparison import compare_systems
    from .metrics import example_translations, score_translations
    from .plots import cross_attention, plot_attention
    from .trainer_metrics import translation_metrics

__all__ = [
    "compare_systems",
    "cross_attention",
    "example_translations",
    "plot_attention",
    "score_translations",
    "translation_metrics",
]

__getattr__ = lazy_names(
    __name__,
    {
        "compare_systems": ".comparison",
        "cross_attention": ".plots",
        "example_translations": ".metrics",
        "plot_attention": ".plots",
        "score_translations": ".metrics",
        "translation_metrics": ".trainer_metrics",
    },
)
