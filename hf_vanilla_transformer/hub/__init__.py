"""Publishing a finished run: its model card, and the upload to the Hub (`hub.publishing`)."""

from .card import CardFacts, write_model_card

__all__ = ["CardFacts", "write_model_card"]
