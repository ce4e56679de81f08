"""`/docs`: the endpoints as a page without scripts, because FastAPI's own pages load theirs from other hosts."""

from html import escape
from typing import Any

_HEAD = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<link rel="icon" href="{files}icon.svg" type="image/svg+xml"><link rel="stylesheet" href="{files}style.css">"""


def api_page(openapi: dict[str, Any], files: str) -> str:
    """The endpoints and the fields of their bodies as HTML.

    Args:
        openapi: the content of `/openapi.json`. files: address of the page's files.
    """
    sections = [
        _section(f"{method.upper()} {path}", operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    title = escape(openapi["info"]["title"])
    about = f'{escape(openapi["info"]["description"])} <a href="openapi.json">openapi.json</a> has every schema.'
    head = _HEAD.format(title=title, files=escape(files))
    return f"{head}<header><h1>{title}</h1><p>{about}</p></header><main>{''.join(sections)}</main></html>"


def _section(name: str, operation: dict[str, Any]) -> str:
    bodies = operation.get("requestBody", {"content": {}})["content"]
    schema = bodies["application/json"]["schema"] if bodies else {"properties": {}}
    fields = "".join(
        f"<dt><code>{escape(field)}</code>{' (required)' if field in schema.get('required', []) else ''}</dt>"
        f"<dd>{escape(value['description'])}</dd>"
        for field, value in schema["properties"].items()
    )
    takes = f"<p>Takes {' or '.join(map(escape, bodies))}:</p><dl>{fields}</dl>" if fields else ""
    about = f"<p>{escape(operation.get('description', ''))}</p>"
    return f'<section class="card"><h2><code>{escape(name)}</code></h2>{about}{takes}</section>'
