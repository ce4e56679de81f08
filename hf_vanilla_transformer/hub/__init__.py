"""Publishing a finished run: its model card, and the way to the Hub (`hub.publishing`)."""

from .card import CardFacts, describe_hardware, versions, write_model_card

__all__ = ["CardFacts", "describe_hardware", "versions", "write_model_card"]
