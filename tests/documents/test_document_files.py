"""Documents of each format keep every byte but their text."""

import gettext
import html
import io
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from lxml import etree

from hf_vanilla_transformer.documents.document_files import (
    SUFFIXES,
    is_document,
    translate_document,
)
from hf_vanilla_transformer.documents.documents import text_translator
from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.utils.errors import UserError
from tests.documents.translators import backwards, translator_by
from tests.model_helpers import error_of
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
    '<!DOCTYPE html><title>One</title><p class="x">Hello <b>big</b> world!<br>\n'
    "<img src=1> Two.</p><script>x</script>"
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
    ".html": (
        HTML,
        ["One", "Hello big world!", "Two."],
        HTML.replace("One", "ONE")
        .replace("Hello <b>big</b> world", "HELLO <b>BIG</b> WORLD")
        .replace("Two", "TWO"),
    ),
    ".srt": (
        SRT,
        ["Hello my dear friend, how are you?", "- Fine.", "- And you?"],
        SRT.replace("Hello my dear", "HELLO MY DEAR")
        .replace("friend, how\nare", "FRIEND, HOW\nARE")
        .replace("you", "YOU")
        .replace("Fine", "FINE")
        .replace("And", "AND"),
    ),
    ".vtt": (
        VTT,
        ["Never drink it.", "It will hurt"],
        VTT.replace("Never drink it", "NEVER DRINK IT").replace("It will\nhurt", "IT WILL\nHURT"),
    ),
    ".md": (
        MARKDOWN,
        [
            "Head one",
            "Para bold and , a link snake_case 2 * 3 that goes on.",
            "break",
            "item goes on",
            "first",
            "quote ends",
            "A b",
            "C",
            "Set text & x",
        ],
        MARKDOWN.replace("Head *one", "HEAD *ONE")
        .replace("Para **bold** and", "PARA **BOLD** AND")
        .replace(", a [link]", ", A [LINK]")
        .replace("snake_case 2 * 3\nthat", "SNAKE_CASE 2 * 3 THAT")
        .replace("goes on.", "GOES ON.")
        .replace("break !", "BREAK !")
        .replace("item\n  goes on", "ITEM GOES ON")
        .replace("first", "FIRST")
        .replace("quote\n> ends", "QUOTE ENDS")
        .replace("A b", "A B")
        .replace("Set [text]", "SET [TEXT]")
        .replace("&amp; <b>x", "& <b>X"),
    ),
    ".po": (
        PO,
        ['One %s\n"two"', "{n} dog", "{n} dogs"],
        PO.replace('two\\""\nmsgstr ""', 'two\\""\nmsgstr "ONE %S\\n\\"TWO\\""')
        .replace('[0] ""', '[0] "{N} DOG"')
        .replace('[1] ""', '[1] "{N} DOGS"'),
    ),
    ".xlf": (
        XLIFF,
        ["Hi big dog & end", "new", "two"],
        XLIFF.replace(
            "end</source>\n",
            'end</source>\n    <target>HI <g id="1">BIG</g> <x id="2"/>DOG &amp; <ph id="3">code</ph> END</target>\n',
        )
        .replace('"new">new</target>', '"translated">NEW</target>')
        .replace("<target/>", "<target>TWO</target>"),
    ),
    ".tmx": (
        TMX,
        ["One two"],
        TMX.replace(
            "</tuv>\n</tu>\n<tu>",
            '</tuv>\n  <tuv xml:lang="de"><seg>ONE <bpt i="1">&lt;b></bpt>TWO'
            '<ept i="1">&lt;/b></ept></seg></tuv>\n</tu>\n<tu>',
        ),
    ),
}


#: Elements that bind the prefixes of XML in these tests.
NAMESPACES = " ".join(
    f'xmlns:{prefix}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for prefix, name in (
        ("office", "office"),
        ("text", "text"),
        ("draw", "drawing"),
        ("style", "style"),
    )
)


def content_xml(text: str) -> str:
    return f"<office:document-content {NAMESPACES}>{text}</office:document-content>"


def same_xml(first: str | bytes, second: str | bytes) -> bool:
    """Whether two documents have the same elements, attributes and texts."""
    texts = [text.decode() if isinstance(text, bytes) else text for text in (first, second)]
    return etree.canonicalize(texts[0]) == etree.canonicalize(texts[1])


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_plain_text_keeps_its_lines(newline: str) -> None:
    lines = ["One man. Two dogs!", "", "- three", "", "  four  ", ""]
    data = newline.join(lines).encode()
    assert translate_document(data, ".txt", translator_by(str.upper)) == data.upper()
    assert (
        translate_document(b"\xef\xbb\xbf" + data, ".TXT", translator_by(str))
        == b"\xef\xbb\xbf" + data
    )
    assert translate_document(b" \n", ".txt", translator_by(str)) == b" \n"
    assert "UTF-8" in error_of(
        lambda: translate_document("ü".encode("latin1"), ".txt", translator_by(str))
    )
    # on the command line it is translated line by line
    assert ".txt" not in SUFFIXES and not is_document("a.txt", "b.txt")


@pytest.mark.parametrize("suffix", DOCUMENTS)
def test_documents_keep_all_but_their_text(suffix: str) -> None:
    document, texts, upper = DOCUMENTS[suffix]
    seen: list[str] = []
    for newline in ("\n", "\r\n"):
        data, expected = (text.replace("\n", newline).encode() for text in (document, upper))
        same = translate_document(data, suffix.upper(), translator_by(str, seen), "en", "de")
        assert same == data or suffix in (".po", ".xlf", ".tmx")  # get translations
        upper_data = translate_document(data, suffix, translator_by(str.upper), "en", "de")
        is_xml = suffix in (".xlf", ".tmx")
        assert same_xml(upper_data, expected) if is_xml else upper_data == expected
        assert upper_data.count(b"\r\n") == expected.count(b"\r\n")
        assert (
            suffix != ".po" or translate_document(expected, suffix, translator_by(str)) == expected
        )
    assert seen == 2 * texts
    if suffix in (".xlf", ".tmx"):
        assert "XML" in error_of(
            lambda: translate_document(b"", suffix, translator_by(str), "en", "de")
        )
    else:
        assert translate_document(b"", suffix, translator_by(str), "en", "de") == b""


PO_WORD = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset={declared}\\n"\n\n'
    'msgid "{word}"\nmsgstr "{filled}"\n'
)
XLIFF_WORD = (
    "<?xml version='1.0' encoding='{declared}'?>"
    "<segment><source>{word}</source><target>{filled}</target></segment>"
)
HTML_WORD = '<meta http-equiv=Content-Type content="text/html; charset={declared}"><p>{text}'
SRT_WORD = "1\n00:00:01,000 --> 00:00:02,000\n{text}\n"


@pytest.mark.parametrize(
    ("suffix", "document", "declared", "encoding", "word"),
    [
        (".po", PO_WORD, "ISO-8859-15", "iso-8859-15", "prix"),
        (".po", "# x\n" * 500 + PO_WORD, "KOI8-R", "koi8-r", "слово"),
        (".po", PO_WORD, "windows-1251", "utf-8-sig", "größe"),
        (".xlf", XLIFF_WORD, "windows-1252", "cp1252", "größe"),
        (".xlf", XLIFF_WORD, "utf-16", "utf-8", "größe"),
        (".xlf", XLIFF_WORD, "utf-16", "utf-16", "größe"),
        (".xlf", XLIFF_WORD, "UTF-16", "utf-16-be", "größe"),
        (".html", HTML_WORD, "iso-8859-1", "cp1252", "“große”"),
        (".html", HTML_WORD, "Shift_JIS", "shift_jis", "言葉 a"),
        # browsers read the larger encodings of windows and GBK
        (".html", HTML_WORD, "Shift_JIS", "cp932", "髙橋 ①"),
        (".html", HTML_WORD, "gb2312", "gbk", "朱镕基"),
        (".html", HTML_WORD, "EUC-KR", "cp949", "똠방각하"),
        (".html", HTML_WORD, "ISO-8859-9", "cp1254", "“ğ”"),
        (".xlf", XLIFF_WORD, "gb2312", "gb2312", "朱"),
        (
            ".xhtml",
            "<?xml version='1.0' encoding='{declared}'?><p>{text}</p>",
            "iso-8859-2",
            "iso-8859-2",
            "łoś",
        ),
        (".srt", SRT_WORD, "", "utf-16", "größe"),
        (".vtt", "WEBVTT\n\n" + SRT_WORD, "", "utf-8-sig", "größe"),
    ],
)
def test_encoding_of_a_document_stays(
    suffix: str, document: str, declared: str, encoding: str, word: str
) -> None:
    source, expected = (
        document.format(declared=declared, word=word, text=text, filled=filled).encode(encoding)
        for text, filled in ((word, ""), (word.upper(), word.upper()))
    )
    assert translate_document(source, suffix, translator_by(str.upper)) == expected


@pytest.mark.parametrize(
    ("suffix", "data", "names"),
    [
        (".srt", b"\xe9", "utf-8"),
        (".po", PO_WORD.format(declared="no-such", word="a", filled="").encode(), "no-such"),
        (".po", PO_WORD.format(declared="ASCII", word="a", filled="").encode(), "日"),
        (".xlf", b"<?xml version='1.0' encoding='utf-8'?>\xe9", "utf-8"),
    ],
)
def test_text_that_its_encoding_lacks_is_refused(suffix: str, data: bytes, names: str) -> None:
    with pytest.raises(UserError, match=names) as error:
        translate_document(data, suffix, translator_by(lambda _: "日"))
    assert "\n" not in str(error.value)
    page = '<meta charset="latin-1"><p>café'.encode("latin-1")
    assert translate_document(page, ".html", translator_by(lambda _: "日")).endswith(b"&#26085;")


@pytest.mark.parametrize(
    ("declaration", "encoding"), [("", "cp1252"), ('<meta charset="utf-8">', "utf-8")]
)
def test_browsers_read_the_letters_of_a_page(declaration: str, encoding: str) -> None:
    """Without a declaration they take windows-1252."""
    page = f"<html><head>{declaration}<title>One</title></head><body><p>two&nbsp;three</p></body></html>"
    translated = translate_document(page.encode(), ".html", translator_by(lambda _: "zwölf 日"))
    assert html.unescape(translated.decode(encoding)).count("zwölf 日") == 2


def word_of_attributes(count: int) -> bytes:
    names = " ".join(f'a{number}="b"' for number in range(count))
    part = (
        f'<w:document xmlns:w="{W}"><w:p {names}><w:r><w:t>one two</w:t></w:r></w:p></w:document>'
    )
    return zipped({"word/document.xml": part})


SHAPES = {
    "formulas": (".md", lambda count: b"\\(a " * count),
    "comments": (".md", lambda count: b"{/* " * count),
    "roles": (".md", lambda count: b":a" * count),
    "attributes": (".docx", word_of_attributes),
    "lines": (".vtt", lambda count: b"WEBVTT\n\n00:01.000 --> 00:02.000\n" + b"- a\n" * count),
    "voices": (".vtt", lambda count: b"WEBVTT\n\n00:01.000 --> 00:02.000\n" + b"<v a" * count),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow
def test_time_grows_with_the_length_of_a_document_of_any_shape(name: str) -> None:
    suffix, shape = SHAPES[name]

    def seconds(count: int) -> float:
        document = shape(count)
        start = time.process_time()
        translate_document(document, suffix, translator_by(str.upper))
        return time.process_time() - start

    seconds(10)  # imports
    assert (
        seconds(8000) < 16 * min(seconds(1000) for _ in range(3)) + 0.1
    )  # 64 if it were quadratic


@pytest.mark.parametrize("charset", ["CHARSET", "UTF-8"])
def test_filled_template_of_gettext_is_a_catalogue(charset: str) -> None:
    msgfmt = shutil.which("msgfmt") or pytest.skip("needs msgfmt")
    header = (
        f"PO-Revision-Date: YEAR-MO-DA HO:MI+ZONE\\nContent-Type: text/plain; charset={charset}\\n"
    )
    messages = '#, fuzzy\nmsgid "one"\nmsgstr ""\n\nmsgid "two"\nmsgstr ""\n'
    template = f'# A title\n#, fuzzy\nmsgid ""\nmsgstr "{header}"\n\n{messages}'
    filled = translate_document(template.encode(), ".pot", translator_by(lambda _: "zwölf"))
    assert filled.count(b"fuzzy") == 1  # Babel takes no catalogue whose header is
    compiled = subprocess.run(
        [msgfmt, "-o", "-", "-"], input=filled, check=True, capture_output=True
    )
    assert gettext.GNUTranslations(io.BytesIO(compiled.stdout)).gettext("two") == "zwölf"
    plurals = template.replace(
        header, f"{header}Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"
    )
    assert "msginit" in error_of(translate_document, plurals.encode(), ".pot", translator_by(str))


@pytest.mark.parametrize("words", [1, 2, 9, 40])
def test_sentence_over_several_cues_leaves_none_empty(words: int) -> None:
    translated = translate_document(
        SRT.encode(), ".srt", translator_by(lambda _: " ".join(["word"] * words))
    ).decode()
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
        document = (
            f"1{first[-1]}{first}<i>Go.</i>{end}{number}{second}at 1: a --> b.{end}{number}{first}"
        )
        seen: list[str] = []
        assert (
            translate_document(document.encode(), ".srt", translator_by(str, seen))
            == document.encode()
        )
        assert seen == ["Go.", "at 1: a --> b."]
    assert "documents" in error_of(
        lambda: translate_document(b"no cues", ".srt", translator_by(str))
    )


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
        ("## Head ##\n# Next {#id .c}\nC #\n", ["Head", "Next", "C #"]),
        ("***\nText a\n\n_ _ _\nb\n", ["Text a", "b"]),
        ('!!! note "Title a"\n    Body b\n', ["Title a", "Body b"]),
        ('=== "Tab a"\n\n    Content b\n', ["Tab a", "Content b"]),
        ("[TOC]\n\nimport X from 'y';\n\na b\n", ["a b"]),
        ("![i](a.png){width=5}\n\n*[HTML]: Hyper Text\n\na\n", ["a"]),
        ("$$x$$ is so\n\n\\begin{align*}\na b\n\\end{align*}\nc d\n", ["is so", "c d"]),
        ("See [a b](<x y> 'z') now.\n", ["See a b now."]),
        ("A | B\n--- | ---\nc<br>d | e\n", ["A", "B", "c", "d", "e"]),
    ],
)
def test_markdown_keeps_its_structure(document: str, texts: list[str]) -> None:
    seen: list[str] = []
    assert (
        translate_document(document.encode(), ".md", translator_by(str, seen)) == document.encode()
    )
    assert seen == texts
    upper = translate_document(document.encode(), ".md", translator_by(str.upper)).decode()
    assert upper.lower() == document.lower() and upper.count("\n") == document.count("\n")


@pytest.mark.parametrize("line", ["|\n", "a|\n", "| a | b |\n", "> a\n", "<pre>\n"])
@pytest.mark.slow
def test_long_markdown_is_split_in_linear_time(line: str) -> None:
    document = "|-|-|\n" + line * 4_000  # a minute, if the time were quadratic
    assert translate_document(document.encode(), ".md", translator_by(str)).count(b"\n") > 0


@pytest.mark.parametrize(
    ("suffix", "document", "texts", "added"),
    [
        (
            ".po",
            'msgid "a"\nmsgid_plural "b"\nmsgstr[0] "x"\nmsgstr[1] ""\nmsgstr[2] ""\n"y"\n',
            ["b"],
            '[1] "B"',
        ),
        (".po", 'msgctxt "c"\nmsgid ""\n"a "\n"b"\nmsgstr ""\n', ["a b"], 'msgstr "A B"'),
        (
            ".po",
            'msgid "a \\033[1mb\\a c"\nmsgstr ""\n',
            ["a \x1b[1mb\a c"],
            'msgstr "A \\033[1MB\\a C"',
        ),
        (
            ".xlf",
            "<trans-unit><source><![CDATA[a <b>b</b>]]></source></trans-unit>",
            ["a <b>b</b>"],
            "<target>A &lt;B&gt;B&lt;/B&gt;</target>",
        ),
        (
            ".xlf",
            '<xliff><unit translate="no"><segment><source>a</source></segment><segment translate="yes"><source>b'
            '</source></segment></unit><group translate="yes"/><unit><segment><source>c'
            "</source></segment></unit></xliff>",
            ["b", "c"],
            "<target>C</target>",
        ),
        (
            ".xlf",
            '<x><trans-unit/><trans-unit id="2"><source>a</source></trans-unit></x>',
            ["a"],
            "<target>A</target>",
        ),
        (
            ".tmx",
            '<x><tu><tuv xml:lang="fr"><seg>x</seg></tuv><tuv xml:lang="en"><seg/></tuv></tu>\n<tu>'
            '<tuv lang="en"><seg>a</seg></tuv></tu></x>',
            ["a"],
            '<tuv xml:lang="de"><seg>A</seg></tuv>',
        ),
    ],
)
def test_translation_files_are_filled_where_they_are_empty(suffix, document, texts, added) -> None:
    seen: list[str] = []
    filled = translate_document(
        document.encode(), suffix, translator_by(str.upper, seen), "en", "de"
    ).decode()
    assert seen == texts and added in filled


@pytest.mark.parametrize(
    "unit",
    [
        "<trans-unit>",
        "<segment ",
        "<tu>",
        "<tuv>",
        pytest.param("<tu><tuv><seg>", marks=pytest.mark.slow),
        '"a"\n',
        'msgid "a"\n',
    ],
)
def test_damaged_translation_files_are_read_in_linear_time(unit: str) -> None:
    data = (unit * 30_000).encode()  # five minutes, if the time were quadratic
    for suffix, name in ((".po", "PO"), (".xlf", "XML"), (".tmx", "XML")):
        with pytest.raises(UserError, match=name):
            translate_document(data, suffix, translator_by(str), "en", "de")


def test_other_formats_are_refused_by_name() -> None:
    for suffix in (".pdf", "", ".odp", ".docx", ".odt", ".tmx"):
        assert "documents" in error_of(translate_document, b"x", suffix, translator_by(str))


def zipped(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(
                name, content, zipfile.ZIP_DEFLATED if ".xml" in name else zipfile.ZIP_STORED
            )
    return data.getvalue()


def content_of(data: bytes) -> list[tuple[str, bytes, int]]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return [
        (entry.filename, archive.read(entry), entry.compress_type) for entry in archive.infolist()
    ]


def test_word_processor_documents_keep_their_formatting() -> None:
    word = zipped(
        {"[Content_Types].xml": "<t/>", "word/document.xml": DOCX, "word/media/i.png": "x"}
    )
    seen: list[str] = []
    assert content_of(translate_document(word, ".docx", translator_by(str, seen))) == content_of(
        word
    )
    assert seen == ["Hello big dog.", "Two"]

    def reversed_words(texts):
        links = [(0, 2), (1, 1), (2, 0)]
        return [
            [TranslatedPart(text, "Hund groß Hallo", links if " " in text else None)]
            for text in texts
        ]

    contents = {
        name: content
        for name, content, _ in content_of(translate_document(word, ".docx", reversed_words))
    }
    root = etree.fromstring(contents["word/document.xml"])
    runs = [
        ("".join(run.itertext()), run.find(f"{{{W}}}rPr") is not None)
        for run in root.iter(f"{{{W}}}r")
    ]
    assert "".join(text for text, _ in runs) == "Hund groß HalloHund groß Hallo"
    assert [text.strip() for text, bold in runs if bold] == ["groß"]
    office, seen = (
        zipped({"mimetype": "x", "content.xml": content_xml(ODT), "Pictures/i.png": "x"}),
        [],
    )
    assert content_of(translate_document(office, ".odt", translator_by(str, seen))) == content_of(
        office
    )
    assert seen == ["Head", "Hello big dog.", "A note"]
    upper = content_of(translate_document(office, ".odt", translator_by(str.upper)))
    expected = ODT.replace("Head", "HEAD").replace("Hello", "HELLO").replace("big<", "BIG<")
    assert same_xml(
        upper[1][1], content_xml(expected.replace("dog", "DOG").replace("A note", "A NOTE"))
    )


def run(text: str, form: str = "") -> str:
    return f'<w:r>{f"<w:rPr>{form}</w:rPr>" if form else ""}<w:t xml:space="preserve">{text}</w:t></w:r>'


def mark(kind: str) -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


FIELD = f"{mark('begin')}<w:r><w:instrText> DATE </w:instrText></w:r>{mark('separate')}{run('1 May')}{mark('end')}"
LINK_FIELD = (
    f'{mark("begin")}<w:r><w:instrText> HYPERLINK "x"</w:instrText></w:r>{mark("separate")}'
)
BOX = "<w:r><w:drawing><w:txbxContent><w:p>{}</w:p></w:txbxContent></w:drawing></w:r>"
STRONG = '<w:rStyle w:val="Strong"/>'
CODE = run("x_y", '<w:rStyle w:val="VerbatimChar"/>')

#: paragraphs of a DOCX file, and with their words backwards
PARAGRAPHS = {
    "a link of several runs keeps their formats": (
        f"{run('See ')}<w:hyperlink r:id='1'>{run('the ', '<w:u/>')}{run('bold', '<w:b/>')}"
        f"</w:hyperlink>{run(' end')}",
        f"{run('END ')}<w:hyperlink r:id='1'>{run('BOLD ', '<w:b/>')}{run('THE', '<w:u/>')}"
        f"</w:hyperlink>{run(' SEE')}",
    ),
    "a word of two formats keeps both": (
        f"{run('Al', '<w:b/>')}{run('phabet now')}",
        f"{run('NOW ')}{run('AL', '<w:b/>')}{run('PHABET')}",
    ),
    "a field stays whole": (
        f"{run('On ')}{FIELD}{run(' we go')}",
        f"{run('GO ')}{FIELD}{run(' WE ON')}",
    ),
    "the text of a link field is translated": (
        f"{run('a ')}{LINK_FIELD}{run('b c')}{mark('end')}",
        f"{LINK_FIELD}{run('C B')}{mark('end')}{run(' A')}",
    ),
    "marks of a bookmark enclose its words": (
        f"<w:bookmarkStart w:id='1'/>{run('a')}<w:bookmarkEnd w:id='1'/>{run(' b')}",
        f"{run('B ')}<w:bookmarkStart w:id='1'/>{run('A')}<w:bookmarkEnd w:id='1'/>",
    ),
    "a mark without a partner stays at its end": (
        f"<w:bookmarkStart w:id='1'/>{run('a b')}",
        f"<w:bookmarkStart w:id='1'/>{run('B A')}",
    ),
    "a text box does not end a sentence": (
        f"{run('a ')}{BOX.format(run('c d'))}{run('b')}",
        f"{BOX.format(run('D C'))}{run('B A')}",
    ),
    "a text box before the text stays there": (
        f"{BOX.format(run('c d'))}{run('a b')}",
        f"{BOX.format(run('D C'))}{run('B A')}",
    ),
    "lines and tabs of a style are apart": (
        f"{run('a b', STRONG)}<w:r><w:rPr>{STRONG}</w:rPr><w:ptab/></w:r>{run('c d', STRONG)}",
        f"{run('B A', STRONG)}<w:r><w:rPr>{STRONG}</w:rPr><w:ptab/></w:r>{run('D C', STRONG)}",
    ),
    "lines of a run are apart": (
        "<w:r><w:t>a b</w:t><w:br/><w:t>c d</w:t></w:r>",
        f"{run('B A')}<w:r><w:br/></w:r>{run('D C')}",
    ),
    "code stays": (f"{run('a ')}{CODE}{run(' b')}", f"{CODE}{run(' B A')}"),
    "paragraphs of code stay": (f'<w:pPr><w:pStyle w:val="SourceCode"/></w:pPr>{run("a b")}', None),
    "deleted text stays": (
        f"<w:del><w:r><w:delText>a b</w:delText></w:r></w:del>{run('c d')}",
        f"{run('D ')}<w:del><w:r><w:delText>a b</w:delText></w:r></w:del>{run('C')}",
    ),
    "a ruby annotation stays around its word": (
        f"{run('a ')}<w:r><w:ruby><w:rt>{run('x')}</w:rt><w:rubyBase>{run('b')}</w:rubyBase>"
        f"</w:ruby></w:r>{run(' c')}",
        f"{run('C ')}<w:r><w:ruby><w:rt>{run('x')}</w:rt><w:rubyBase>{run('B')}</w:rubyBase>"
        f"</w:ruby></w:r>{run(' A')}",
    ),
    "ranges that cross start before they end": (
        f"<w:commentRangeStart w:id='1'/>{run('a ')}<w:bookmarkStart w:id='2'/>{run('b')}<w:commentRangeEnd w:id='1'/>"
        f"{run(' c')}<w:bookmarkEnd w:id='2'/>{run(' d')}",
        f"{run('D C')}<w:bookmarkStart w:id='2'/>{run(' ')}<w:commentRangeStart w:id='1'/><w:bookmarkEnd w:id='2'/>"
        f"{run('B A')}<w:commentRangeEnd w:id='1'/>",
    ),
    "a range that starts before a link and ends in it leaves the link whole": (
        f"<w:bookmarkStart w:id='1'/>{run('a ')}<w:hyperlink w:anchor='x'>{run('b ')}"
        f"<w:bookmarkEnd w:id='1'/>{run('c')}"
        f"</w:hyperlink>{run(' d')}",
        f"<w:bookmarkStart w:id='1'/>{run('D ')}<w:hyperlink w:anchor='x'><w:bookmarkEnd w:id='1'/>{run('C B')}"
        f"</w:hyperlink>{run(' A')}",
    ),
    "no word crosses an insertion or a link with a line break in it": (
        f"{run('a ')}<w:ins w:id='1'>{run('b')}<w:r><w:br/></w:r>{run('c')}</w:ins>{run(' d e')}",
        f"{run('A ')}<w:ins w:id='1'>{run('B')}<w:r><w:br/></w:r>{run('C')}</w:ins>{run(' E D')}",
    ),
    "no word crosses a link field with a line break in it": (
        f"{run('a ')}{LINK_FIELD}{run('b')}<w:r><w:br/></w:r>{run('c')}{mark('end')}{run(' d e')}",
        f"{run('A ')}{LINK_FIELD}{run('B')}<w:r><w:br/></w:r>{run('C')}{mark('end')}{run(' E D')}",
    ),
    "no word crosses the start of a link that ends in another paragraph": (
        f"{run('a b ')}{LINK_FIELD}{run('c d')}</w:p><w:p>{run('e f')}{mark('end')}{run(' g h')}",
        f"{run('B A ')}{LINK_FIELD}{run('D C')}</w:p><w:p>{run('F E')}{mark('end')}{run(' H G')}",
    ),
    "a comment of XML in a text is dropped": ("<w:r><w:t>a<!-- x --> b</w:t></w:r>", run("B A")),
    "tracked formats are part of a format": (
        f"{run('a', '<w:b/><w:rPrChange><w:rPr><w:i/></w:rPr></w:rPrChange>')}{run(' b c')}",
        f"{run('C B ')}{run('A', '<w:b/><w:rPrChange><w:rPr><w:i/></w:rPr></w:rPrChange>')}",
    ),
}


@pytest.mark.parametrize(("paragraph", "expected"), PARAGRAPHS.values(), ids=PARAGRAPHS)
def test_formats_of_word_documents_go_with_their_words(
    paragraph: str, expected: str | None
) -> None:
    document, translated = (
        f'<w:document xmlns:w="{W}" xmlns:r="urn:r"><w:body><w:p>{text}</w:p></w:body></w:document>'
        for text in (paragraph, expected)
    )
    result = content_of(
        translate_document(zipped({"word/document.xml": document}), ".docx", backwards)
    )[0][1].decode()
    assert same_xml(result, document if expected is None else translated)


ODT_CASES = [
    (
        'a <text:bookmark-start text:name="x"/>b<text:bookmark-end text:name="x"/>',
        '<text:bookmark-start text:name="x"/>B<text:bookmark-end text:name="x"/> A',
    ),
    (
        'a <text:span text:style-name="Source_20_Text">x_y</text:span> b',
        '<text:span text:style-name="Source_20_Text">x_y</text:span> B A',
    ),
    ("a<text:s/>b", "B A"),
    (
        'a <text:toc-mark-start text:key1="A" text:id="x"/>b c<text:toc-mark-end text:id="x"/>',
        '<text:toc-mark-start text:key1="A" text:id="x"/>C B<text:toc-mark-end text:id="x"/> A',
    ),
    (
        'a <office:annotation office:name="x"><text:p>e f</text:p></office:annotation>b c<office:annotation-end '
        'office:name="x"/> d',
        'D <office:annotation office:name="x"><text:p>F E</text:p></office:annotation>C B<office:annotation-end '
        'office:name="x"/> A',
    ),
    (
        'a <text:a text:name="x">b<text:line-break/>c</text:a> d e',
        'A <text:a text:name="x">B<text:line-break/>C</text:a> E D',
    ),
    (
        "a <text:ruby><text:ruby-base>b</text:ruby-base><text:ruby-text>x</text:ruby-text></text:ruby> c",
        "C <text:ruby><text:ruby-base>B</text:ruby-base><text:ruby-text>x</text:ruby-text></text:ruby> A",
    ),
    (
        "a <text:a>b <text:ruby><text:ruby-base>c</text:ruby-base></text:ruby></text:a>",
        "<text:a><text:ruby><text:ruby-base>C</text:ruby-base></text:ruby> B</text:a> A",
    ),
    ('a b<text:s text:c="3"/>c d', 'B A<text:s text:c="3"/>D C'),
    ("<draw:frame/>a b", "<draw:frame/>B A"),
    ("a b<draw:frame/><draw:g/>", "B A<draw:frame/><draw:g/>"),
    ("<text:span>a</text:span> <draw:frame/> b", "<draw:frame/> B <text:span>A</text:span>"),
    (
        "a <draw:frame><draw:text-box><text:p>c d</text:p></draw:text-box></draw:frame> b",
        "<draw:frame><draw:text-box><text:p>D C</text:p></draw:text-box></draw:frame> B A",
    ),
]

#: Markdown, and with its words backwards
MARKDOWN_CASES = [
    ("Sum $a_b$ of\n\n$$\nx y\n$$\n$5 or $6\n", "$a_b$ OF SUM\n\n$$\nx y\n$$\n$6 OR $5\n"),
    ("A note[^1]\n\n[^1]: Its text\n", "NOTE[^1] A\n\n[^1]: TEXT ITS\n"),
    ("The term\n:   What is\n", "TERM THE\n:   IS WHAT\n"),
    ("> a b\n>\n> > c d\n> - e f\n", "> B A\n>\n> > D C\n> - F E\n"),
    ("<!-- one\n\ntwo -->\na b\n", "<!-- one\n\ntwo -->\nB A\n"),
    ("<p align=x>\n  a <b>b</b>\n</p>\n\nc d\n", "<p align=x>\n  <b>B</b> A\n</p>\n\nD C\n"),
    ("<pre>\na b\n\nc d\n</pre>\ne f\n", "<pre>\na b\n\nc d\n</pre>\nF E\n"),
    ("# a b {#id}\n", "# B A {#id}\n"),
    ("Use the `code`\n\n* a b\n", "THE `code` USE\n\n* B A\n"),
    ("May 1.\n\na -\n", "1\\. MAY\n\n\\- A\n"),
    ("- ```\n  a b\n  ```\n- c d\n", "- ```\n  a b\n  ```\n- D C\n"),
]
HTML_CASES = [
    (
        "<p>a <i translate=no>x <b translate=yes>b c</b> y</i></p>",
        "<p>A <i translate=no>x <b translate=yes>C B</b> y</i></p>",
    ),
    (
        "<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>, a b",
        "B A <ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>,",
    ),
    (
        '<a href="#">a b</a><x-bar><h2>c d</h2></x-bar>',
        '<a href="#">B A</a><x-bar><h2>D C</h2></x-bar>',
    ),
    ("<x-box>a b<p>c d</x-box>", "<x-box>B A<p>D C</x-box>"),
    ("<p>of H<sub>2</sub>O and x<sup>2</sup> is", "<p>IS X<sup>2</sup> H<sub>2</sub>O AND OF"),
]
XLIFF_CASES = [
    (
        "<x:segment xmlns:x='urn:x'><!-- <source>no</source> --><x:source>a b</x:source></x:segment>",
        "<x:segment xmlns:x='urn:x'><!-- <source>no</source> --><x:source>a b</x:source><x:target>B A</x:target>"
        "</x:segment>",
    ),
    ("<group translate='no'><segment><source>a b</source></segment></group>", None),
    (
        "<segment><source><![CDATA[a <b>]]> c</source></segment>",
        "<segment><source><![CDATA[a <b>]]> c</source><target>C &lt;B&gt; A</target></segment>",
    ),
    (
        '<trans-unit><source>a <mrk mtype="protected">b</mrk></source><target/></trans-unit>',
        '<trans-unit><source>a <mrk mtype="protected">b</mrk></source>'
        '<target>A <mrk mtype="protected">b</mrk></target>'
        "</trans-unit>",
    ),
    (
        '<segment state="initial" subState="my:value"><source>a b</source><target>x</target></segment>',
        '<segment state="translated"><source>a b</source><target>B A</target></segment>',
    ),
    (
        '<trans-unit><source>a b</source><target state="new" state-qualifier="id-match">x</target></trans-unit>',
        '<trans-unit><source>a b</source><target state="translated">B A</target></trans-unit>',
    ),
]
XLIFF_CASES += [
    (
        f"<segment><source>{source}</source></segment>",
        f"<segment><source>{source}</source><target>{target}</target></segment>",
    )
    for source, target in [
        ('a <bpt id="1"/>b c<ept id="1"/> d', 'D <bpt id="1"/>C B<ept id="1"/> A'),
        (
            'a <bx id="1" rid="7"/>b c<ex id="2" rid="7"/> d',
            'D <bx id="1" rid="7"/>C B<ex id="2" rid="7"/> A',
        ),
        ('a <sc id="1"/>b c<ec startRef="1"/> d', 'D <sc id="1"/>C B<ec startRef="1"/> A'),
        ('a <sm id="1"/>b c<em startRef="1"/> d', 'D <sm id="1"/>C B<em startRef="1"/> A'),
        (
            'a <pc id="1" canReorder="firstNo">b</pc> <pc id="2" canReorder="no">c</pc> <pc id="3">d</pc>',
            '<pc id="3">D</pc> <pc id="1" canReorder="firstNo">C</pc> <pc id="2" canReorder="no">B</pc> A',
        ),
        (
            'a <ph id="1" canReorder="firstNo"/>b <ph id="3"/><ph id="2" canReorder="no"/>c',
            '<ph id="3"/><ph id="1" canReorder="firstNo"/>C <ph id="2" canReorder="no"/>B A',
        ),
    ]
]
BREAKS = [
    '<x id="1" ctype="lb"/>',
    '<ph id="1" ctype="x-br">&lt;br/></ph>',
    '<ph type="fmt" subType="xlf:lb"/>',
    '<x id="1" equiv-text="&#10;"/>',
    '<ph equiv="\\n"/>',
    '<ph x="1">\\t</ph>',
    "<ph>&lt;br&gt;</ph>",
]
XLIFF_CASES += [
    (
        unit.format(f"a b{code}c d", ""),
        unit.format(f"a b{code}c d", f"<target>B A{code}D C</target>"),
    )
    for code in BREAKS
    for unit in ["<trans-unit><source>{}</source>{}</trans-unit>"]
]
SRT_CASES = [
    ("1\n00:00:01,000 --> 00:00:02,000\n\n2\n00:00:03,000 --> 00:00:04,000\na b\n",) * 2,
    ("1\n00:00:01,000 --> 00:00:02,000\na\n2\n00:00:03,000 --> 00:00:04,000\nI am <x>\n",) * 2,
]


@pytest.mark.parametrize(
    ("suffix", "document", "expected"),
    [(".md", *case) for case in MARKDOWN_CASES]
    + [(".html", *case) for case in HTML_CASES]
    + [(".xlf", *case) for case in XLIFF_CASES]
    + [(".srt", *case) for case in SRT_CASES]
    + [(".odt", *case) for case in ODT_CASES],
)
def test_markup_goes_with_its_words(suffix: str, document: str, expected: str | None) -> None:
    def translated(text: str, translate) -> str:
        if suffix != ".odt":
            return translate_document(text.encode(), suffix, translate).decode()
        content = content_of(
            translate_document(
                zipped({"content.xml": content_xml(f"<text:p>{text}</text:p>")}), suffix, translate
            )
        )[0][1]
        return content.decode()

    expected = document if expected is None else expected
    if suffix == ".odt":
        assert translated(document, translator_by(str)) == content_xml(
            f"<text:p>{document}</text:p>"
        )
        assert same_xml(
            translated(document, backwards), content_xml(f"<text:p>{expected}</text:p>")
        )
    elif suffix == ".xlf":
        assert same_xml(translated(document, backwards), expected)
    elif suffix == ".srt":
        assert translated(document, translator_by(str)) == document
        assert translated(document, translator_by(str.upper)).lower() == document.lower()
    else:
        assert translated(document, translator_by(str)) == document
        assert translated(document, backwards) == expected


def test_codes_that_cannot_take_the_place_of_each_other_are_refused() -> None:
    codes = '<ph id="1" canReorder="firstNo"/>a <pc id="2" canReorder="no">b</pc>'
    document = f"<segment><source>{codes}</source></segment>"
    refusal = error_of(translate_document, document.encode(), ".xlf", backwards)
    assert refusal.startswith("documents: the translation of 'a b' would change the order of codes")


def test_white_space_of_a_translation_memory_stays() -> None:
    memory = '<tmx><tu>\n  <tuv lang="en"><seg>a:\n\n  b</seg></tuv></tu></tmx>'
    added = '\n  <tuv xml:lang="de"><seg>A:\n\n  B</seg></tuv>'
    assert translate_document(
        memory.encode(), ".tmx", translator_by(str.upper), "en", "de"
    ).decode() == memory.replace("</tuv>", f"</tuv>{added}")


@pytest.mark.parametrize(
    ("name", "hyphen"), [("noBreakHyphen", "\u2011"), ("softHyphen", "\u00ad")]
)
def test_hyphens_of_word_stay_in_their_word(name: str, hyphen: str) -> None:
    run = f"<w:r><w:t>well</w:t><w:{name}/><w:t>known</w:t></w:r>"
    part = f'<w:document xmlns:w="{W}"><w:p>{run}</w:p></w:document>'
    seen: list[str] = []
    translated = translate_document(
        zipped({"word/document.xml": part}), ".docx", translator_by(str.upper, seen)
    )
    assert seen == [f"well{hyphen}known"]
    assert (
        "".join(etree.fromstring(content_of(translated)[0][1]).itertext()) == f"WELL{hyphen}KNOWN"
    )


@pytest.mark.parametrize(
    ("cap", "rest", "expected"),
    [("O", "nce a b", ["B", " A ONCE"]), ("A", " b", ["B", " A"]), ("“O", "ne”", ["“O", "NE”"])],
)
def test_drop_cap_of_word_is_the_first_letter(cap: str, rest: str, expected: list[str]) -> None:
    """It is a paragraph in a frame: ECMA-376, 17.3.1.11."""
    frame = '<w:pPr><w:framePr w:dropCap="drop" w:lines="3"/></w:pPr>'
    large = run(cap, '<w:sz w:val="96"/>')
    paragraphs = f"<w:p>{frame}{large}</w:p><w:p>{run(rest)}</w:p>"
    part = f'<w:document xmlns:w="{W}"><w:body>{paragraphs}</w:body></w:document>'
    translated = translate_document(zipped({"word/document.xml": part}), ".docx", backwards)
    body = etree.fromstring(content_of(translated)[0][1])[0]
    assert ["".join(paragraph.itertext()) for paragraph in body] == expected
    assert body[0].find(".//{*}sz") is not None and body[1].find(".//{*}sz") is None


def test_drop_cap_of_a_text_that_stays_is_kept() -> None:
    frame = '<w:pPr><w:framePr w:dropCap="drop"/></w:pPr>'
    paragraphs = f"<w:p>{frame}{run('O')}</w:p><w:p>{run('nce')}</w:p><w:p>{run('six')}</w:p>"
    part = f'<w:document xmlns:w="{W}"><w:body>{paragraphs}</w:body></w:document>'
    translate = translator_by(lambda text: text.replace("six", "sechs"))
    translated = translate_document(zipped({"word/document.xml": part}), ".docx", translate)
    body = etree.fromstring(content_of(translated)[0][1])[0]
    assert ["".join(paragraph.itertext()) for paragraph in body] == ["O", "nce", "sechs"]


@pytest.mark.parametrize("suffix", [".docx", ".odt"])
@pytest.mark.parametrize("files", [{}, {"xl/workbook.xml": "<x/>"}])
def test_archives_without_text_are_refused(suffix: str, files: dict[str, str]) -> None:
    assert "documents" in error_of(
        lambda: translate_document(zipped(files), suffix, translator_by(str))
    )


@pytest.mark.parametrize("stray", ["", "=== word/document.xml ===\n<?xml?>", "{}", "\0\1"])
def test_parts_that_are_no_xml_stay(stray: str) -> None:
    files = {"word/document.xml": DOCX, "word/notes.xml": stray}
    contents = content_of(translate_document(zipped(files), ".docx", translator_by(str.upper)))
    assert contents[1][1] == stray.encode() and b"HELLO" in contents[0][1]


@pytest.mark.parametrize("start", ["<w:hdr xmlns:w=>", "<w:hdr", f'<w:hdr xmlns:w="{W}"><w:p>'])
def test_damaged_part_is_refused_by_name(start: str) -> None:
    files = {"word/document.xml": DOCX, "word/header1.xml": start}
    with pytest.raises(UserError, match="word/header1.xml is no well-formed XML"):
        translate_document(zipped(files), ".docx", translator_by(str.upper))


@pytest.mark.parametrize(
    ("source", "output", "flags"),
    [
        ("page.html", "page.docx", []),
        ("page.html", "page.md.srt", []),
        ("text.txt", "page.odt", []),
        (None, "page.po", []),
        ("memory.tmx", "memory.xlf", []),
        ("page.html", "none/page.html", []),
        ("text.txt", "none/text.txt", []),
        ("page.html", None, ["--unwrap"]),
        ("notes.ass", None, []),
        ("texts.yaml", None, []),
        ("folder", None, []),
    ],
)
def test_files_that_would_mislead_are_refused(source, output, flags, tmp_path: Path, capfd) -> None:
    from vanilla_transformer_cli.main import main

    (tmp_path / "folder").mkdir()
    for name in ("page.html", "text.txt", "memory.tmx", "notes.ass", "texts.yaml"):
        (tmp_path / name).write_text("[Script Info]\nseven" if name == "notes.ass" else "seven")
    arguments = ["translate", "--model", str(echo_folder(tmp_path / "model")), *flags]
    arguments += ["--input", str(tmp_path / source)] if source else []
    arguments += ["--output", str(tmp_path / output)] if output else []
    capfd.readouterr()
    assert pytest.raises(SystemExit, main, arguments).value.code == 2
    assert capfd.readouterr().err.count("\n") == 1 and not (output and (tmp_path / output).exists())


def test_document_is_translated_sentence_by_sentence(tmp_path: Path, capfdbinary) -> None:
    pytest.importorskip("sentencex", reason="needs the extra `documents`")
    from vanilla_transformer_cli.main import main

    translator = echo_translator()
    one, two = translator.translate(["seven dogs.", "two hundred"])
    page = "<ul><li>seven dogs. <b>two hundred</b> {x}</li></ul>"
    expected = translate_document(
        page.encode(), ".html", text_translator(translator, "en", "de")
    ).decode()
    # the alignment of a random model decides where the placeholder stands
    assert expected.count(" {x}") == 1
    assert expected.replace(" {x}", "") == f"<ul><li>{one} <b>{two}</b></li></ul>"
    (tmp_path / "page.html").write_text(page)
    common = [
        "translate",
        "--model",
        str(echo_folder(tmp_path / "model")),
        "--input",
        str(tmp_path / "page.html"),
    ]
    assert pytest.raises(SystemExit, main, common).value.code == 0
    assert capfdbinary.readouterr().out.decode() == expected
    assert (
        pytest.raises(
            SystemExit, main, [*common, "--output", str(tmp_path / "new.html")]
        ).value.code
        == 0
    )
    assert (tmp_path / "new.html").read_text() == expected
    assert set(SUFFIXES) == set(DOCUMENTS) | {
        ".htm",
        ".xhtml",
        ".markdown",
        ".pot",
        ".xliff",
        ".docx",
        ".odt",
    }
