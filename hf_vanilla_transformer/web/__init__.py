"""A translator in the browser: the page, and a static site with the model as ONNX. See README.md in this folder."""

from typing import TYPE_CHECKING

from .. import lazy_names

if TYPE_CHECKING:
    from .page import CONTENT_TYPES, page_files

__all__ = [
    "CONTENT_TYPES",
    "page_files",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CONTENT_TYPES": ".page",
        "page_files": ".page",
    },
)
