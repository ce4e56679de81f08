"""Tags, placeholders and alignments of every script: a copy gives back the document, and moved words take theirs."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.documents.html_text import split_html
from hf_vanilla_transformer.documents.markdown_text import split_markdown
from hf_vanilla_transformer.documents.passages import passages_of, translate_pieces
from hf_vanilla_transformer.inference import alignment
from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.inference.protected import protect
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.words import words
from tests.engine.model_changes import aligning_model

pytestmark = pytest.mark.usefixtures("dictionaries")

#: Words, what stands between them, and a full stop.
LANGUAGES = {
    "zh": ("我们 喜欢 学习 语言 今天 天气 很 好 北京 大学", "", "。"),
    "ja": ("日本語 を 勉強 する 東京 の 大学 です カタカナ 人", "", "。"),
    "ko": ("한국어 문장 을 공부 합니다 서울 대학교", " ", "."),
    "th": ("ภาษา ไทย สวยงาม คน กิน ข้าว ที่ บ้าน", "", ""),
    "km": ("ខ្ញុំ ស្រឡាញ់ ភាសា ខ្មែរ", "", "។"),
    "my": ("မြန်မာ စာ ကျောင်း", "", "။"),
    "ar": ("مرحبا بالعالم اللُّغَة العربية جميلة جدا،", " ", "؟"),
    "fa": ("می‌خواهم کتاب‌ها فارسی زبان", " ", "."),
    "he": ("שלום עולם בֵּית־סֵפֶר עברית יפה", " ", "!"),
    "hi": ("नमस्ते दुनिया हिन्दी भाषा सुंदर है", " ", "।"),
}
HTML = [
    ("<b>", "</b>"),
    ('<a href="x?a=1&amp;b">', "</a>"),
    ("<i><u>", "</u></i>"),
    ("<img src=1>", ""),
]
MARKDOWN = [
    ("**", "**"),
    ("*", "*"),
    ("[", "](http://x.y/a_(b))"),
    ("`", "`"),
]
Kinds = list[tuple[str, str]]
STOPS = "。،؟.!\u0964\u17d4\u104b"
SPANS = ["{name}", "%s", "https://example.com/a?b=c", "<x/>", "🙂", "12:30"]


def cases(kinds: Kinds, count: int = 10) -> Iterator[tuple[str, str]]:
    """Sentences of each language with elements of these kinds around random words, and the text without them."""
    for language, (vocabulary, space, stop) in LANGUAGES.items():
        draw = random.Random(language)
        for _ in range(count):
            chosen = draw.choices(vocabulary.split(), k=draw.randrange(3, 9))
            start = draw.randrange(len(chosen))
            end = draw.randrange(start + 1, len(chosen) + 1)
            opening, closing = draw.choice(kinds)
            marked = opening + space.join(chosen[start:end]) + closing
            parts = [*chosen[:start], marked, *chosen[end:]]
            yield space.join(parts) + stop, space.join(chosen) + stop


def with_itself(text: str) -> list[tuple[int, int]]:
    """A link of each word."""
    return [(i, i) for i in range(len(words(text)))]


def copied(texts: list[str]) -> list[list[TranslatedPart]]:
    return [[TranslatedPart(text, text, with_itself(text))] for text in texts]


@pytest.mark.parametrize(
    ("kinds", "split"),
    [
        (HTML, split_html),
        (MARKDOWN, split_markdown),
    ],
    ids=["html", "markdown"],
)
def test_copies_of_marked_documents_are_the_documents(kinds: Kinds, split: Any) -> None:
    for document, text in cases(kinds):
        pieces = split(document)
        assert translate_pieces(pieces, copied) == document
        passages = passages_of([pieces])
        assert kinds is MARKDOWN or "".join(one.text for one in passages) == text


@pytest.mark.parametrize("span", SPANS)
def test_copies_of_sentences_with_spans_are_the_sentences(span: str) -> None:
    for sentence, _ in cases([(span, "")], 5):
        protected = protect(sentence)
        text = protected.text
        assert protected.restore(text, None)[0] == sentence
        restored, links = protected.restore(text, with_itself(text))
        assert restored == sentence
        assert links == with_itself(sentence)


def test_elements_move_with_their_words() -> None:
    """Words in the opposite order: the element encloses the translations of its words, and only these."""
    for document, text in cases(HTML[:2]):
        spans = words(text)
        turned = spans[::-1]
        translation = " ".join(text[start:end] for start, end in turned)
        links = [(i, len(spans) - 1 - i) for i in range(len(spans))]
        part = TranslatedPart(text, translation, links)
        moved = translate_pieces(split_html(document), lambda _, part=part: [[part]])
        start = document.index("<")
        end = start + len(inside_of(document))
        expected = [text[max(first, start) : min(last, end)] for first, last in turned]
        assert without_stops(inside_of(moved).split()) == without_stops(expected)


def without_stops(words: list[str]) -> list[str]:
    stripped = (word.strip(STOPS) for word in words)
    return [word for word in stripped if word]


def inside_of(document: str) -> str:
    """The content of its first element."""
    return document[document.index(">") + 1 : document.rindex("</")]


def test_links_of_a_copy_are_each_word_with_itself(monkeypatch) -> None:
    sentences = [text for _, text in cases(HTML, 3)]
    tokenizer = train_tokenizer(sentences * 3, 400)
    model = aligning_model(tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in sentences]
    copied = torch.eye(max(map(len, ids)))
    links_of = alignment._links
    monkeypatch.setattr(alignment, "_links", lambda _, *ranges: links_of(copied, *ranges))
    links = alignment.align(model, tokenizer, tokenizer, ids, ids, words=words)
    for text, tokens, pairs in zip(sentences, ids, links, strict=True):
        of_source, of_target = (set(side) for side in zip(*pairs, strict=True))
        assert of_source == of_target == set(range(len(words(text))))
        ranges = alignment.word_ranges(
            tokenizer, tokens, words=words
        )  # a token of several words links them all
        for i, j in pairs:
            assert i == j or any(i in found and j in found for found in ranges)
