"""The inference engine: fast decoding with packed, int8 and compiled weights. It imports the bundle only."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
