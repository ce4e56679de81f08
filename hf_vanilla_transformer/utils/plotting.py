"""Figures as files, drawn with the optional dependency matplotlib."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_write import atomic_file
from .errors import UserError, naming_extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For scripts that matplotlib's default font lacks. The installed ones are used, and all others of _FAMILY.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Arial Unicode MS",
    "Noto Sans",
)
_FAMILY = "Noto Sans"
_DPI = 150
_MAX_PIXELS = 12_000  # on the longer side. matplotlib refuses more than 2^16 and needs memory for all of them.


def check_figure_path(path: str | os.PathLike) -> None:
    """Refuse a path that `figure_file` cannot write to."""
    if Path(path).suffix[1:].lower() not in _figure_class()().canvas.get_supported_filetypes():
        raise UserError(f"{path}: matplotlib cannot write this format: name it .png, .pdf or .svg")


@contextmanager
def figure_file(path: str | os.PathLike, **settings: Any) -> "Iterator[Figure]":
    """A figure to draw on. It is written to `path` (atomically) when the block ends, in the format of its suffix.

    The figure needs no display, and the user's matplotlib settings and backend stay as they are. `settings` are
    arguments of `matplotlib.figure.Figure`, such as `figsize` and `layout`.
    """
    check_figure_path(path)
    import matplotlib
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    family = [font for font in _FONTS if font in installed]
    family += sorted(font for font in installed - set(family) if font.startswith(_FAMILY))
    with matplotlib.rc_context({"font.family": family or ["sans-serif"]}):
        figure = _figure_class()(**settings)
        yield figure
        dpi = min(_DPI, _MAX_PIXELS / max(figure.get_size_inches()))
        with atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=dpi)


def _figure_class() -> "type[Figure]":
    with naming_extras():
        from matplotlib.figure import Figure
    return Figure
