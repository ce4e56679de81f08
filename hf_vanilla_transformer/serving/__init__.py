"""A translation server for LibreTranslate's clients and for the page. See README.md in this folder."""

from ..errors import UserError
from .options import Limits, ServeOptions

__all__ = ["Limits", "ServeOptions", "serve"]


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the requests that have arrived.

    Raises:
        UserError: the extra `serve` is not installed, the address is taken, or an error of `load_server`.
    """
    try:
        from .server import run
    except ImportError as error:
        raise UserError(f"{error.name} is missing: install the extra `serve`") from error
    run(options)
