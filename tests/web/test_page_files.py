"""The files of the page: each engine's files, and the addresses the page may load."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_vanilla_transformer import web
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.shipped_models import model_folder, shipped_models
from hf_vanilla_transformer.web.page import content_security_policy, page_facts
from hf_vanilla_transformer.web.site import _runtime
from tests.model_helpers import tiny_model

FOLDER = Path(web.__file__).parent / "static"
SERVER = {"engine": "server", "search": {"num_beams": 4}}


def browser(local: bool) -> dict:
    return {"engine": "browser", "runtime": _runtime(local)}


def policy_of(html: str) -> dict[str, list[str]]:
    text = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert text is not None
    return {part.split()[0]: part.split()[1:] for part in text[1].split("; ")}


@pytest.mark.parametrize("name", shipped_models())
def test_page_of_a_shipped_model_offers_what_its_card_types(name: str) -> None:
    """Each is a source without an unknown symbol."""
    folder = Path(model_folder(name))
    tokenizer = load_tokenizers(folder)[0]
    offered = page_facts(tiny_model(), folder, None, None)["examples"]
    assert isinstance(offered, list)
    assert offered
    card = (folder / "README.md").read_text("utf-8")
    typed = re.findall(r"^echo (?:'(.+)'|(.+)) \| ", card, re.M)
    assert "".join(typed[0]) in offered
    assert not any(tokenizer.unk_token_id in tokenizer(text)["input_ids"] for text in offered)


@pytest.mark.parametrize(
    "widget", ["", "widget: 3", "widget: [a, [b], {src: c}]", "widget: {text: d}"]
)
def test_card_of_another_form_offers_nothing(widget: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\ntags: []\n{widget}\n---\n", encoding="utf-8")
    assert page_facts(tiny_model(), tmp_path, None, None)["examples"] == []


def offered_by_a_run(folder: Path, examples: object) -> object:
    (folder / "all_results.json").write_text(
        json.dumps({"test_examples": examples}), encoding="utf-8"
    )
    return page_facts(tiny_model(), folder, None, None)["examples"]


def test_page_of_a_run_offers_the_first_sources_of_its_test(
    tmp_path: Path,
) -> None:
    rows = [[f"source {number}", "translation", "reference"] for number in range(5)]
    offered = offered_by_a_run(tmp_path, rows)
    assert offered == ["source 0", "source 1", "source 2"]


@pytest.mark.parametrize(
    "examples", [None, 3, "text", {"0": ["a"]}, [3], [{"source": "a"}], ["text"], [[]]]
)
def test_results_of_another_form_offer_nothing(examples: object, tmp_path: Path) -> None:
    assert offered_by_a_run(tmp_path, examples) == []


@pytest.mark.parametrize(
    "site", [SERVER, browser(True), browser(False)], ids=["server", "local", "remote"]
)
def test_page_files_are_complete(site: dict) -> None:
    files = web.page_files(site)
    assert json.loads(files["site.json"]) == site
    for name, content in files.items():
        assert name.rpartition(".")[2] in web.CONTENT_TYPES
        named = re.findall(rb'(?:from|import|href=|src=|import\() ?"([^"#]+)"', content)
        missing = {each.decode().removeprefix("./") for each in named} - files.keys()
        # page.js names the engines of both. Only one is loaded
        assert missing <= (
            {"browser_runtime.js", "server_engine.js"} if name == "page.js" else set()
        ), name
    both = {"browser_engine.js", "server_engine.js"} & files.keys()
    assert both == {f"{site['engine']}_engine.js"}


def test_page_allows_only_its_own_files() -> None:
    for site in (SERVER, browser(local=True)):
        html = web.page_files(site)["index.html"].decode()
        policy = policy_of(html)
        assert policy["default-src"] == ["'none'"]
        assert policy["trusted-types"] == ["'none'"]
        extra = ["'wasm-unsafe-eval'"] if site["engine"] == "browser" else []
        assert policy["script-src"] == ["'self'", *extra]
        assert policy["connect-src"] == ["'self'"]
        assert not re.search(r"https?://(?!www\.w3\.org)", html)
        assert "unsafe-inline" not in html


def test_remote_runtime_has_pinned_versions_and_hashes() -> None:
    site = browser(local=False)
    html = web.page_files(site)["index.html"].decode()
    import_map = re.search(r'<script type="importmap">(.*?)</script>', html)
    assert import_map is not None
    hashes = json.loads(import_map[1])["integrity"]
    modules = {name: entry for name, entry in site["runtime"].items() if name != "wasm"}
    assert hashes == {entry["url"]: entry["integrity"] for entry in modules.values()}
    assert len(hashes) == 2
    assert all(re.search(r"@\d+\.\d+\.\d+/", entry["url"]) for entry in site["runtime"].values())
    own = base64.b64encode(hashlib.sha256(import_map[1].encode()).digest()).decode()
    policy = policy_of(html)
    (host,) = [source for source in policy["script-src"] if source.startswith("https://")]
    assert f"'sha256-{own}'" in policy["script-src"]
    assert policy["connect-src"] == ["'self'", host]
    assert all(entry["url"].startswith(f"{host}/") for entry in site["runtime"].values())
    assert html.index("importmap") < html.index(
        'type="module"'
    )  # a map must come before the first module


def test_policy_of_a_server_has_no_webassembly() -> None:
    assert "wasm" not in content_security_policy(SERVER)


def test_page_never_makes_html_of_text() -> None:
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextual|eval\("
    )
    for path in FOLDER.iterdir():
        assert not ways.search(path.read_text(encoding="utf-8")), path.name


def test_page_splits_sequences_at_line_ends_alone() -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    lines = ["- CC. C", "1. [N+]", "  ", "a\tb ", "C"]
    text = "\n".join(lines[:3]) + "\r\n" + "\n".join(lines[3:])
    module = json.dumps((FOLDER / "sentences.js").as_uri())
    script = (
        f"const {{ splitLines }} = await import({module}); "
        f"console.log(JSON.stringify(splitLines({json.dumps(text)})))"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    assert "".join(part["text"] for part in parts) == text
    assert [part["text"] for part in parts if part["is_sentence"]] == [
        line for line in lines if line.strip()
    ]
