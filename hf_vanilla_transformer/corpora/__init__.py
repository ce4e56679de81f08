"""Sentence pairs from files, mixtures and built-in corpora, with the lines that they come from."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
