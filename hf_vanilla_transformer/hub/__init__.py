"""Publishing a finished run: its model card."""

from .card import CardFacts, describe_hardware, versions, write_model_card

__all__ = ["CardFacts", "describe_hardware", "versions", "write_model_card"]
