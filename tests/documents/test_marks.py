"""No link and no emphasis is empty or lost where a translation joins the words of several of them."""

import io
import random
import re
import zipfile
from collections import Counter

import pytest
from lxml import etree, html

from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.documents.html_text import split_html
from hf_vanilla_transformer.documents.passages import translate_pieces
from hf_vanilla_transformer.inference.placement import TranslatedPart

WORDS = [
    "two",
    "hundred",
    "and",
    "forty",
    "seven",
    "green",
    "kitchen",
    "tables",
    "stand",
    "near",
    "winter",
    "light",
]
SENTENCES = 125  # of each format

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = "urn:oasis:names:tc:opendocument:xmlns:{}:1.0"

#: Format -> suffix, the part of an archive, a document around a text, plain words, and marks by their kind.
FORMATS = {
    "html": (
        ".html",
        None,
        "<p>{}</p>",
        "{}",
        {"a": '<a href="{number}">{text}</a>', "b": "<b>{text}</b>", "i": "<i>{text}</i>"},
    ),
    "markdown": (
        ".md",
        None,
        "{}\n",
        "{}",
        {"a": "[{text}]({number}.html)", "b": "**{text}**", "i": "*{text}*"},
    ),
    "odt": (
        ".odt",
        "content.xml",
        f'<office:document-content xmlns:office="{OFFICE.format("office")}" xmlns:text="{OFFICE.format("text")}">'
        "<text:p>{}</text:p></office:document-content>",
        "{}",
        {
            "a": '<text:a href="{number}">{text}</text:a>',
            "b": '<text:span style-name="b">{text}</text:span>',
            "i": '<text:span style-name="i">{text}</text:span>',
        },
    ),
    "docx": (
        ".docx",
        "word/document.xml",
        f'<w:document xmlns:w="{WORD}"><w:body><w:p>{{}}</w:p></w:body></w:document>',
        '<w:r><w:t xml:space="preserve">{}</w:t></w:r>',
        {
            "a": '<w:hyperlink w:anchor="{number}"><w:r><w:t>{text}</w:t></w:r></w:hyperlink>',
            "b": '<w:r><w:rPr><w:b w:val="{number}"/></w:rPr><w:t>{text}</w:t></w:r>',
            "i": '<w:r><w:rPr><w:i w:val="{number}"/></w:rPr><w:t>{text}</w:t></w:r>',
        },
    ),
}


def joining(texts):
    """Upper-cased words, many of them joined to compounds in another order, and some without a link."""
    translations = []
    for text in texts:
        chance = random.Random(text)
        compounds: list[str] = []
        links = []
        for number, word in enumerate(text.split()):
            if compounds and chance.random() < 0.7:
                compounds[-1] += word
            else:
                compounds.append(word)
            if chance.random() < 0.85:
                links.append((number, len(compounds) - 1))
        order = chance.sample(range(len(compounds)), len(compounds))
        target = " ".join(compounds[number] for number in order).upper()
        translations.append(
            [TranslatedPart(text, target, [(word, order.index(to)) for word, to in links])]
        )
    return translations


def sentence(chance: random.Random, plain: str, marks: dict[str, str]) -> tuple[str, str]:
    """A sentence with one to four marks around one or two words each, and its text."""
    number_of_marks = chance.randint(1, 4)
    pieces = [False] * chance.randint(1, 4) + [True] * number_of_marks
    chance.shuffle(pieces)
    markup, words = [], []
    for number, is_mark in enumerate(pieces):
        text = " ".join(chance.sample(WORDS, chance.randint(1, 2) if is_mark else 1))
        form = marks[chance.choice("abi")] if is_mark else plain
        markup.append(form.format(text, text=text, number=number))
        words.append(text)
    return plain.format(" ").join(markup), " ".join(words)


def translated(name: str, content: str, translate=joining) -> str:
    suffix, part, document, *_ = FORMATS[name]
    text = document.format(content)
    if part is None:
        return translate_document(text.encode(), suffix, translate).decode()
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(part, text)
    result = io.BytesIO(translate_document(data.getvalue(), suffix, translate))
    return zipfile.ZipFile(result).read(part).decode()


def marks_of(name: str, document: str) -> Counter[tuple[str, str]]:
    """The marks with text of a document, as other libraries read it. A run of Word may be divided."""
    if name == "markdown":
        document = pytest.importorskip("markdown_it").MarkdownIt("commonmark").render(document)
    is_xml = name in ("odt", "docx")
    root = (
        etree.fromstring(document.encode()) if is_xml else html.fromstring(f"<div>{document}</div>")
    )
    found = Counter[tuple[str, str]]()
    for element in root.iter(
        "{*}a", "{*}b", "{*}i", "{*}em", "{*}strong", "{*}span", "{*}hyperlink"
    ):
        holder = (
            element.getparent().getparent()
            if name == "docx" and element.tag[-2:] in ("}b", "}i")
            else element
        )
        if "".join(holder.itertext()).strip():
            found[etree.QName(element).localname, str(sorted(element.attrib.values()))] += 1
    return Counter(set(found)) if name == "docx" else found


@pytest.mark.parametrize("name", FORMATS)
def test_marks_of_joined_words_keep_their_text(name: str) -> None:
    _, _, document, plain, marks = FORMATS[name]
    chance = random.Random(66)
    for _ in range(SENTENCES):
        content, text = sentence(chance, plain, marks)
        result = translated(name, content)
        assert marks_of(name, result) == marks_of(name, document.format(content)), content
        if name != "markdown":
            (parts,) = joining([text])
            assert re.sub("<[^>]*>", "", result).strip() == parts[0].target


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # different marks enclose the word together, and those of one kind share its letters
        ("two <b>hundred</b> and <a>four</a>", "<b><a>TWOHUNDREDANDFOUR</a></b>"),
        (
            "<a href=1>two</a> <b>six</b> <a href=2>ten</a>",
            "<a href=1><b>TWOS</b></a><a href=2>IXTEN</a>",
        ),
        ("<b><i>one</i> two</b> <b>six</b>", "<b><i>ONET</i></b><b>WOSIX</b>"),
    ],
)
def test_marks_of_one_word_are_joined(source: str, expected: str) -> None:
    def one_word(texts):
        links = [[(word, 0) for word in range(len(text.split()))] for text in texts]
        return [
            [TranslatedPart(text, text.upper().replace(" ", ""), pairs)]
            for text, pairs in zip(texts, links, strict=True)
        ]

    assert translate_pieces(split_html(source), one_word) == expected
    assert translated("html", source, one_word) == f"<p>{expected}</p>"


@pytest.mark.parametrize(
    "source", ["<b>two</b> six", "two <b>six</b>", "two <b>six</b> ten", "two six <b>ten</b>."]
)
@pytest.mark.parametrize("target", ["!", "...", "?! ..."])
def test_mark_encloses_a_sign_of_a_translation_without_words(source: str, target: str) -> None:
    def signs(texts):
        return [[TranslatedPart(text, target, [])] for text in texts]

    paragraph = html.fragment_fromstring(f"<p>{translate_pieces(split_html(source), signs)}</p>")
    (mark,) = paragraph
    assert paragraph.text_content() == target
    assert mark.text_content().strip()


@pytest.mark.parametrize(
    ("source", "links"),
    [
        ("<b>two six</b> <img> ten", [(0, 0), (1, 2), (2, 1)]),
        ("ten <img> <b>two six</b>", [(0, 1), (1, 0), (2, 2)]),
        ("<i>one</i> <b>two six</b> <img> ten", [(0, 0), (1, 1), (2, 3), (3, 2)]),
        ("ten <img> <b>two six</b> <i>one</i>", [(0, 1), (1, 0), (2, 2), (3, 3)]),
    ],
)
def test_mark_does_not_end_at_an_image_outside_it(
    source: str, links: list[tuple[int, int]]
) -> None:
    """The word after or before the image is placed between the words of the mark."""
    words = [""] * len(links)
    for word, place in links:
        words[place] = html.fragment_fromstring(f"<p>{source}</p>").text_content().split()[word]

    def placed(texts):
        return [[TranslatedPart(text, " ".join(words), links)] for text in texts]

    paragraph = html.fragment_fromstring(f"<p>{translate_pieces(split_html(source), placed)}</p>")
    assert [mark.tag for mark in paragraph] == re.findall(r"<(\w+)", source)
    assert paragraph.find("b").text_content() == "two ten six"


def test_marks_that_find_no_letter_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def letter(texts):
        return [[TranslatedPart(text, "Z", [(0, 0)])] for text in texts]

    marks = "".join(f"<b>x{number}</b> " for number in range(12))
    for name, empty in (
        ("html", marks),
        ("markdown", "".join(f"*x{number}* " for number in range(12))),
    ):
        caplog.clear()
        result = translated(name, empty, letter)
        shown = sum(marks_of(name, result).values())
        assert f"{12 - shown} links or emphases" in caplog.text
        assert 1 <= shown < 12
