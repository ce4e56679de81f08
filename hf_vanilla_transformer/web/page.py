"""The files of the page, for whoever serves them. README.md in this folder describes `site.json` and the engines."""

import json
from importlib import resources
from typing import Any

#: Content types by suffix, of every file of the page and of a model beside it.
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "wasm": "application/wasm",
    "onnx": "application/octet-stream",
    "md": "text/markdown; charset=utf-8",
}


def page_files(site: dict[str, Any]) -> dict[str, bytes]:
    """The page for one engine, by file name.

    Args:
        site: the content of `site.json`; `site["engine"]` is "browser" or "server".

    Returns:
        The files, of which a server needs no others. Each belongs beside `index.html`.
    """
    folder = resources.files(__package__) / "page"
    other = {"browser": "server_engine.js", "server": "browser_engine.js"}[site["engine"]]
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != other}
    files["site.json"] = (json.dumps(site, indent=2, ensure_ascii=False) + "\n").encode()
    return files
