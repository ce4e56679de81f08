"""Keys of sentences are those of the words and signs that are compared, for ASCII and for other text."""

import random
import unicodedata

import pytest
import regex

from hf_vanilla_transformer.text.text_keys import sentence_key, stable_key

ASCII = [chr(number) for number in range(128)]
OTHERS = [*"äßéİΣσ日本\u2212\u00a0\u3000\u0301½€²", "ﬁ", " -", "-5", " \u22125", "\x1c-7"]


def expected(text: str) -> int:
    text = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")
    compared = regex.findall(r"[\w\p{M}]+|(?<!\S)-(?=\d)|[\p{Sm}\p{Sc}\p{So}#%&@]", text)
    return stable_key(" ".join(compared))


@pytest.mark.parametrize("parts", [ASCII, ASCII + OTHERS], ids=["ascii", "any"])
def test_keys_are_those_of_words_and_signs(parts: list[str]) -> None:
    draw = random.Random(1)
    texts = [*parts, *("".join(draw.choices(parts, k=draw.randint(0, 8))) for _ in range(20_000))]
    texts += [f"{first}-{second}1" for first in parts for second in ("", " ", "a")]
    assert [sentence_key(text) for text in texts] == [expected(text) for text in texts]
