"""Markdown tables, and text of either direction in other text."""

import unicodedata
from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in the pipe syntax of GitHub and the Hub, with one line per row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        " ".join(["|", *(f"{cell} |" if cell else "|" for cell in line)]) for line in lines
    )


def isolated(text: str) -> str:
    """The text between U+2068 and U+2069 if it has letters written from right to left, otherwise unchanged.

    A page or a terminal then shows its signs, and the text around it, in their places (Unicode Standard Annex 9).
    """
    return (
        f"\u2068{text}\u2069" if {"R", "AL"} & set(map(unicodedata.bidirectional, text)) else text
    )
