"""Words are those that dictionaries list, in every script, and every character belongs to at most one."""

import random

import pytest

from hf_vanilla_transformer.evaluation.comparison import length_labels
from hf_vanilla_transformer.text.words import break_points, white_space_words, words

#: Sentences with the words that dictionaries of the languages list.
SENTENCES = {
    "zh": "我们 喜欢 学习 语言 ，",
    "ja": "日本語 を 勉強 する 。",
    "th": "ภาษา ไทย สวยงาม",
    "km": "ខ្ញុំ ស្រឡាញ់",
    "lo": "ພາສາ ລາວ",
    "my": "မြန်မာ စာ",
}
SPACED = [
    "Größe, don't – x",
    "שלום, עולם!",
    "مرحبا بالعالم؟",
    "नमस्ते दुनिया।",
    "한국어 문장.",
    "",
    " \n",
    "می‌خواهم",
]


@pytest.mark.parametrize("language", SENTENCES)
def test_words_without_spaces_are_those_of_a_dictionary(language: str, dictionaries: bool) -> None:
    expected = SENTENCES[language].split()
    assert length_labels(["".join(expected)] * dictionaries) == length_labels(
        [" ".join(expected)] * dictionaries
    )
    middle = expected if dictionaries else list("".join(expected))
    for before, after in ("", ""), ("(Python3 ", " ok) "), ("(a", " b"), ("한", "\u200b 한"):
        text = before + "".join(expected) + after
        split = [
            piece for each in (before, *middle, after) for piece in each.strip("\u200b").split()
        ]
        assert [text[start:end].strip("\u200b") for start, end in words(text)] == split


@pytest.mark.parametrize("text", SPACED)
def test_words_with_spaces_end_at_white_space(text: str, dictionaries: bool) -> None:
    assert words(text) == white_space_words(text)
    assert [text[start:end] for start, end in words(text)] == text.split()


def test_words_cover_random_text_once(dictionaries: bool) -> None:
    draw = random.Random(1)
    letters = (
        "".join(SENTENCES.values()) + "aé\u0301 \n\u3000\u200b，「」🙂\ud800한ﾊﾞ葛\U000e0101བོད་"
    )
    for _ in range(300):
        text = "".join(draw.choices(letters, k=draw.randrange(30)))
        spans = words(text)
        covered = [position for start, end in spans for position in range(start, end)]
        assert covered == [i for i, letter in enumerate(text) if letter.strip()]
        assert spans == words(text) and all(start < end for start, end in spans)
        assert set(break_points(text)) <= {start for start, _ in spans}


def test_pieces_start_at_words_and_not_at_their_punctuation(dictionaries: bool) -> None:
    text = "我们，喜欢。 ok, go"
    starts = [text[start:] for start in break_points(text)]
    assert "喜欢。 ok, go" in starts and "go" in starts and "，喜欢。 ok, go" not in starts
    assert ("欢。 ok, go" in starts) is not dictionaries
