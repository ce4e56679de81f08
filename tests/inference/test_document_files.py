"""Documents of each format keep every byte but their text."""

import io
import zipfile
from pathlib import Path

import pytest
from lxml import etree

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.inference.document_files import SUFFIXES, text_translator, translate_document
from hf_vanilla_transformer.inference.placement import TranslatedPart
from tests.serving_helpers import echo_folder, echo_translator

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>Hello my dear</i>

2
00:00:03,000 --> 00:00:04,000 X1:10
friend, how
are you?

3
00:00:05,000 --> 00:00:06,000
{\\an8}- Fine.
- And you?
"""
VTT = """WEBVTT - x

NOTE a --> note

STYLE
::cue {}

id1
00:01.000 --> 00:04.000 line:0
<v Bob>Never drink it.</v>

00:05.000 --> 00:09.000
It will
hurt"""
HTML = (
    '<!DOCTYPE html><title>One</title><p class="x">Hello <b>big</b> world!<br>\n<img src=1> Two.</p><script>x</script>'
)

MARKDOWN = """---
title: x
---
# Head *one*

Para **bold** and `code`, a [link](http://x.y/a_(b)) snake_case 2 * 3
that goes on.  
break ![alt](i.png)

- [ ] item
  goes on
1. first
> quote
> ends

| A b | C |
|-----|---|

```python
code here
```

    indented code

[ref]: http://x
Set [text][ref] &amp; <b>x</b>
======
<div align="center">
"""
PO = """msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"

#, c-format
msgid "One %s\\n"
"\\"two\\""
msgstr ""

msgid "done"
msgstr "fertig"

msgid "{n} dog"
msgid_plural "{n} dogs"
msgstr[0] ""
msgstr[1] ""

#~ msgid "old"
#~ msgstr ""
"""
XLIFF = """<?xml version="1.0" encoding="utf-8"?>
<xliff version="1.2"><body>
  <trans-unit id="1">
    <source>Hi <g id="1">big</g> <x id="2"/>dog &amp; <ph id="3">code</ph> end</source>
  </trans-unit>
  <trans-unit id="2"><source>done</source><target>fertig</target></trans-unit>
  <trans-unit><source>new</source><target state="new">new</target><alt-trans><source/></alt-trans></trans-unit>
  <trans-unit id="4" translate="no"><source>no</source></trans-unit>
  <segment><source>two</source><target/></segment>
</body></xliff>
"""
TMX = """<tmx><header srclang="en"/><body>
<tu>
  <tuv xml:lang="en-US"><seg>One <bpt i="1">&lt;b></bpt>two<ept i="1">&lt;/b></ept></seg></tuv>
</tu>
<tu><tuv xml:lang="en"><seg>a b</seg></tuv><tuv xml:lang="DE"><seg>c</seg></tuv></tu></body></tmx>
"""
W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DOCX = f"""<w:document xmlns:w="{W}"><w:body><w:p><w:r><w:t>Hello </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>big</w:t>\
</w:r><w:r><w:t xml:space="preserve"> dog.</w:t></w:r><w:r><w:tab/><w:t>Two</w:t></w:r></w:p></w:body></w:document>"""
ODT = """<office:text><text:h>Head</text:h><text:p>Hello <text:span text:style-name="B">big</text:span> dog<text:note>\
<text:note-citation>1</text:note-citation><text:note-body><text:p>A note</text:p></text:note-body></text:note>.\
</text:p><text:p><text:date>May</text:date></text:p></office:text>"""

#: document, its texts, and the document with each text in upper case
DOCUMENTS = {
    ".html": (HTML, ["One", "Hello big world!", "Two."],
              HTML.replace("One", "ONE").replace("Hello <b>big</b> world", "HELLO <b>BIG</b> WORLD")
              .replace("Two", "TWO")),
    ".srt": (SRT, ["Hello my dear friend, how are you?", "- Fine.", "- And you?"],
             SRT.replace("Hello my dear", "HELLO MY DEAR").replace("friend, how\nare", "FRIEND, HOW\nARE")
             .replace("you", "YOU").replace("Fine", "FINE").replace("And", "AND")),
    ".vtt": (VTT, ["Never drink it.", "It will hurt"],
             VTT.replace("Never drink it", "NEVER DRINK IT").replace("It will\nhurt", "IT WILL\nHURT")),
    ".md": (MARKDOWN, ["Head one", "Para bold and , a link snake_case 2 * 3 that goes on.", "break", "item goes on",
                       "first", "quote ends", "A b", "C", "Set text &amp; x"],
            MARKDOWN.replace("Head *one", "HEAD *ONE").replace("Para **bold** and", "PARA **BOLD** AND")
            .replace(", a [link]", ", A [LINK]").replace("snake_case 2 * 3\nthat", "SNAKE_CASE 2 * 3 THAT")
            .replace("goes on.", "GOES ON.")
            .replace("break !", "BREAK !").replace("item\n  goes on", "ITEM GOES ON").replace("first", "FIRST")
            .replace("quote\n> ends", "QUOTE ENDS").replace("A b", "A B").replace("Set [text]", "SET [TEXT]")
            .replace("&amp; <b>x", "&AMP; <b>X")),
    ".po": (PO, ['One %s\n"two"', "{n} dog", "{n} dogs"],
            PO.replace('two\\""\nmsgstr ""', 'two\\""\nmsgstr "ONE %S\\n\\"TWO\\""')
            .replace('[0] ""', '[0] "{N} DOG"').replace('[1] ""', '[1] "{N} DOGS"')),
    ".xlf": (XLIFF, ["Hi big dog & end", "new", "two"],
             XLIFF.replace("end</source>\n", "end</source>\n    <target>HI <g id=\"1\">BIG</g> <x id=\"2\"/>DOG &amp; "
                           "<ph id=\"3\">code</ph> END</target>\n").replace(">new</target>", ">NEW</target>")
             .replace("<target/>", "<target>TWO</target>")),
    ".tmx": (TMX, ["One two"],
             TMX.replace("</tuv>\n</tu>\n<tu>", "</tuv>\n  <tuv xml:lang=\"de\"><seg>ONE <bpt i=\"1\">&lt;b></bpt>TWO"
                         "<ept i=\"1\">&lt;/b></ept></seg></tuv>\n</tu>\n<tu>")),
}  # fmt: skip


def translator_by(function, seen=None):
    def translate(texts):
        if seen is not None:
            seen.extend(texts)
        return [[TranslatedPart(text, function(text))] for text in texts]

    return translate


@pytest.mark.parametrize("suffix", DOCUMENTS)
def test_documents_keep_all_but_their_text(suffix: str) -> None:
    document, texts, upper = DOCUMENTS[suffix]
    seen: list[str] = []
    for newline in ("\n", "\r\n"):
        data, expected = (text.replace("\n", newline).encode() for text in (document, upper))
        same = translate_document(data, suffix.upper(), translator_by(str, seen), "en", "de")
        assert same == data or suffix in (".po", ".xlf", ".tmx")  # get translations
        assert translate_document(data, suffix, translator_by(str.upper), "en", "de") == expected
        assert suffix != ".po" or translate_document(expected, suffix, translator_by(str)) == expected
    assert seen == 2 * texts
    assert translate_document(b"", suffix, translator_by(str), "en", "de") == b""


def test_encoding_of_a_document_stays() -> None:
    page = '<meta charset="latin-1"><p>café'
    assert translate_document(page.encode("latin-1"), ".html", translator_by(str.upper)) == page.replace(
        "café", "CAFÉ"
    ).encode("latin-1")
    assert translate_document(page.encode("latin-1"), ".html", translator_by(lambda _: "日")).endswith(b"&#26085;")
    for encoding in ("utf-16", "utf-8-sig"):
        data = SRT.encode(encoding)
        assert translate_document(data, ".srt", translator_by(str)) == data
    with pytest.raises(UserError, match="utf-8"):
        translate_document(b"\xe9", ".srt", translator_by(str))


@pytest.mark.parametrize("words", [0, 1, 2, 9, 40])
def test_sentence_over_several_cues_leaves_none_empty(words: int) -> None:
    translated = translate_document(SRT.encode(), ".srt", translator_by(lambda _: " ".join(["word"] * words))).decode()
    assert [line for line in translated.split("\n") if "-->" in line] == [
        line for line in SRT.split("\n") if "-->" in line
    ]
    assert translated.count("word") == 3 * words
    assert words < 3 or "<i>word" in translated and translated.count("\n") == SRT.count("\n")


@pytest.mark.parametrize(
    ("end", "first", "second"),
    [
        ("\n\n", "00:00:01,000 --> 00:00:02,500\n", "00:00:03,000 --> 00:00:04,500\n"),
        ("\n", "0:0:1,5 --> 0:0:2,5\n", "0:0:3 --> 0:0:4\n"),
        ("\n \t\n", "00:01.000-->00:02.000\n", "00:03.000 --> 00:04.000 line:0\n"),
        ("\r\r", "00:00:01,000 --> 00:00:02,500\r", " 00:00:03,000 --> 00:00:04,500 X1:1\r"),
    ],
)
def test_cues_end_where_players_end_them(end: str, first: str, second: str) -> None:
    for number in ("2" + first[-1], ""):
        document = f"1{first[-1]}{first}<i>Go.</i>{end}{number}{second}at 1: a --> b.{end}{number}{first}"
        seen: list[str] = []
        assert translate_document(document.encode(), ".srt", translator_by(str, seen)) == document.encode()
        assert seen == ["Go.", "at 1: a --> b."]
    with pytest.raises(UserError, match="documents"):
        translate_document(b"no cues", ".srt", translator_by(str))


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        ("> a\n>\n> b\n>> c\n> - d\n", ["a", "b", "c", "d"]),
        (">a\n\n>> b\n>\n>c\n", ["a", "b", "c"]),
        ("> [!NOTE]\n> Useful.\n\n:::tip\nCareful.\n:::\n", ["Useful.", "Careful."]),
        ("<pre>\na b\n\nc\n</pre>\nd\n", ["d"]),
        ("<!-- a\n\nb -->\nc\n<STYLE>\np {}\n</style>\n<script>x</script>\nd\n", ["c", "d"]),
        ("$$\na + b\n$$\nLet $x_1$ and $a$ cost $5 or $6.\n", ["Let and cost $5 or $6."]),
        ("Text[^1] here.\n\n[^1]: The note.\n", ["Text here.", "The note."]),
        ("Term\n: Definition\n: Second\n", ["Term", "Definition", "Second"]),
        ("one<br>two<BR />three\n", ["one", "two", "three"]),
        ("## Head ##\n# Next {#id .c}\nC #\n", ["Head", "Next", "C"]),
        ("See [a b](<x y> 'z') now.\n", ["See a b now."]),
        ("A | B\n--- | ---\nc<br>d | e\n", ["A", "B", "c", "d", "e"]),
    ],
)
def test_markdown_keeps_its_structure(document: str, texts: list[str]) -> None:
    seen: list[str] = []
    assert translate_document(document.encode(), ".md", translator_by(str, seen)) == document.encode()
    assert seen == texts
    upper = translate_document(document.encode(), ".md", translator_by(str.upper)).decode()
    assert upper.lower() == document.lower() and upper.count("\n") == document.count("\n")


@pytest.mark.parametrize("line", ["|\n", "a|\n", "| a | b |\n", "> a\n", "<pre>\n"])
def test_long_markdown_is_split_in_linear_time(line: str) -> None:
    document = "|-|-|\n" + line * 10_000  # minutes, if the time were quadratic
    assert translate_document(document.encode(), ".md", translator_by(str)).count(b"\n") > 0


@pytest.mark.parametrize(
    ("suffix", "document", "texts", "added"),
    [
        (".po", 'msgid "a"\nmsgid_plural "b"\nmsgstr[0] "x"\nmsgstr[1] ""\nmsgstr[2] ""\n"y"\n', ["b"], '[1] "B"'),
        (".po", 'msgctxt "c"\nmsgid ""\n"a "\n"b"\nmsgstr ""\n', ["a b"], 'msgstr "A B"'),
        (".xlf", "<trans-unit><source><![CDATA[a <b>b</b>]]></source></trans-unit>", ["a <b>b</b>"],
         "<target>A &lt;B&gt;B&lt;/B&gt;</target>"),
        (".xlf", '<unit translate="no"><segment><source>a</source></segment><segment translate="yes"><source>b'
         '</source></segment></unit><group translate="yes"/><unit><segment><source>c</source></segment></unit>',
         ["b", "c"],
         "<target>C</target>"),
        (".xlf", '<trans-unit/><trans-unit id="2"><source>a</source></trans-unit>', ["a"], "<target>A</target>"),
        (".tmx", '<tu><tuv xml:lang="fr"><seg>x</seg></tuv><tuv xml:lang="en"><seg/></tuv></tu>\n<tu><tuv lang="en">'
         "<seg>a</seg></tuv></tu>", ["a"], '<tuv xml:lang="de"><seg>A</seg></tuv>'),
    ],
)  # fmt: skip
def test_translation_files_are_filled_where_they_are_empty(suffix, document, texts, added) -> None:
    seen: list[str] = []
    filled = translate_document(document.encode(), suffix, translator_by(str.upper, seen), "en", "de").decode()
    assert seen == texts and added in filled


@pytest.mark.parametrize(
    "unit", ["<trans-unit>", "<segment ", "<tu>", "<tuv>", "<tu><tuv><seg>", '"a"\n', 'msgid "a"\n']
)
def test_damaged_translation_files_are_read_in_linear_time(unit: str) -> None:
    data = (unit * 100_000).encode()  # an hour, if the time were quadratic
    for suffix in (".po", ".xlf", ".tmx"):
        assert translate_document(data, suffix, translator_by(str), "en", "de") == data


def test_other_formats_are_refused_by_name() -> None:
    for suffix in (".pdf", "", ".odp", ".docx", ".odt", ".tmx"):
        with pytest.raises(UserError, match="documents"):
            translate_document(b"x", suffix, translator_by(str))


def zipped(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if ".xml" in name else zipfile.ZIP_STORED)
    return data.getvalue()


def content_of(data: bytes) -> list[tuple[str, bytes, int]]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return [(entry.filename, archive.read(entry), entry.compress_type) for entry in archive.infolist()]


def test_word_processor_documents_keep_their_formatting() -> None:
    word = zipped({"[Content_Types].xml": "<t/>", "word/document.xml": DOCX, "word/media/i.png": "x"})
    seen: list[str] = []
    assert content_of(translate_document(word, ".docx", translator_by(str, seen))) == content_of(word)
    assert seen == ["Hello big dog.", "Two"]

    def reversed_words(texts):
        links = [(0, 2), (1, 1), (2, 0)]
        return [[TranslatedPart(text, "Hund groß Hallo", links if " " in text else None)] for text in texts]

    contents = {name: content for name, content, _ in content_of(translate_document(word, ".docx", reversed_words))}
    root = etree.fromstring(contents["word/document.xml"])
    runs = [("".join(run.itertext()), run.find(f"{{{W}}}rPr") is not None) for run in root.iter(f"{{{W}}}r")]
    assert "".join(text for text, _ in runs) == "Hund groß HalloHund groß Hallo"
    assert [text.strip() for text, bold in runs if bold] == ["groß"]
    office, seen = zipped({"mimetype": "x", "content.xml": ODT, "Pictures/i.png": "x"}), []
    assert content_of(translate_document(office, ".odt", translator_by(str, seen))) == content_of(office)
    assert seen == ["Head", "Hello big dog.", "A note"]
    plain = zipped({"content.xml": "<text:p>no note</text:p>"})
    assert content_of(translate_document(plain, ".odt", translator_by(str.upper)))[0][1] == b"<text:p>NO NOTE</text:p>"
    upper = content_of(translate_document(office, ".odt", translator_by(str.upper)))
    expected = ODT.replace("Head", "HEAD").replace("Hello", "HELLO").replace("big<", "BIG<")
    assert upper[1][1].decode() == expected.replace("dog", "DOG").replace("A note", "A NOTE")


def test_document_is_translated_sentence_by_sentence(tmp_path: Path, monkeypatch, capfdbinary) -> None:
    pytest.importorskip("sentencex", reason="needs the extra `documents`")
    from vanilla_transformer_cli.main import main

    translator = echo_translator()
    one, two = translator.translate(["seven dogs.", "two hundred"])
    page = "<ul><li>seven dogs. <b>two hundred</b> {x}</li></ul>"
    expected = f"<ul><li>{one} <b>{two}</b> {{x}}</li></ul>"
    assert translate_document(page.encode(), ".html", text_translator(translator, "en", "de")).decode() == expected
    (tmp_path / "page.html").write_text(page)
    common = ["translate", "--model", str(echo_folder(tmp_path / "model")), "--input", str(tmp_path / "page.html")]
    assert pytest.raises(SystemExit, main, common).value.code == 0
    assert capfdbinary.readouterr().out.decode() == expected
    assert pytest.raises(SystemExit, main, [*common, "--output", str(tmp_path / "new.html")]).value.code == 0
    assert (tmp_path / "new.html").read_text() == expected
    assert set(SUFFIXES) == set(DOCUMENTS) | {".htm", ".xhtml", ".markdown", ".pot", ".xliff", ".docx", ".odt"}
