"""A translator in the browser: the page, and a static site with the model as ONNX. See README.md in this folder."""

from .page import CONTENT_TYPES, page_files

__all__ = ["CONTENT_TYPES", "page_files"]
