"""What the page shows of one sentence, from the model itself: its limits, roundings, prefixes and texts of tokens."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.serving.engine import QueueFull
from hf_vanilla_transformer.serving.inspection import Inspector, _TokenTexts
from hf_vanilla_transformer.serving.schemas import PageRequest
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from tests.model_helpers import error_of, randomise, save_model_of_languages, tiny_model


@pytest.fixture(scope="module")
def translator() -> Translator:
    """A model of 3 letters. A text has one token more than letters."""
    tokenizer = train_symbol_tokenizer([("abc", 1)], "chars")
    model = randomise(tiny_model(vocab_size=len(tokenizer)))
    model.generation_config.max_new_tokens = 4
    return Translator(model, tokenizer)


@pytest.fixture(scope="module")
def inspector(translator: Translator) -> Any:
    inspector = Inspector(translator)
    yield inspector
    inspector.close()


def picture_of(
    inspector: Inspector,
    translator: Translator,
    text: str,
    beams: int = 2,
    **fields: Any,
) -> dict:
    return inspector.picture(translator, text, beams, PageRequest(text=text, **fields))


def decimals(numbers: Any) -> int:
    """The most digits after the point, of numbers in lists and dicts."""
    if isinstance(numbers, dict):
        return max(map(decimals, numbers.values()))
    if isinstance(numbers, list):
        return max(map(decimals, numbers))
    return len(f"{numbers:.9f}".rstrip("0").partition(".")[2])


def test_numbers_are_rounded(inspector: Inspector, translator: Translator) -> None:
    found = picture_of(inspector, translator, "abcab", inside=True)
    offered = [one["probability"] for choices in found["alternatives"] for one in choices]
    assert decimals(found["probabilities"]) == decimals(offered) == 4
    assert decimals(found["attention"]) == 3
    for layer in found["attention"]:
        for head in layer:
            assert [sum(row) for row in head] == pytest.approx([1] * len(found["tokens"]), abs=0.01)
    assert decimals(found["inside"]) == 6


def test_alternatives_are_at_most_fifty_or_the_vocabulary(
    inspector: Inspector, translator: Translator
) -> None:
    size = translator.model.config.target_vocab_size
    for asked, expected in ((1, 1), (3, 3), (1000, size)):
        found = picture_of(inspector, translator, "ab", alternatives=asked)
        assert {len(choices) for choices in found["alternatives"]} == {expected}
    assert size < 50
    tokenizer = train_symbol_tokenizer(
        [(chr(letter), 1) for letter in range(0x4E00, 0x4E40)], "chars"
    )
    large = Translator(randomise(tiny_model(vocab_size=len(tokenizer))), tokenizer)
    other = Inspector(large)
    choices = picture_of(other, large, "一", alternatives=1000)["alternatives"]
    other.close()
    assert {len(each) for each in choices} == {50}
    probabilities = [one["probability"] for one in choices[0]]
    assert probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize(
    ("letters", "has_inside", "has_tokens"),
    [(63, True, True), (64, False, True), (127, False, True)],
)
def test_long_sources_have_no_inside(
    inspector: Inspector,
    translator: Translator,
    letters: int,
    has_inside: bool,
    has_tokens: bool,
) -> None:
    found = picture_of(inspector, translator, "a" * letters, inside=True)
    assert len(found["source"]) == letters + 1
    assert ("inside" in found) == has_inside
    assert bool(found["tokens"]) == has_tokens


def test_longer_sources_are_a_note(inspector: Inspector, translator: Translator) -> None:
    found = picture_of(inspector, translator, "a" * 128, inside=True)
    note = "This source has 129 tokens. Only sources of up to 128 are shown in detail."
    names = (
        "source",
        "tokens",
        "probabilities",
        "attention",
        "alternatives",
        "hypotheses",
    )
    assert found == {"text": "", **{name: [] for name in names}, "note": note}
    assert picture_of(inspector, translator, "") == {
        "text": "",
        **{name: [] for name in names},
    }


def test_prefixes_have_ids_of_the_vocabulary(inspector: Inspector, translator: Translator) -> None:
    size = translator.model.config.target_vocab_size
    letter = size - 1
    for prefix in ([0], [letter], [letter] * 128):
        found = picture_of(inspector, translator, "ab", prefix=prefix)
        assert [token["id"] for token in found["tokens"]][: len(prefix)] == prefix
    message = f"prefix: must be at most 128 token ids from 0 to {size - 1}"
    for prefix in ([-1], [size], [letter, size], [letter] * 129):
        assert error_of(picture_of, inspector, translator, "ab", prefix=prefix) == message


def test_an_end_in_the_prefix_leaves_one_hypothesis(
    inspector: Inspector, translator: Translator
) -> None:
    (end,) = translator.end_tokens
    letter = translator.model.config.target_vocab_size - 1
    found = picture_of(inspector, translator, "ab", prefix=[letter, end])
    assert [(one["tokens"], one["score"]) for one in found["hypotheses"]] == [([letter, end], None)]
    assert len(picture_of(inspector, translator, "ab", prefix=[end, letter])["hypotheses"]) == 2


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_hypotheses_are_those_of_the_translator(
    inspector: Inspector, translator: Translator, beams: int
) -> None:
    found = picture_of(inspector, translator, "abc", beams)
    (expected,) = translator.translate_nbest(["abc"], beams, num_beams=beams)
    assert [one["text"] for one in found["hypotheses"]] == [one.text for one in expected]
    scores = [one["score"] for one in found["hypotheses"]]
    assert scores == [one.score and pytest.approx(one.score, abs=1e-4) for one in expected]


def test_the_mark_of_the_direction_comes_first_once(tmp_path: Path) -> None:
    folder = save_model_of_languages(tmp_path, False, tie_word_embeddings=False)
    translator = Translator.from_pretrained(folder).directed("en", "de")
    (mark,) = translator.directions.prefix(("en", "de"))
    (other_mark,) = translator.directions.prefix(("en", "fr"))
    inspector = Inspector(translator)
    for prefix, expected in (
        ([], [mark]),
        ([mark], [mark]),
        ([20], [mark, 20]),
        ([mark, 20, 21], [mark, 20, 21]),
        ([20, mark], [mark, 20, mark]),
        ([20, 21, mark], [mark, 20, 21, mark]),
        ([other_mark, 20], [other_mark, 20]),
    ):
        found = picture_of(inspector, translator, "seven", prefix=prefix)
        tokens = [token["id"] for token in found["tokens"]]
        assert tokens[: len(expected)] == expected
        decoded = inspector.target_tokenizer.decode(tokens[1:], skip_special_tokens=True)
        assert found["text"] == decoded
        if not prefix:
            assert mark not in tokens[1:]
    inspector.close()


def test_calls_wait_for_each_other_up_to_a_number(
    translator: Translator,
) -> None:
    go_on = threading.Event()
    started = []

    def call(number: int) -> int:
        started.append(number)
        go_on.wait(10)
        return number

    async def run() -> None:
        inspector = Inspector(translator)
        calls = [asyncio.ensure_future(inspector.run(call, number)) for number in range(32)]
        while not started:
            await asyncio.sleep(0.01)
        time.sleep(0.05)
        assert started == [0], "one at a time"
        assert inspector.pending == 32
        with pytest.raises(QueueFull):
            await inspector.run(call, 32)
        go_on.set()
        assert await asyncio.gather(*calls) == list(range(32))
        assert inspector.pending == 0
        inspector.close()

    asyncio.run(run())


class Letters:
    """A tokenizer whose ids are those of characters. Id 0 is special, and white space at the ends is stripped."""

    all_special_ids = [0]
    name_or_path = ""
    init_kwargs: dict = {}

    def __init__(self) -> None:
        self.decoded: list[list[int]] = []

    def convert_ids_to_tokens(self, token: int) -> str:
        return {0: "</s>", ord(" "): "▁"}.get(token, chr(token))

    def decode(self, ids: list[int], **_: Any) -> str:
        self.decoded.append(ids)
        return "".join(map(chr, ids)).strip()


def test_texts_of_tokens_are_what_they_add() -> None:
    tokenizer = Letters()
    texts = _TokenTexts(tokenizer, "target")  # type: ignore[arg-type]
    a, b, c, d, e, f = map(ord, "abcdef")
    assert texts.of([a, b, 0]) == [
        {"id": a, "text": "a"},
        {"id": b, "text": "b"},
        {"id": 0, "text": "</s>"},
    ]
    tokenizer.decoded.clear()
    assert texts.after([a, b, c, d, e], f) == {"id": f, "text": "f"}
    assert tokenizer.decoded == [[b, c, d, e], [b, c, d, e, f]], "four bytes are a character"
    tokenizer.decoded.clear()
    assert texts.after([a, 0], b) == {"id": b, "text": "b"}
    assert tokenizer.decoded == [[a], [a, b]], "special tokens are no text"
    assert texts.after([a], ord(" ")) == {"id": ord(" "), "text": " "}
    assert texts.after([a], 0xFFFD) == {"id": 0xFFFD, "text": ""}, "a part of a character"
    assert texts.after([0xFFFD], b) == {"id": b, "text": "\ufffdb"}
    tokenizer.decoded.clear()
    assert texts.of([a])[0]["text"] == "a"
    assert tokenizer.decoded == [[a]], "nothing is decoded before the first"
