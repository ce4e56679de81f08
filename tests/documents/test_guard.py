"""A document whose translation would lose, invent or break something is refused."""

import re

import pytest

from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.documents.guard import guarded
from hf_vanilla_transformer.documents.markdown_text import read_markdown
from hf_vanilla_transformer.documents.readings import (
    read_html,
    read_po,
    read_subtitles,
    read_tmx,
    read_xliff,
)
from hf_vanilla_transformer.inference.placement import TranslatedPart
from tests.documents.translators import backwards, upper
from tests.model_helpers import error_of

HTML = '<p title="a">Seven <b>dogs</b><br>run</p><pre>code</pre><!-- note --><script>x</script>'
SRT = "1\n00:00:01,000 --> 00:00:02,000\nSeven <i>dogs</i> run\n\n2\n00:00:03,000 --> 00:00:04,000\nHome\n"
VTT = "WEBVTT\n\nNOTE code\n\n00:01.000 --> 00:02.000 line:0\nSeven dogs\n"
PO = '# code\nmsgctxt "c"\nmsgid "Seven dogs"\nmsgstr ""\n\nmsgid "done"\nmsgstr "fertig"\n'
XLIFF = "<file><trans-unit><source>Seven dogs</source><target>{}</target></trans-unit><note>code</note></file>"
TMX = '<tmx><header/><tu><tuv xml:lang="en"><seg>Seven dogs</seg></tuv>{}</tu></tmx>'
MARKDOWN = "# Seven\n\n- *dogs* run [home](x.md)\n\n```\ncode\n```\n"
VARIANT = '<tuv xml:lang="de"><seg>SEVEN DOGS</seg></tuv>'

#: name -> reader, source, its passages, its translation, whether translations are added
DOCUMENTS = {
    "html": (
        read_html,
        HTML,
        ["Seven dogs", "run"],
        HTML.replace("Seven", "SEVEN").replace("dogs", "DOGS").replace("run", "RUN"),
        False,
    ),
    "srt": (
        read_subtitles,
        SRT,
        ["Seven dogs run", "Home"],
        SRT.replace("Seven", "SEVEN")
        .replace("dogs", "DOGS")
        .replace("run", "RUN")
        .replace("Home", "HOME"),
        False,
    ),
    "vtt": (read_subtitles, VTT, ["Seven dogs"], VTT.replace("Seven dogs", "SEVEN DOGS"), False),
    "po": (read_po, PO, ["Seven dogs"], PO.replace('msgstr ""', 'msgstr "SEVEN DOGS"'), True),
    "xliff": (read_xliff, XLIFF.format(""), ["Seven dogs"], XLIFF.format("SEVEN DOGS"), True),
    "tmx": (
        lambda text: read_tmx(text, "de"),
        TMX.format(""),
        ["Seven dogs"],
        TMX.format(VARIANT),
        True,
    ),
    "markdown": (
        read_markdown,
        MARKDOWN,
        ["Seven", "dogs run home"],
        MARKDOWN.replace("Seven", "SEVEN")
        .replace("dogs", "DOGS")
        .replace("run", "RUN")
        .replace("home", "HOME"),
        False,
    ),
}

#: Damages as (pattern, replacement), for every document that has the pattern.
DAMAGES = {
    "a word is lost": ("SEVEN", ""),
    "a word is not translated": ("SEVEN", "Seven"),
    "a word is there twice": ("SEVEN", "SEVEN SEVEN"),
    "code is translated": ("code", "CODE"),
    "code is lost": (r"<pre>.*?</pre>|```\n.*?```|NOTE code|# code|<note>.*?</note>", ""),
    "an element is lost": (r"</?[bi]>|\*", ""),
    "an element is added": ("SEVEN", "<b>SEVEN</b>"),
    "an attribute is changed": (r'"a"|line:0|x\.md', '"A"'),
    "a line is joined": ("<br>", " "),
    "a time is changed": (r"(00:)?00:01[.,]000", "00:00:00,000"),
    "a message is changed": ('msgid "Seven|<source>Seven|<seg>Seven', "x"),
    "another translation is changed": ("fertig", "FERTIG"),
    "a context is changed": ('msgctxt "c"', 'msgctxt "C"'),
    "a heading becomes text": ("# SEVEN", "SEVEN"),
    "a list becomes code": ("- .DOGS", "    DOGS"),
    "a line of markup is broken": ("</(p|trans-unit|tu)>", "<"),
}


def checked(name: str, change) -> str:
    read, source, passages, translation, fills = DOCUMENTS[name]

    def translated(document, translate):
        translate(passages)
        return change(translation)

    return guarded(source, translated, upper, read, fills)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_translation_that_changes_only_the_text_is_written(name: str) -> None:
    assert checked(name, str) == DOCUMENTS[name][3]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name, document in DOCUMENTS.items()
        for damage, (pattern, _) in DAMAGES.items()
        if re.search(pattern, document[3], re.DOTALL)
        and not (
            damage == "an element is added" and name in ("po", "xliff", "tmx")
        )  # text, or a copy of the source
        and not (damage == "a line of markup is broken" and name == "html")  # browsers read on
    ],
)
def test_damaged_translation_is_refused(name: str, damage: str) -> None:
    pattern, replacement = DAMAGES[damage]
    damaged = re.compile(pattern, re.DOTALL)
    assert "documents" in error_of(
        lambda: checked(name, lambda translation: damaged.sub(replacement, translation))
    )


XHTML = (
    "<?xml version='1.0'?><html xmlns='http://www.w3.org/1999/xhtml'><body><p>{}</p></body></html>"
)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        # the title of a picture in a line ends no line
        (
            "<p>one <svg><title>x</title></svg> two</p>",
            "<p><svg><title>x</title></svg> TWO ONE</p>",
        ),
        # XML has no names for these characters, and HTML has. Both have their numbers
        (XHTML.format("one &mdash; caf&eacute;"), XHTML.format("CAF&#201; &#8212; ONE")),
        # browsers show a bare "&" and "<", and a translation escapes them
        (XHTML.format("one & two <br/>R&D"), XHTML.format("TWO &amp; ONE <br/>R&D")),
        (XHTML.format("one < two &x; six"), XHTML.format("SIX &amp;X; TWO &lt; ONE")),
    ],
)
def test_pages_that_both_readers_understand_are_not_refused(document: str, expected: str) -> None:
    assert translate_document(document.encode(), ".html", backwards).decode() == expected


@pytest.mark.parametrize(
    ("suffix", "document"), [(".html", "<p>one</p><p>two</p>"), (".md", "one\n\ntwo\n")]
)
def test_empty_translation_is_refused(suffix: str, document: str) -> None:
    def half(texts):
        return [[TranslatedPart(text, "" if text == "two" else text)] for text in texts]

    assert "'two' is empty" in error_of(lambda: translate_document(document.encode(), suffix, half))


def test_file_is_refused_before_it_is_translated() -> None:
    def never(texts):
        raise AssertionError(texts)

    deep = "<b>" * 10_000 + "seven dogs"
    assert "two readers" in error_of(lambda: translate_document(deep.encode(), ".html", never))
    assert "line 2 is no line of PO" in error_of(
        translate_document, b'msgid "a"\nmsgst "b"\n', ".po", never
    )


@pytest.mark.parametrize(
    ("document", "ends"),
    [
        (
            "<html><body>\n<p>One two\n<pre><code><div>\ncode</code></pre><p>Three</body>",
            (4, "code", "div", 3),
        ),
        (
            "<ul><li>One<li>Two</ul>\n<div>\n<code><div>x</code></div>\n<p>Three",
            (3, "code", "div", 3),
        ),
        (
            "<p>One<br><img src=x>\n<table><tr><td>a<tr><td>b</table>\n<pre><div>x</pre><p>y",
            (3, "pre", "div", 3),
        ),
    ],
)
def test_refusal_of_html_names_the_end_tag_of_another_element(document: str, ends: tuple) -> None:
    refusal = error_of(translate_document, document.encode(), ".html", upper)
    assert refusal.endswith("; line {}: </{}> does not end <{}> of line {}".format(*ends))


def test_refusal_of_well_nested_html_names_no_tag() -> None:
    line = error_of(
        translate_document,
        b"<p>One <b>two</b></p>",
        ".html",
        lambda texts: [[TranslatedPart("One", "")]],
    )
    assert line.endswith("is empty")
