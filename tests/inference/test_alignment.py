"""Word alignments agree with Marian's attention weights and with words counted by hand."""

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.alignment import align, word_ranges
from hf_vanilla_transformer.interop.marian import to_marian
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.engine.model_changes import aligning_model

PAIRS = [
    ("a small dog runs", "ein kleiner Hund läuft"),
    ("seven", "zwei  hundert 日本"),
    ("two hundred and one , quickly", "x"),
]
TEXTS = [text for pair in PAIRS for text in pair]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return aligning_model(tokenizer)


def words_by_hand(tokenizer, text):
    """The word of each token, from the tokenizer's character offsets. Spaces end words."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    numbers = []
    for token, (start, end) in zip(encoded.tokens(), encoded["offset_mapping"], strict=True):
        inside = [i for i in range(start, end) if not text[i].isspace()]
        if inside and token != "Ġ":
            before = text[: inside[0] + 1]
            numbers.append(len(before.split()) - 1)
        else:
            numbers.append(None)
    return encoded["input_ids"], numbers


@pytest.mark.parametrize("text", [*TEXTS, "  a  dog 🙂🙂 ", "é \t中 e\u0301"])
def test_word_numbers_follow_white_space(tokenizer, text):
    ids, numbers = words_by_hand(tokenizer, text)
    found = [words[-1] if words else None for words in word_ranges(tokenizer, ids)]
    assert found == numbers
    assert found[-1] is None  # the end of the sentence
    assert max(number for number in found if number is not None) == len(text.split()) - 1


def test_word_numbers_follow_ideographic_space(tokenizer):
    ids = tokenizer("日\u3000本")["input_ids"]
    ranges = [
        list(words) for words in word_ranges(tokenizer, ids)
    ]  # each character is three tokens
    assert ranges[1:4] == [[0]] * 3
    assert ranges[-4:] == [[1]] * 3 + [[]]


@pytest.mark.parametrize("layer", [None, 1, 3])
def test_links_equal_those_of_marians_attention(model, tokenizer, layer):
    ids = [tokenizer(list(side))["input_ids"] for side in zip(*PAIRS, strict=True)]
    implementation = model.config._attn_implementation
    found = align(model.train(), tokenizer, tokenizer, *ids, layer)
    assert model.training
    assert model.config._attn_implementation == implementation
    marian = to_marian(model.eval())
    marian.set_attn_implementation("eager")
    chosen = (layer or 2) - 1  # of three layers the last but one is the second
    all_links = set()
    for (source, target), source_ids, target_ids, links in zip(PAIRS, *ids, found, strict=True):
        with torch.no_grad():
            output = marian(
                input_ids=torch.tensor([source_ids]),
                decoder_input_ids=torch.tensor(
                    [[model.config.decoder_start_token_id, *target_ids[:-1]]]
                ),
                output_attentions=True,
            )
        weights = output.cross_attentions[chosen][0].double().mean(dim=0)  # (T, S)
        _, source_words = words_by_hand(tokenizer, source)
        _, target_words = words_by_hand(tokenizer, target)
        tokens_of_words = [i for i, number in enumerate(source_words) if number is not None]
        expected = set()
        for row, word in zip(weights.tolist(), target_words, strict=True):
            if word is not None:
                likeliest = max(tokens_of_words, key=lambda i, row=row: row[i])
                expected.add((source_words[likeliest], word))
        assert links == sorted(expected)
        all_links |= expected
    assert len({source for source, _ in all_links}) > 2  # otherwise the comparison proves nothing


def test_alignment_of_translations_covers_their_words(model, tokenizer):
    translator = Translator(model, tokenizer)
    lines = [source for source, _ in PAIRS] + [""]

    def translate(lines, **settings):
        return list(
            translator.translate_nbest(
                lines,
                2,
                num_beams=3,
                max_new_tokens=6,
                **settings,
            )
        )

    found = translate(lines, alignment=True)
    for line, hypotheses, plain in zip(lines, found, translate(lines), strict=True):
        assert [one.text for one in hypotheses] == [one.text for one in plain]
        (alone,) = translate([line], alignment=True)
        assert [one.alignment for one in hypotheses] == [one.alignment for one in alone]
        for one in hypotheses:
            sources = {source for source, _ in one.alignment}
            targets = {target for _, target in one.alignment}
            assert targets == set(range(len(one.text.split())))
            assert sources <= set(range(len(line.split())))
            assert one.pharaoh == " ".join(f"{source}-{target}" for source, target in one.alignment)
    assert found[-1][0].alignment == []


def test_model_of_another_package_is_refused(model, tokenizer):
    with pytest.raises(UserError, match="MarianMTModel"):
        Translator(to_marian(model), tokenizer).translate_nbest(["seven"], alignment=True)
