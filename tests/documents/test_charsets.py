"""The encoding of a document is the one that browsers and gettext read in it."""

import gettext
import io
import json
import shutil
import subprocess
from encodings import aliases

import pytest

from hf_vanilla_transformer.documents.charsets import CODECS
from hf_vanilla_transformer.documents.document_files import translate_document
from tests.documents.translators import translator_by
from tests.model_helpers import error_of

LATIN = '<meta charset="iso-8859-1">'

#: Pages in UTF-8 that https://html.spec.whatwg.org/#determining-the-character-encoding reads so.
IN_UTF_8 = {
    "comment": f'<!-- was: {LATIN} --><meta charset="utf-8">',
    "description": '<meta name="description" content="charset=iso-8859-1"><meta charset="utf-8">',
    "script": f"<script>var page = '{LATIN}';</script><meta charset=utf-8>",
    "title": f"<title>{LATIN}</title><meta charset=utf-8>",
    "other attribute": '<meta data-charset="iso-8859-1" charset="utf-8">',
    "value": "<meta alt='<meta charset=iso-8859-1>' charset=utf-8>",
    "first attribute": '<meta charset="utf-8" charset="iso-8859-1">',
    "no pragma": '<meta name=x content="text/html; charset=iso-8859-1"><meta charset=utf-8>',
    "pragma": '<meta content="a; charset = \'utf-8\'; b" HTTP-EQUIV="Content-type"/>' + LATIN,
    "declaration of XML": '<?xml version="1.0" encoding="iso-8859-1"?><meta charset="utf-8">',
    "UTF-16": '<meta charset="utf-16">',
    "template": f'<meta charset="{{{{ charset }}}}"><!--{LATIN}-->',
    "after 8 KiB": f"<!-- {'x' * 8192} --><meta charset=utf-8>",
}


def words_of(page: bytes, suffix: str = ".html") -> list[str]:
    """What the model gets of a page."""
    seen: list[str] = []
    translate_document(page, suffix, translator_by(str, seen))
    return seen


@pytest.mark.parametrize("name", IN_UTF_8)
def test_charset_of_a_page_is_read_where_browsers_read_it(name: str) -> None:
    page = f"<html><head>{IN_UTF_8[name]}</head><p>Größe</p></html>"
    assert words_of(page.encode())[-1] == "Größe"


def test_declaration_of_xml_counts_in_xhtml_and_where_there_is_no_meta() -> None:
    declaration = '<?xml version="1.0" encoding="iso-8859-2"?>'
    page = "<html>{}<p>łoś</p></html>"
    assert words_of((declaration + page.format("")).encode("iso-8859-2")) == ["łoś"]
    page = declaration + page.format('<meta charset="utf-8"/>')
    assert words_of(page.encode("iso-8859-2"), ".xhtml") == ["łoś"]


#: Two bytes as `TextDecoder` of JavaScript reads them, which has the labels of the standard, or null.
DECODE = """
const read = label => {
  try { return new TextDecoder(label).decode(new Uint8Array([0xe1, 0xe2])) } catch { return null }
}
console.log(JSON.stringify(process.argv.slice(1).map(read)))
"""


def test_labels_mean_what_they_mean_in_javascript() -> None:
    node = shutil.which("node") or pytest.skip("needs node")
    labels = sorted({*CODECS, *(name.replace("_", "-") for name in aliases.aliases)})
    found = subprocess.run([node, "-e", DECODE, *labels], check=True, capture_output=True)
    texts = dict(zip(labels, json.loads(found.stdout), strict=True))
    known = {label: text for label, text in texts.items() if text is not None}
    assert known.keys() <= CODECS.keys()
    # pages with a label of UTF-16 are in UTF-8
    letters = {
        label: text
        for label, text in known.items()
        if "\ufffd" not in text and CODECS[label] != "utf-8"
    }
    assert letters == {label: b"\xe1\xe2".decode(CODECS[label]) for label in letters}
    assert len(known) > 200 and len(letters) > 180


ENTRY = 'msgid "prix €"\nmsgstr ""\n'
#: Headers that gettext reads.
HEADERS = {
    "one field": 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-15\\n"\n',
    "wrapped": 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; "\n"charset=ISO-8859-15\\n"\n',
    "one line": 'msgid ""\nmsgstr ""\n"MIME-Version: 1.0\\nContent-Type: a; charset=ISO-8859-15\\n"\n',
    "other text before it": '# "Content-Type: charset=UTF-8\\n"\n\nmsgid ""\n""\nmsgstr ""\n'
    '"X-Note: x\\n"\n"Content-Type: text/plain; charset=ISO-8859-15\\n"\n',
}


@pytest.mark.parametrize("name", HEADERS)
def test_charset_of_a_catalogue_is_read_in_its_header(name: str) -> None:
    catalogue = f"{HEADERS[name]}\n{ENTRY}".encode("iso-8859-15")
    assert words_of(catalogue, ".po") == ["prix €"]
    msgcat = shutil.which("msgcat") or pytest.skip("needs msgcat")
    found = subprocess.run([msgcat, "-t", "utf-8", "-"], input=catalogue, capture_output=True)
    assert "from ISO-8859-15 encoding" in found.stderr.decode()


@pytest.mark.parametrize("suffix", [".html", ".xlf", ".po"])
@pytest.mark.parametrize("label", ["idna", "utf-7", "unicode_escape", "punycode", "no-such"])
def test_codecs_of_python_that_change_text_are_refused(suffix: str, label: str) -> None:
    declaration = {
        ".html": f'<meta charset="{label}"><p>one</p>',
        ".xlf": f'<?xml version="1.0" encoding="{label}"?><segment><source>one</source></segment>',
        ".po": f'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset={label}\\n"\n',
    }[suffix]
    refusal = error_of(translate_document, declaration.encode(), suffix, translator_by(str))
    assert refusal.startswith(f"documents: {label} is no encoding")


@pytest.mark.parametrize(
    ("charset", "strings", "text"),
    [
        ("UTF-8", r'"caf\303\251 one"', "café one"),
        ("UTF-8", r'"caf\xc3\xa9\041 \\303"', r"café! \303"),
        ("UTF-8", '"caf\\303"\n"\\251"', "café"),
        ("ISO-8859-15", r'"5 \244 é"', "5 € é"),
        ("SHIFT_JIS", r'"\203\\x \x83\x41"', "ソx ア"),
    ],
)
def test_codes_of_po_are_bytes_in_its_charset(charset: str, strings: str, text: str) -> None:
    header = f'msgid ""\nmsgstr "Content-Type: text/plain; charset={charset}\\n"\n\n'
    entry = f"msgid {strings}\nmsgstr "
    assert words_of(f'{header}{entry}""\n'.encode(charset), ".po") == [text]
    msgfmt = shutil.which("msgfmt") or pytest.skip("needs msgfmt")
    catalogue = f'{header}{entry}"x"\n'.encode(charset)
    found = subprocess.run([msgfmt, "-o", "-", "-"], input=catalogue, capture_output=True)
    assert gettext.GNUTranslations(io.BytesIO(found.stdout)).gettext(text) == "x"


def test_codes_of_po_that_are_no_text_are_refused() -> None:
    refusal = error_of(words_of, b'msgid "caf\\351 one"\nmsgstr ""\n', ".po")
    assert "are no text in utf-8" in refusal
