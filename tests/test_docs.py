"""The documentation: public names have entries, and links of the Markdown files and of the built site resolve."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import hf_vanilla_transformer
from vanilla_transformer_cli.main import SUBCOMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "scripts" / "docs"
FOLDERS = ("hf_vanilla_transformer", "scripts", "tests", "model_cards")
MARKDOWN = list(ROOT.glob("*.md"))
for _folder in FOLDERS:
    MARKDOWN += sorted((ROOT / _folder).rglob("*.md"))
MARKDOWN.remove(ROOT / "hf_vanilla_transformer" / "hub" / "card_template.md")


def entries() -> set[str]:
    """Return the full names of all entries of the API reference."""
    names = set()
    for path in sorted((DOCS / "api").glob("*.rst")):
        module = ""
        directives = re.findall(
            r"(?m)^\.\. (currentmodule|py:data|auto\w+):: ([\w.]+)", path.read_text("utf-8")
        )
        for directive, name in directives:
            if directive == "currentmodule":
                module = f"{name}."
            else:
                names.add(name if name.startswith("hf_vanilla_transformer.") else module + name)
    return names


def resolve(name: str) -> object:
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


def public_names() -> dict[str, object]:
    """Return what the package and its subpackages export, and what the documents import, under each name."""
    packages = [path.parent for path in ROOT.glob("hf_vanilla_transformer/**/__init__.py")]
    names = set()
    for package in (".".join(path.relative_to(ROOT).parts) for path in packages):
        exported = getattr(importlib.import_module(package), "__all__", ())
        names |= {f"{package}.{name}" for name in exported}
    pattern = r"(?m)^from (hf_vanilla_transformer[\w.]*) import (?:\(([^)]*)\)|(.*))$"
    for path in MARKDOWN:
        for module, several, one in re.findall(pattern, path.read_text("utf-8")):
            imported = re.findall(r"\w+", several or one)
            names |= {f"{module}.{name}" for name in imported}
    return {name: resolve(name) for name in sorted(names)}


def test_every_subcommand_has_an_entry() -> None:
    text = (DOCS / "commands.rst").read_text("utf-8")
    shown = re.findall(r"(?m)^\.\. command-help:: (\w+)$", text)
    assert sorted(shown) == sorted(SUBCOMMANDS)


def test_every_public_name_has_an_entry() -> None:
    documented = {id(resolve(name)) for name in entries()}
    for name, value in public_names().items():
        assert id(value) in documented, name


@pytest.mark.parametrize("name", sorted(entries()))
def test_entry_has_a_docstring(name: str) -> None:
    value = resolve(name)
    if isinstance(value, type):
        assert vars(value).get("__doc__"), "a docstring of its own, not its base's"
    elif callable(value):
        assert value.__doc__


def test_every_export_of_the_package_is_public() -> None:
    assert {
        f"hf_vanilla_transformer.{name}" for name in hf_vanilla_transformer.__all__
    } <= entries()


def slugs(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    without_code = re.sub(r"(?ms)^```.*?^```", "", text)
    headings = re.findall(r"(?m)^#+ (.*)$", without_code.lower())
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_markdown_resolve(path: Path) -> None:
    text = re.sub(r"(?ms)^```(?!\{).*?^```", "", path.read_text("utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in slugs(target.read_text("utf-8")), link


class Page(HTMLParser):
    """The links and the anchors of an HTML file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.mark.slow  # half a minute, and the extra `docs`
def test_site_is_complete_and_offline(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    script = (ROOT / "scripts" / "docs.sh").read_text("utf-8")
    (options,) = re.findall(r'(?m)^"\$python" -m sphinx (.*) "\$@" \. runs/docs$', script)
    site = tmp_path / "site"
    arguments = [
        *(sys.executable, "-m", "sphinx"),
        *options.split(),
        *("-d", str(tmp_path / "cache")),
        ".",
        str(site),
    ]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), (path, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (path, link)
    resources = "".join(path.read_text("utf-8") for path in pages)
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://[^\"]*", resources) == []


@pytest.mark.parametrize("name", ["reactions", "phonemes"])
def test_chinese_guide_has_the_code_and_the_figures_of_the_english_one(name: str) -> None:
    def facts(folder: Path) -> tuple[list[str], list[str], list[str], int]:
        text = (folder / f"{name}.md").read_text(encoding="utf-8")
        code = re.findall(r"(?s)```\w+\n.*?```", text)
        tables = re.findall(r"(?m)^\|[-:|]+\|$", text)
        figures = [number.strip(".,") for number in re.findall(r"\d[\d.,]*", text)]
        return code, tables, sorted(figures), text.count("\n## ")

    assert facts(DOCS) == facts(DOCS / "zh")
