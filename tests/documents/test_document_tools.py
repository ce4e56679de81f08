"""Files of LibreOffice, pandoc and gettext are read by them again after translation, with the same structure."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_vanilla_transformer.documents.document_files import translate_document
from tests.documents.translators import upper

pytestmark = pytest.mark.slow

SOURCES = {
    "inline": "# A *head* {#h}\n\n**Bold words**, *italic*, ~~struck~~, a [link **bold** end](http://x.y)"
    " and `code`.\nTwo lines  \nhard break. H~2~O and x^2^ here. A note[^1].\n\n[^1]: Its *text*.\n",
    "lists": "1. one\n2. two\n    - deep **item**\n\n        paragraph\n\n- [x] task\n\nTerm\n:   What it *is*\n",
    "tables": "| left | *right* |\n|:-----|------:|\n| a b  | **c** d |\n\nEnd of it.\n",
    "blocks": "> a quote\n>\n> > nested one\n\n```python\nx = 1  # code\n```\n\nMath $a+b$ and\n\n$$a_b$$\n\n"
    "***\n\nEnd.\n",
    "scripts": "Café “quoted” — 这是第一句。 שלום עולם and 😀 & <mail@x.org>.\n",
}
FORMATS = {".md": "gfm", ".html": "html", ".docx": "docx", ".odt": "odt"}


def tool(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"needs {name}")


def as_pandoc_reads(path: Path) -> list:
    """The blocks of a document. Names of anchors depend on the text, and lines may be joined."""
    read = [tool("pandoc"), "-f", FORMATS[path.suffix], "-t", "json", str(path)]
    blocks = json.loads(subprocess.run(read, check=True, capture_output=True).stdout)["blocks"]

    def plain(node):
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node.lower().replace("softbreak", "space") if isinstance(node, str) else node
        return (
            {"t": "Header"} | {"c": plain(node["c"][2])}
            if node.get("t") == "Header"
            else {name: plain(value) for name, value in node.items()}
        )

    return plain(blocks)


def translated(path: Path) -> Path:
    other = path.with_name(f"upper_{path.name}")
    other.write_bytes(translate_document(path.read_bytes(), path.suffix, upper, "en", "de"))
    return other


def office(folder: Path, kind: str, *paths: Path) -> list[Path]:
    """Files that LibreOffice writes."""
    command = [
        tool("soffice"),
        "--headless",
        "--convert-to",
        kind,
        "--outdir",
        str(folder),
        *map(str, paths),
    ]
    environment = os.environ | {"HOME": str(folder)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return [folder / f"{path.stem}.{kind.partition(':')[0]}" for path in paths]


@pytest.mark.parametrize("suffix", FORMATS)
def test_pandoc_reads_the_same_structure(suffix: str, tmp_path: Path) -> None:
    for name, source in SOURCES.items():
        path = tmp_path / f"{name}{suffix}"
        write = [
            tool("pandoc"),
            "-f",
            "markdown",
            "-t",
            FORMATS[suffix],
            "-s",
            "--metadata",
            "title=x",
            "-o",
            str(path),
        ]
        subprocess.run(write, check=True, input=source.encode())
        assert as_pandoc_reads(translated(path)) == as_pandoc_reads(path), name


@pytest.mark.parametrize("suffix", [".docx", ".odt", ".html"])
def test_libreoffice_reads_the_same_text(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.odt" for name in SOURCES]
    for path, source in zip(paths, SOURCES.values(), strict=True):
        subprocess.run(
            [tool("pandoc"), "-f", "markdown", "-o", str(path)], check=True, input=source.encode()
        )
    written = office(tmp_path / "written", suffix[1:], *paths)
    texts = office(
        tmp_path / "text", "txt:Text (encoded):UTF8", *written, *map(translated, written)
    )
    for before, after in zip(texts[: len(paths)], texts[len(paths) :], strict=True):
        assert after.read_text("utf-8").upper() == before.read_text("utf-8").upper(), before.name


def test_gettext_reads_the_same_messages(tmp_path: Path) -> None:
    path = tmp_path / "de.po"
    head = (
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n'
        'Plural-Forms: nplurals=2; plural=(n != 1);\\n"\n'
    )
    messages = 'msgid "one"\nmsgstr ""\n\nmsgid ""\n"a \\"b\\"\\n"\n"c"\nmsgstr ""\n\nmsgid "x"\nmsgid_plural "xs"\n'
    path.write_text(f'{head}\n{messages}msgstr[0] ""\nmsgstr[1] ""\n', "utf-8")
    other = translated(path)
    subprocess.run([tool("msgfmt"), "-c", "-o", os.devnull, str(other)], check=True)
    counted = subprocess.run(
        ["msgfmt", "--statistics", "-o", os.devnull, str(other)], capture_output=True, text=True
    )
    assert counted.stderr.startswith("3 translated")
