"""Documents are split into sentences and layout, and keep the layout in translation."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.documents.documents import (
    Part,
    SentenceCutter,
    join_text,
    sentence_splitter,
    sentences_of,
    split_text,
    translate_documents,
)
from hf_vanilla_transformer.inference.protected import has_words, protect
from hf_vanilla_transformer.utils.errors import UserError
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
    "Dr. Smith came at 3 p.m. to the house.",
    "He left!",
    "First item.",
    "It has two sentences.",
    "second item",
    "deep",
    "A heading",
    "quoted text.",
    "More of it.",
    "last line without a period",
]


def test_text_is_split_into_sentences_and_layout() -> None:
    parts = split_text(TEXT, sentence_splitter("en"))
    assert sentences_of(parts) == SENTENCES
    assert "".join(part.text for part in parts) == TEXT
    assert join_text(parts, [sentence.upper() for sentence in SENTENCES]) == "".join(
        part.text.upper() if part.is_sentence else part.text for part in parts
    )


CHARACTERS = st.sampled_from(" \t\n\r.!?-*1)(aBé。 \u00a0\u2028日\x00\ufeff{}%@/")
PLACEHOLDERS = [
    "{name}",
    "%1$s",
    "https://example.com/a",
    "ann@example.org",
    "<x/>",
    "&nbsp;",
    "12:30",
]
PIECES = st.sampled_from(
    [
        "seven dogs. ",
        "Größe ",
        "ابت ",
        "日本語。",
        "नमस्ते ",
        "\n\n",
        "\t",
        "\u2028",
        "- ",
        "1. ",
        "---",
        "```",
        "😀",
        "42 ",
    ]
    + ["| ", "``", "\u200b", "\r\n", *(f"{placeholder} " for placeholder in PLACEHOLDERS)]
)


def check_layout(text: str) -> None:
    """The parts are the text, sentences have letters, and no placeholder is lost on the way to the model and back."""
    parts = split_text(text, sentence_splitter("en"))
    assert "".join(part.text for part in parts) == text
    assert all(
        part.text.strip() == part.text and has_words(part.text)
        for part in parts
        if part.is_sentence
    )
    for language in ("en", "de", "zh"):
        parts = split_text(text, sentence_splitter(language), language)
        assert join_text(parts, sentences_of(parts), language, language) == text
    for sentence in sentences_of(parts):
        if protected := protect(sentence):
            assert any(c.isalpha() for c in protected.text)
            restored, _ = protected.restore(protected.text.swapcase(), None)
            for placeholder in PLACEHOLDERS:
                assert restored.count(placeholder) == sentence.count(placeholder)


@given(st.one_of(st.text(CHARACTERS, max_size=80), st.lists(PIECES, max_size=12).map("".join)))
@example(")B\xa0\t\t\xa0\t\u2028B\xa0日 \r)!\rB\u2028.\u2028* \u2028(")  # sentencex panics
def test_parts_of_any_text_are_the_text(text: str) -> None:
    check_layout(text)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_parts_of_5_000_texts_are_the_text(text: str) -> None:
    check_layout(text)


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        ("de", "Am 3. Mai kam er z. B. an. Dann ging er.", 2),
        ("zh", "你好。我很好！再见", 3),
        (None, "One. Two.", 2),
    ],
)
def test_languages_have_their_own_rules(language: str | None, text: str, count: int) -> None:
    assert len(sentences_of(split_text(text, sentence_splitter(language)))) == count


WORDLESS = """
... --- ``` |---|---| 12:30 6171-1231-1311-1231 😀 https://example.com/a?b=c www.example.org ann@example.org
--ann@example.org {name} %1$s %(name)s <x/> &nbsp; `code` ½ ² Ⅳ
"""


@pytest.mark.parametrize(
    "text",
    [
        *WORDLESS.split(),
        "* * *",
        "🌷🌷 🌷",
        "\u200b",
        "42 %",
        "{{ count }}",
        "{a} - %s, 3.5",
        "§ 3",
        "№ 5",
    ],
)
def test_text_without_words_is_layout(text: str) -> None:
    split = sentence_splitter("en")
    assert sentences_of(split_text(text, split)) == []
    assert sentences_of(split_text(f"One.\n{text}\nTwo.", split)) == ["One.", "Two."]


def test_words_next_to_what_is_not_translated_are_sentences() -> None:
    split = sentence_splitter("en")
    for text in ("See https://example.com.", "{name} left.", "50 dogs", "é", "日本", "3rd"):
        assert sentences_of(split_text(text, split)) == [text]


@pytest.mark.parametrize(
    "separator",
    ["\t", "\r", "\r\n", "\u2028", "\u2029", "\x85", "\v", "\f", "\ufeff", "\t\t", " \t "],
)
def test_line_and_cell_ends_separate_sentences(separator: str) -> None:
    parts = split_text(f"seven{separator}eight", sentence_splitter("en"))
    assert sentences_of(parts) == ["seven", "eight"]
    assert join_text(parts, ["sieben", "acht"], "en", "de") == f"sieben{separator}acht"


def test_byte_order_mark_is_layout() -> None:
    assert split_text("\ufeffseven", sentence_splitter("en")) == [
        Part("\ufeff", False),
        Part("seven", True),
    ]


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        ("de", "3. Oktober ist Feiertag.", ["3. Oktober ist Feiertag."]),
        ("de-AT", "1. Mai 2020 war ein Freitag.", ["1. Mai 2020 war ein Freitag."]),
        ("cs", "  5. května", ["5. května"]),
        ("de", "Der 1. FC Köln spielt.", ["Der 1. FC Köln spielt."]),
        ("en", "1. First item", ["First item"]),
        ("de", "- a) Punkt", ["Punkt"]),
    ],
)
def test_ordinal_numbers_are_no_list_marks(language: str, text: str, sentences: list[str]) -> None:
    parts = split_text(text, sentence_splitter(language), language)
    assert sentences_of(parts) == sentences
    assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize(
    ("languages", "text", "joined"),
    [
        (("zh", "de"), "二百。十二！九。", "<0> <1> <2>"),
        (("zh-Hans", "en"), "二百。 十二！", "<0> <1>"),
        (("ja", "zh"), "二百。十二！", "<0><1>"),
        (("zh", "zh"), "二百。 十二！", "<0> <1>"),
        (("en", "zh_CN"), "One. Two.", "<0><1>"),
        (("en", "ja"), "One.\n Two.", "<0>\n <1>"),
        (("en", "de"), "One.  Two.", "<0>  <1>"),
        ((None, None), "One. Two.", "<0> <1>"),
    ],
)
def test_sentences_are_joined_as_the_target_language_writes_them(languages, text, joined):
    parts = split_text(text, sentence_splitter(languages[0]), languages[0])
    assert (
        join_text(parts, [f"<{i}>" for i in range(len(sentences_of(parts)))], *languages) == joined
    )


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Say {{ 'a. B' }} now. Go on.", ["Say {{ 'a. B' }} now.", "Go on."]),
        ("See https://a.b/x?Hello for it. Go.", ["See https://a.b/x?Hello for it.", "Go."]),
        ('Press <a title="Stop! Go">here</a> now.', ['Press <a title="Stop! Go">here</a> now.']),
        ("Long 5` here. Short 6` there.", ["Long 5` here.", "Short 6` there."]),
        ("one<br>two<BR />three", ["one", "two", "three"]),
        ("<p>One <b>a</b>.</p><p class='x'>Two</p>", ["One <b>a</b>.", "Two"]),
        ("● one\n☐ two\n→ three", ["one", "two", "three"]),
    ],
)
def test_sentences_end_at_breaks_and_not_within_placeholders(
    text: str, sentences: list[str]
) -> None:
    parts = split_text(text, sentence_splitter("en"), "en")
    assert [part.text for part in parts if part.is_sentence] == sentences
    assert "".join(part.text for part in parts) == text


def test_many_ordinals_are_joined_in_linear_time() -> None:
    text = "am 1. " * 30_000  # minutes, if the time were quadratic
    assert "".join(part.text for part in split_text(text, sentence_splitter("de"), "de")) == text


def test_lines_that_only_look_like_marks_are_sentences() -> None:
    split = sentence_splitter("en")
    assert split_text("-5 degrees", split) == [Part("-5 degrees", True)]
    assert split_text("#1st dog", split) == [Part("#1st dog", True)]
    assert split_text("A. Smith", split) == [Part("A. Smith", True)]


def test_documents_keep_their_layout(caplog: pytest.LogCaptureFixture) -> None:
    translator = echo_translator()
    lines = TEXT.replace("\r", "").split("\n")
    found = list(translate_documents(translator, lines, "en", num_beams=1))
    expected = [
        join_text(parts, translator.translate(sentences_of(parts), num_beams=1))
        for parts in map(_split, lines)
    ]
    assert found == expected and found != lines
    assert [line == "" for line in found] == [line == "" for line in lines]
    assert found[2].startswith("  1. ") and found[4].startswith("\t* (a) ")
    assert not caplog.records


def _split(line: str) -> list[Part]:
    return split_text(line, sentence_splitter("en"))


def test_long_sentences_are_cut_and_named_with_their_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    translator = echo_translator()
    long = "seven " * 150 + "one, " + "seven " * 150 + "seven."
    tokens = len(translator.source_tokenizer(long)["input_ids"])
    lines = ["seven."] * 300 + [f"seven. {long}", "seven."]
    translations = list(
        translate_documents(translator, lines, "en", first_line=11, max_new_tokens=2)
    )
    (message,) = caplog.messages
    assert "line 311" in message and str(tokens) in message
    pieces = ["seven.", long[: long.index("one") + 4], long[long.index("one") + 5 :]]
    assert (
        translations[300] == " ".join(translator.translate(pieces, max_new_tokens=2))
        and len(translations) == 302
    )


def test_learned_positions_cut_sentences_and_errors_name_the_line_of_the_file() -> None:
    translator = echo_translator(position_encoding_type="learned", max_position_embeddings=24)
    lines = ["The house is big. It is red."] * 3
    assert len(list(translate_documents(translator, [*lines, "house " * 60], "en"))) == 4
    with pytest.raises(UserError, match="line 104"):
        list(translate_documents(translator, [*lines, "x" * 60], "en", first_line=101))


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        (
            "a house, seven two hundred; seven seven",
            7,
            ["a house, ", "seven two hundred; ", "seven seven"],
        ),
        ("seven seven seven seven", 4, ["seven seven ", "seven seven"]),
        ("seven seven", 10, ["seven seven"]),
        ("日本語日本語", 12, ["日本語", "日本語"]),
        ("日" + "x" * 60, 20, None),
    ],
)
def test_sentences_are_cut_at_clauses_or_words(
    text: str, limit: int, pieces: list[str] | None
) -> None:
    translator = echo_translator()
    translator.model.config.trained_source_length = limit
    cut = SentenceCutter(translator)
    assert "".join(cut(text)) == text and (pieces is None or cut(text) == pieces)
    parts = split_text(f"- {text} ", lambda line: [line], "en", cut)
    assert "".join(part.text for part in parts) == f"- {text} "
    assert sentences_of(parts) == [piece.strip() for piece in cut(text)]


def test_limit_is_that_of_training_then_of_the_tokenizer() -> None:
    translator = echo_translator()
    limits = [SentenceCutter(translator).limit]
    translator.source_tokenizer.model_max_length = 6
    limits.append(SentenceCutter(translator).limit)
    translator.model.config.trained_source_length = 300
    assert [*limits, SentenceCutter(translator).limit] == [256, 6, 300]


def test_arguments_are_checked_before_anything_is_read() -> None:
    def lines():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="batch_size"):
        translate_documents(echo_translator(), lines(), "en", batch_size=0)
