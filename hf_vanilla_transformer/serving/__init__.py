"""A translation server for LibreTranslate's clients and for the page. See README.md in this folder."""

from ..utils.errors import naming_extras
from .options import Limits, ServeOptions

__all__ = ["Limits", "ServeOptions", "serve"]


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the requests that have arrived.

    Raises:
        UserError: the extra `serve` is not installed, the address is taken, or an error of `load_server`.
    """
    with naming_extras():
        from .server import run
    run(options)
