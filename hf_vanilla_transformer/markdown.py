"""Markdown tables."""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in the pipe syntax of GitHub and the Hub, with one line per row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(" ".join(["|", *(f"{cell} |" if cell else "|" for cell in line)]) for line in lines)
