"""Evaluation of a trained model: metrics of its translations, comparison of systems, and attention maps."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
