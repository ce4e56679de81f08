"""Tags, placeholders and alignments of every script: a copy gives back the document, and moved words take theirs."""

import random
from collections.abc import Iterator

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
HTML = [("<b>", "</b>"), ('<a href="x?a=1&amp;b">', "</a>"), ("<i><u>", "</u></i>"), ("<img src=1>", "")]
MARKDOWN = [("**", "**"), ("*", "*"), ("[", "](http://x.y/a_(b))"), ("`", "`")]
STOPS = "。،؟.!\u0964\u17d4\u104b"
SPANS = ["{name}", "%s", "https://example.com/a?b=c", "<x/>", "🙂", "12:30"]


def cases(kinds: list[tuple[str, str]], count: int = 10) -> Iterator[tuple[str, str]]:
    """Sentences of each language with elements of these kinds around random words, and the text without them."""
    for language, (vocabulary, space, stop) in LANGUAGES.items():
        draw = random.Random(language)
        for _ in range(count):
            chosen = draw.choices(vocabulary.split(), k=draw.randrange(3, 9))
            start = draw.randrange(len(chosen))
            end = draw.randrange(start + 1, len(chosen) + 1)
            opening, closing = draw.choice(kinds)
            pieces = [space.join(part) for part in (chosen[:start], chosen[start:end], chosen[end:])]
            before, after = (space if start else ""), (space if end < len(chosen) else "")
            marked = f"{pieces[0]}{before}{opening}{pieces[1]}{closing}{after}{pieces[2]}{stop}"
            yield marked, space.join(chosen) + stop


def copied(texts: list[str]) -> list[list[TranslatedPart]]:
    return [[TranslatedPart(text, text, [(i, i) for i in range(len(words(text)))])] for text in texts]


def test_copies_of_marked_sentences_are_the_sentences() -> None:
    for kinds, split in ((HTML, split_html), (MARKDOWN, split_markdown)):
        for document, text in cases(kinds):
            pieces = split(document)
            assert translate_pieces(pieces, copied) == document
            assert kinds is MARKDOWN or "".join(one.text for one in passages_of([pieces])) == text
    for span in SPANS:
        for sentence, _ in cases([(span, "")], 5):
            protected = protect(sentence)
            assert protected.restore(protected.text, None)[0] == sentence
            restored, links = protected.restore(protected.text, [(i, i) for i in range(len(words(protected.text)))])
            assert restored == sentence and links == [(i, i) for i in range(len(words(sentence)))]


def test_elements_move_with_their_words() -> None:
    """Words in the opposite order: the element encloses the translations of its words, and only these."""
    for document, text in cases(HTML[:2]):
        spans = words(text)
        translation = " ".join(text[start:end] for start, end in spans[::-1])
        part = TranslatedPart(text, translation, [(i, len(spans) - 1 - i) for i in range(len(spans))])
        moved = translate_pieces(split_html(document), lambda _, part=part: [[part]])
        start, end = document.index("<"), document.rindex("</") - document.index(">") - 1 + document.index("<")
        expected = [text[max(first, start) : min(last, end)].strip(STOPS) for first, last in spans[::-1]]
        inside = [word.strip(STOPS) for word in moved[moved.index(">") + 1 : moved.rindex("</")].split()]
        assert inside == [word for word in expected if word]


def test_links_of_a_copy_are_each_word_with_itself(monkeypatch) -> None:
    sentences = [text for _, text in cases(HTML, 3)]
    tokenizer = train_tokenizer(sentences * 3, 400)
    model = aligning_model(tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in sentences]
    copied, links_of = torch.eye(max(map(len, ids))), alignment._links
    monkeypatch.setattr(alignment, "_links", lambda _, *ranges: links_of(copied, *ranges))
    links = alignment.align(model, tokenizer, tokenizer, ids, ids, words=words)
    for text, tokens, pairs in zip(sentences, ids, links, strict=True):
        assert {i for i, _ in pairs} == {j for _, j in pairs} == set(range(len(words(text))))
        ranges = alignment.word_ranges(tokenizer, tokens, words=words)  # a token of several words links them all
        assert all(i == j or any({i, j} <= set(found) for found in ranges) for i, j in pairs)
