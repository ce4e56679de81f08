"""Documents are split into sentences and layout, and keep the layout in translation."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_vanilla_transformer.inference.documents import (
    Part,
    join_text,
    sentence_splitter,
    sentences_of,
    split_text,
    too_long,
    translate_documents,
)
from hf_vanilla_transformer.inference.translator import Translator
from tests.serving_helpers import echo_translator

pytest.importorskip("sentencex", reason="needs the extra `documents`")

TEXT = """Dr. Smith came at 3 p.m. to the house. He left!

  1. First item.  It has two sentences.
  - second item
\t* (a) deep

## A heading
> quoted text. More of it.\r
last line without a period"""

SENTENCES = [
    "Dr. Smith came at 3 p.m. to the house.", "He left!", "First item.", "It has two sentences.", "second item",
    "deep", "A heading", "quoted text.", "More of it.", "last line without a period",
]  # fmt: skip


def test_text_is_split_into_sentences_and_layout() -> None:
    parts = split_text(TEXT, sentence_splitter("en"))
    assert sentences_of(parts) == SENTENCES
    assert "".join(part.text for part in parts) == TEXT
    assert join_text(parts, [sentence.upper() for sentence in SENTENCES]) == "".join(
        part.text.upper() if part.is_sentence else part.text for part in parts
    )


@given(st.text(alphabet=st.sampled_from(" \t\n\r.!?-*1)(aBé。 \u00a0\u2028日\x00"), max_size=80))
@example(")B\xa0\t\t\xa0\t\u2028B\xa0日 \r)!\rB\u2028.\u2028* \u2028(")  # sentencex panics
def test_parts_of_any_text_are_the_text(text: str) -> None:
    parts = split_text(text, sentence_splitter("en"))
    assert "".join(part.text for part in parts) == text
    assert all(part.text.strip() == part.text for part in parts if part.is_sentence)


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [("de", "Am 3. Mai kam er z. B. an. Dann ging er.", 2), ("zh", "你好。我很好！再见", 3), (None, "One. Two.", 2)],
)
def test_languages_have_their_own_rules(language: str | None, text: str, count: int) -> None:
    assert len(sentences_of(split_text(text, sentence_splitter(language)))) == count


def test_lines_that_only_look_like_marks_are_sentences() -> None:
    split = sentence_splitter("en")
    assert split_text("-5 degrees", split) == [Part("-5 degrees", True)]
    assert split_text("#hashtag", split) == [Part("#hashtag", True)]
    assert split_text("A. Smith", split) == [Part("A. Smith", True)]


def test_documents_keep_their_layout(caplog: pytest.LogCaptureFixture) -> None:
    translator = echo_translator()
    lines = TEXT.replace("\r", "").split("\n")
    found = list(translate_documents(translator, lines, "en", num_beams=1))
    expected = [
        join_text(parts, translator.translate(sentences_of(parts), num_beams=1)) for parts in map(_split, lines)
    ]
    assert found == expected and found != lines
    assert [line == "" for line in found] == [line == "" for line in lines]
    assert found[2].startswith("  1. ") and found[4].startswith("\t* (a) ")
    assert not caplog.records


def _split(line: str) -> list[Part]:
    return split_text(line, sentence_splitter("en"))


def test_long_sentences_are_named_with_their_lines(caplog: pytest.LogCaptureFixture) -> None:
    translator = echo_translator()
    long = "seven " * 300 + "seven."
    tokens = len(translator.source_tokenizer(long)["input_ids"])
    lines = ["seven."] * 300 + [f"seven. {long}", "seven."]
    list(translate_documents(translator, lines, "en", first_line=11, max_new_tokens=2))
    assert caplog.messages == [f"line 311: a sentence of {tokens} tokens is longer than any in training"]


def test_limit_of_the_tokenizer_wins_over_the_default() -> None:
    tokenizer = echo_translator().source_tokenizer
    tokenizer.model_max_length = 6
    assert too_long(tokenizer, ["seven", "seven seven seven seven seven seven seven"]) == [8]


def test_arguments_are_checked_before_anything_is_read() -> None:
    def lines():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="batch_size"):
        translate_documents(echo_translator(), lines(), "en", batch_size=0)


def test_translator_of_the_tests_tells_sentences_apart() -> None:
    translator = echo_translator()
    assert isinstance(translator, Translator)
    assert len(set(translator.translate(SENTENCES, num_beams=1))) > 5
