"""A server of translations, for LibreTranslate's clients and for the page. See README.md in this folder."""

from .server import ServeOptions, serve

__all__ = ["ServeOptions", "serve"]
