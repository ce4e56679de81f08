"""Reports as one HTML file that loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto }
td, th { padding: .3rem .8rem; text-align: start }
tr { border-bottom: 1px solid #8884 } td:not(:first-child) { font-variant-numeric: tabular-nums }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem } dt { opacity: .7 } dd { margin: 0 }
code { font-size: .85em; opacity: .8; overflow-wrap: anywhere }"""


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text. Each cell has its own direction."""
    cells = "".join(f"<th>{escape(cell)}" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f'<td dir="auto">{escape(cell)}' for cell in row) for row in rows
    )
    return f"<table><thead><tr>{cells}<tbody>{lines}</table>"


def html_texts(texts: Mapping[str, str]) -> str:
    """Texts below one another, with their names."""
    terms = "".join(
        f'<dt>{escape(name)}<dd dir="auto">{escape(text)}' for name, text in texts.items()
    )
    return f"<dl>{terms}</dl>"


def html_page(title: str, parts: Sequence[str]) -> str:
    """A page of these parts, in HTML."""
    start = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    head = f'{start}<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return f"{head}<h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
