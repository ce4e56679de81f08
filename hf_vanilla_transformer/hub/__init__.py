"""Publishing a finished run: its model card, and the upload to the Hub (`hub.publishing`)."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
