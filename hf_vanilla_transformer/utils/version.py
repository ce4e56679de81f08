"""The version of this package. A source tree on PYTHONPATH has no metadata that would tell it."""

__version__ = "0.1.0"
