"""The files of the page, for any server. README.md in this folder describes `site.json` and the engines."""

import base64
import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..inference.languages import card_metadata
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from ..utils.untrusted import read_json_object

#: Content types by suffix, for the files of the page and of a model.
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

_EXAMPLES = 3

# Files for only one of the engines
_OF_ENGINE = {
    "server": ("server_engine.js",),
    "browser": ("browser_engine.js", "browser_runtime.js", "search.js"),
}
_ANY_POLICY = "default-src 'self'"  # of index.html, replaced by `_index`


def page_files(site: dict[str, object]) -> dict[str, bytes]:
    """The files of the page for one engine, by name. They belong into one folder.

    Args:
        site: the content of `site.json`. `site["engine"]` is "browser" or "server".
    """
    unused = [
        name for engine, names in _OF_ENGINE.items() if engine != site["engine"] for name in names
    ]
    folder = importlib.resources.files(__package__) / "static"
    files = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name not in unused
    }
    files["index.html"] = _index(files["index.html"].decode(), site).encode()
    files["site.json"] = (json.dumps(site, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def page_facts(
    model: VanillaTransformerForConditionalGeneration,
    folder: Path,
    source: str | None,
    target: str | None,
    task: str = "language",
) -> dict[str, object]:
    """The fields of `site.json` that both engines have."""
    return {
        "task": task,
        "title": folder.resolve().name,
        "source_language": source,
        "target_language": target,
        "parameters": model.num_parameters(),
        "layers": model.config.decoder_layers,
        "heads": model.config.decoder_attention_heads,
        "examples": _examples(folder),
    }


def _examples(folder: Path) -> list[str]:
    """Sources of the test translations in the folder of a run, or the texts of the `widget` in a card."""
    try:
        rows = read_json_object(folder / "all_results.json").get("test_examples")
    except (OSError, UserError):
        widget = card_metadata(folder).get("widget") or ()
        rows = [[each["text"]] for each in widget if isinstance(each, dict) and "text" in each]
    if not isinstance(rows, list):
        return []
    return [str(row[0]) for row in rows[:_EXAMPLES] if isinstance(row, list) and row]


def _index(html: str, site: dict[str, Any]) -> str:
    """index.html with its Content-Security-Policy and the hashes of modules from a different host."""
    modules = [entry for name, entry in site.get("runtime", {}).items() if name != "wasm"]
    hashes = {entry["url"]: entry["integrity"] for entry in modules if "integrity" in entry}
    import_map = json.dumps({"integrity": hashes}) if hashes else None
    if import_map is not None:
        html = html.replace(
            "<script ", f'<script type="importmap">{import_map}</script>\n  <script ', 1
        )
    return html.replace(_ANY_POLICY, content_security_policy(site, import_map), 1)


def content_security_policy(site: dict[str, Any], import_map: str | None = None) -> str:
    """Allow the page to load its files, and the runtime from its host, by the page's import map.

    Trusted types forbid scripts to make HTML of text. A server can send the policy as a header too.
    """
    urls = [urlsplit(entry["url"]) for entry in site.get("runtime", {}).values()]
    hosts = sorted({f"{url.scheme}://{url.netloc}" for url in urls if url.netloc})
    scripts = ["'self'", *hosts]
    if site["engine"] == "browser":
        scripts.append("'wasm-unsafe-eval'")
    if import_map is not None:
        scripts.append(
            f"'sha256-{base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()}'"
        )
    policy = {
        "default-src": ["'none'"],
        "script-src": scripts,
        "style-src": ["'self'"],
        "img-src": ["'self'"],
        "connect-src": ["'self'", *hosts],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    return "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items())
