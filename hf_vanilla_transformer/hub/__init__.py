"""Publishing a finished run: its model card, and the upload to the Hub (`hub.publishing`)."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .card import CardFacts, write_model_card

__all__ = [
    "CardFacts",
    "write_model_card",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CardFacts": ".card",
        "write_model_card": ".card",
    },
)
