"""Parts of matplotlib's figures."""

from typing import Any

from matplotlib.text import Text


def texts_of(artist: Any) -> dict[str, Text]:
    """The texts of a figure or an axis by what they say."""
    return {text.get_text(): text for text in artist.findobj(Text)}
