"""A translator in the browser: the page, and a static site with the model as ONNX. See README.md in this folder."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
