"""Sentence pairs as token ids, drawn again in each epoch, padded or packed."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
