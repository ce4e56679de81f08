"""Translate with a trained model: the translator and what feeds it."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
