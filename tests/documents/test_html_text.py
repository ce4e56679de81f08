"""HTML keeps every tag, comment and entity. Inline elements follow their words into the translation."""

import html
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.documents.html_scanner import scan
from hf_vanilla_transformer.documents.html_text import split_html
from hf_vanilla_transformer.documents.passages import Passage, passages_of, translate_pieces
from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.text import words

PAGE = """<!DOCTYPE html><!-- a < b --><p class="x">Hello <b>big <i>red</i></b> <a href="?a&amp;b">world</a>!<br>
Next &amp; more &lt;x&gt; <img src=1>.</p><script>if (a<b) {x("<p>no</p>")}</script><STYLE>p {}</STYLE>
<ul><li> One <span translate="no">ABC <span>x</span></span> two</li></ul><pre> a  b </pre><P>last&nbsp;one"""


def passages(pieces: list[str | Passage]) -> list[Passage]:
    return passages_of([pieces])


def filled(document: str, *added: TranslatedPart) -> str:
    """The document with each passage translated by itself and other text."""
    return translate_pieces(
        split_html(document), lambda texts: [[TranslatedPart(text, text), *added] for text in texts]
    )


def test_passages_are_what_a_reader_sees() -> None:
    texts = [each.text for each in passages(split_html(PAGE))]
    assert texts == ["Hello big red world!", "Next & more <x> .", "One two", "last\u00a0one"]


def test_markup_stays_as_it_is_written() -> None:
    assert filled(PAGE) == PAGE


@pytest.mark.parametrize(
    ("document", "translation", "links", "expected"),
    [
        # an element goes with its word, without the punctuation
        ("Hello <b>world</b>!", "Welt, hallo!", [(1, 0), (0, 1)], "<b>Welt</b>, hallo!"),
        ("<i>Hello</i> <b>world</b>", "Welt hallo", [(1, 0), (0, 1)], "<b>Welt</b> <i>hallo</i>"),
        # what is around everything stays around everything, also around words that nothing is aligned with
        ("<b>good day</b>", "einen guten Tag.", [(0, 1), (1, 2)], "<b>einen guten Tag.</b>"),
        ("a <b>b c</b> d", "w x y z", [(0, 0), (1, 1), (2, 2), (3, 3)], "w <b>x y</b> z"),
        # nested elements stay nested
        ("<a>x <b>y</b></a> z", "Z Y X", [(0, 2), (1, 1), (2, 0)], "Z <a><b>Y</b> X</a>"),
        # void and empty elements, and words without links
        ("one<img src=x> two", "eins zwei", [(0, 0), (1, 1)], "eins<img src=x> zwei"),
        ("one <b>two</b>", "eins", [(0, 0)], "<b>eins</b>"),
        ("one <img src=x>two", "eins zwei", [(0, 0), (1, 1)], "eins <img src=x>zwei"),
        # footnotes and formulas keep their content and follow their word
        ("word<sup>1</sup> x", "X Wort", [(0, 1), (1, 0)], "X Wort<sup>1</sup>"),
        (
            "a word<sup><a href=x>[1]</a></sup>, x",
            "das Wort, X",
            [(0, 0), (1, 1), (2, 2)],
            "das Wort<sup><a href=x>[1]</a></sup>, X",
        ),
        (
            "drink H<sub>2</sub>SO<sub>4</sub> now",
            "nun trinken",
            [(0, 1), (1, 0)],
            "H<sub>2</sub>SO<sub>4</sub> nun trinken",
        ),
        # elements inside a word correspond by their order, or by their place in a word that is copied
        ("<a>en</a>|<a>de</a> x", "X eng|deu", [(0, 1), (1, 0)], "X <a>eng</a>|<a>deu</a>"),
        ("a do<b>gg</b>y", "Doggy A", [(0, 1), (1, 0)], "Do<b>gg</b>y A"),
        # characters are words in scripts without spaces
        (
            "你好<b>世界</b>，再见",
            "Hello world, bye",
            [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)],
            "Hello <b>world</b>, bye",
        ),
        ("Hello <b>world</b>", "你好世界", [(0, 0), (0, 1), (1, 2), (1, 3)], "你好<b>世界</b>"),
        # no element is lost or doubled where alignments cross
        ("<b>x</b> <i>y</i>", "m n o", [(0, 0), (0, 2), (1, 1)], "<b>m</b> <i>n</i> o"),
        # a lone tag, of an element that ends in another block
        ("<div><b>one</div>two</b> three", None, None, "<div><b>one</div>two</b> three"),
    ],
)
def test_inline_elements_follow_their_words(
    document, translation, links, expected, monkeypatch
) -> None:
    monkeypatch.setattr(words, "_dictionary_words", lambda: list)  # each character is a word
    if translation is None:
        assert filled(document) == expected
        return
    (piece,) = split_html(document)
    assert piece.translated([TranslatedPart(piece.text, translation, links)]) == expected


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        # every element that is not a block is inline
        ("<p>A man is <big>riding</big> a bike</p>", ["A man is riding a bike"]),
        ("<p>A <my-word>man</my-word> <g id=1>is</g> <x id=2/>riding</p>", ["A man is riding"]),
        # buttons, fields and the links of a menu
        ("<button>Save</button><button>Go</button>one<input>two", ["Save", "Go", "one", "two"]),
        ("<a>Home</a><a>About <b>us</b></a>, <a>x</a> y", ["Home", "About us, x y"]),
        # comments, as frameworks write them between texts
        ("<p>one <!-- --><!-- x -->two</p>", ["one two"]),
        # kept elements stay within their sentence
        ("<p>A man named <span translate=no>Bob</span> rides</p>", ["A man named rides"]),
        (
            "<p>A man named <span class='x notranslate'>B <b>b</b></span> rides</p>",
            ["A man named rides"],
        ),
        (
            "<p>Press <kbd>Esc</kbd> or call <code>f()</code> at <time>12</time> now</p>",
            ["Press or call at now"],
        ),
        ("one <SPAN TRANSLATE='NO'>two</SPAN> three", ["one three"]),
        ("<code>x</code> is <b>here</b> or <code>y</code>", ["is here or"]),
        ("call <code>f()</code>.", ["call ."]),
        ("<p> see <!-- a --> <code>f()</code> </p>", ["see"]),
        # a script is a part of its word unless it has words of its own
        ("<p>one<sup>two</sup> <i>x<sub>max</sub></i></p>", ["one x"]),
        ("<p>one<sup>(two three)</sup> six</p>", ["one(two three) six"]),
        # void elements, and ends that HTML implies
        ("<p>one</p><input class=notranslate><p>two</p>", ["one", "two"]),
        ("<p>one<br translate=no>two</p>", ["one", "two"]),
        ("<ul><li class=notranslate>x<li>y</ul><p>rest</p>", ["y", "rest"]),
        ("<ul><li translate=no>x <ul><li>a<li>b</ul> z<li>y</ul>rest", ["y", "rest"]),
        ("<dl><dt translate=no>x<dd>y</dl>rest", ["y", "rest"]),
        ("<table><tr><td translate=no>x<td>y<tr><td>z</table>rest", ["y", "z", "rest"]),
        ("<p translate=no>x<p>y", ["y"]),
        # https://html.spec.whatwg.org/#the-translate-attribute
        ("<p>a <i translate=no>x <b translate=yes>b c</b> y</i> d</p>", ["a", "b c", "d"]),
        (
            "<div translate=no>x<p translate>b <tt>y</tt> c</p>z<p translate=yes>d</div>e",
            ["b c", "d", "e"],
        ),
        ("<p>a <code translate=yes>b c</code> d</p>", ["a b c d"]),
        ("<div class=notranslate>x <i translate=YES>b <s translate=no>y</s></i></div>", ["b"]),
        ("<pre translate=no>x <b translate=yes>y</b></pre><svg><b translate=yes>z</b></svg>", []),
        ("<div><p translate=no>x</div>rest", ["rest"]),
        ("<p>a <span translate=no>x</p><p>rest</p>", ["a", "rest"]),
        ("<select><option translate=no>x<option>y</select>", ["y"]),
        ("<div translate=no>x<p>y<div>z</div></div>rest", ["rest"]),
    ],
)
def test_passages_follow_the_structure_of_html(document: str, texts: list[str]) -> None:
    assert [each.text for each in passages(split_html(document))] == texts
    assert filled(document) == document


def test_links_count_within_their_sentence() -> None:
    (piece,) = split_html("A b. <i>C d.</i>")
    parts = [
        TranslatedPart("A b.", "X y.", [(0, 0), (1, 1)]),
        TranslatedPart(" ", " "),
        TranslatedPart("C d.", "Z w.", [(0, 1), (1, 0)]),
    ]
    assert piece.translated(parts) == "X y. <i>Z w.</i>"


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img onerror=x>', "a & b &lt;"])
def test_translations_are_escaped(text: str) -> None:
    for document in ("plain", "with <b>bold</b> words"):
        (piece,) = split_html(document)
        found = piece.translated([TranslatedPart(piece.text, text, [(0, 0), (1, 1)])])
        assert found.replace("<b>", "").replace("</b>", "").count("<") == 0
        assert "&amp;" in found or "&" not in text


@pytest.mark.parametrize(
    "document", ["<b>" * 1400 + "x" + "</b>" * 1400, "<b>x</b> " * 1000, "<i>" + "x.!" * 3000]
)
def test_extreme_documents_keep_their_tags(document: str) -> None:
    assert Tags(filled(document)).found == Tags(document).found


class Tags(HTMLParser):
    def __init__(self, document: str):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(document)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found[f"{tag} {attrs}"] += 1

    def handle_endtag(self, tag):
        self.found[f"/{tag}"] += 1


NAMES = st.sampled_from(["b", "i", "a", "p", "div", "img", "br"])
TEXTS = st.sampled_from(
    [
        "one ",
        "two. ",
        " Three",
        "don't",
        "!",
        " ",
        "&amp; ",
        "\n",
        "<!-- c -->",
        "!&nbsp;y",
        "日本",
        "é,",
        "-",
    ]
    + [
        "x<sub>2</sub>",
        "<code>f(a)</code>",
        "<wbr>",
        "<img src=x>",
        "{name}",
        "\u0939\u093f",
        "<p>",
        "<br>",
        "<g/>",
    ]
)
ELEMENTS = st.tuples(
    st.sampled_from(["b", "a href='#'", "span", "sup", "my-word"]), st.lists(TEXTS, max_size=3)
).map(lambda pair: f"<{pair[0]}>{''.join(pair[1])}</{pair[0].split()[0]}>")
NESTED = st.lists(st.one_of(TEXTS, ELEMENTS), max_size=4).map(
    lambda inner: f"<i>{''.join(inner)}</i>"
)
DOCUMENTS = st.lists(st.one_of(TEXTS, ELEMENTS, NESTED), max_size=10).map("".join)


def check_identity(document: str) -> None:
    """A copied text gives the same document, and so does one that is placed word for word."""
    assert filled(document) == document
    marked = filled(document, TranslatedPart("", "‡"))
    found, expected = (html.unescape(re.sub("[ \n]+", " ", text)) for text in (marked, document))
    assert found.replace("‡", "") == expected


@given(DOCUMENTS)
def test_identity_translation_gives_the_same_document(document: str) -> None:
    check_identity(document)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(DOCUMENTS)
def test_identity_translation_gives_the_same_5_000_documents(document: str) -> None:
    check_identity(document)


PIECES = st.one_of(
    NAMES.map(lambda name: f"<{name} n=1>"),
    NAMES.map(lambda name: f"</{name}>"),
    st.sampled_from(
        ["one ", "two. ", " three", "!", " ", "&amp; ", "\n", "<!-- c -->", "&nbsp;", "< ", "日本"]
    ),
)
LINKS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6)


@given(
    st.lists(PIECES, max_size=14).map("".join),
    LINKS,
    st.sampled_from(["X", "A, b c.", "<b> & </b>", ""]),
)
def test_every_tag_is_kept_exactly_once(
    document: str, links: list[tuple[int, int]], translation: str
) -> None:
    pieces = split_html(document)
    found = translate_pieces(
        pieces, lambda texts: [[TranslatedPart(text, translation, links)] for text in texts]
    )
    assert Tags(found).found == Tags(document).found
    assert re.findall("<!--.*?-->", found) == re.findall("<!--.*?-->", document)


@given(st.text(alphabet=st.sampled_from("<>/!-?b p&;#x1\"='\n"), max_size=40))
def test_any_text_is_taken_as_html(document: str) -> None:
    pieces = split_html(document)
    for each in passages(pieces):
        assert each.text.strip() == each.text.strip(" ") or "\u00a0" in each.text
    assert all(piece in document for piece in pieces if isinstance(piece, str))


class _Judge(HTMLParser):
    """The tags and comments of a document, by Python's parser."""

    def __init__(self, document: str):
        super().__init__()
        self.found: list[tuple] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append(("start", tag, {name: value or "" for name, value in reversed(attrs)}))

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.found.append(("empty", *_start(tag, attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("end", tag, {}))

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment", "", {}))


def _start(tag: str, attrs: list) -> tuple:
    return tag, {name: value or "" for name, value in reversed(attrs)}


_attribute = st.sampled_from(
    [" a", " B=1", ' c = "x>y"', " d='<q>'", "\ne=", " translate=no", "/"]
).filter(str)
_tags = st.builds(
    lambda opening, tag, attributes, closing: opening + tag + "".join(attributes) + closing,
    st.just("<"),
    st.sampled_from(["p", "B", "my-word", "br", "h1"]),
    st.lists(_attribute, max_size=3),
    st.sampled_from([">", " >", "/>", " />"]),
)
_other = st.sampled_from(
    [
        "</p>",
        "</B >",
        "<!-- <b> -->",
        "<!DOCTYPE html>",
        "a < b",
        " x &amp; y ",
        "<script>if (a<b) '</p>'</script>",
    ]
)


@given(st.lists(_tags | _other, max_size=8).map("".join))
def test_scanner_finds_the_tags_of_the_parser(document: str) -> None:
    tokens = list(scan(document))
    assert "".join(token.raw for token in tokens) == document
    found = [
        (kind, tag, attributes)
        for kind, tag, _, attributes in tokens
        if kind not in ("text", "other")
    ]
    assert found == _Judge(document).found


@pytest.mark.parametrize(
    "unit", ["<a ", '<a b="', "<a b='\"", "<!--", "<![CDATA[", "</", "<?", "<title>", "<", "<b>&"]
)
@pytest.mark.parametrize("end", ["", 'x=">'])
def test_malformed_documents_are_split_in_linear_time(unit: str, end: str) -> None:
    document = unit * 20_000 + end  # half an hour, if the time were quadratic
    assert "".join(token.raw for token in scan(document)) == document


CODE = [
    "<%= user.name %>",
    "<% if a > b %>",
    "{% if a <b and c > d %}",
    "{{ x && y > 3 }}",
    "<?php if ($a->b > 3) echo '<p>x</p>'; ?>",
    "<?= $x->y ?>",
]


@pytest.mark.parametrize("code", CODE)
def test_code_of_templates_is_no_text(code: str) -> None:
    page = f"<p>one {code} two</p>"
    assert "".join(token.raw for token in scan(page)) == page
    upper = translate_pieces(
        split_html(page), lambda texts: [[TranslatedPart(text, text.upper())] for text in texts]
    )
    assert upper == f"<p>ONE {code} TWO</p>"


def test_open_code_of_a_template_is_text() -> None:
    page = "<p>5 <% six {{ a > b</p>{% c"
    assert [token.raw for token in scan(page) if token.kind == "text"] == [
        "5 <% six {{ a > b",
        "{% c",
    ]
