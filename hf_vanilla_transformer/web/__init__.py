"""A translator in a browser: the page, and the static folder with the model as ONNX. See README.md in this folder."""

from .page import CONTENT_TYPES, page_files

__all__ = ["CONTENT_TYPES", "page_files"]
