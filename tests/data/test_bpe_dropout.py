"""BPE-dropout against `tokenizers` where that draws nothing, and against the paper's algorithm, worked out exactly."""

from collections import Counter
from functools import cache

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer.data import copy_with_bpe_dropout, train_tokenizer
from hf_vanilla_transformer.data.bpe_dropout import BpeDropout, dice

TEXTS = [
    "der Hund läuft über die Wiese",
    "die Hunde laufen",
    "ein  Läufer , der laufend läuft!",
    "über über",
    "日本語",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 4, vocab_size=330)


def test_without_dropout_it_is_the_tokenizer(tokenizer):
    encoder = BpeDropout(tokenizer)
    for text in TEXTS:
        assert encoder(text, 0.0, None) == tokenizer(text)["input_ids"][:-1]


def test_with_all_merges_left_out_it_is_the_tokenizer(tokenizer):
    """`tokenizers` with a dropout of 1 draws nothing either: every merge is left out."""
    encoder, backend = BpeDropout(tokenizer), copy_with_bpe_dropout(tokenizer, None).backend_tokenizer
    backend.model.dropout = 1.0
    for text in TEXTS:
        assert encoder(text, 1.0, dice(0)) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_segmentations_are_as_likely_as_in_the_paper(tokenizer, dropout):
    encoder = BpeDropout(tokenizer)
    word = "Ġlaufend"

    @cache
    def chances(pieces):
        """Algorithm 1, not drawn but summed over: the chance of each segmentation that can come of these pieces."""
        merges = [(encoder.rank[pair], i) for i, pair in enumerate(zip(pieces, pieces[1:], strict=False))
                  if pair in encoder.rank]  # fmt: skip
        found, left_out = Counter(), 1.0
        for _, i in sorted(merges):  # the best merge that stays is done
            merged = (*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :])
            for result, chance in chances(merged).items():
                found[result] += left_out * (1 - dropout) * chance
            left_out *= dropout
        found[pieces] += left_out
        return found

    expected = chances(tuple(word))
    assert sum(expected.values()) == pytest.approx(1) and len(expected) > 5
    draw, trials = dice(3), 6000
    seen = Counter(tuple(encoder.segment(word, dropout, draw)) for _ in range(trials))
    assert seen.keys() <= expected.keys()
    for result, chance in expected.items():
        deviation = (chance * (1 - chance) / trials) ** 0.5
        assert abs(seen[result] / trials - chance) <= 5 * deviation + 1e-4, result


def test_dice_depend_on_their_numbers_alone():
    first, again, other = dice(1, 2, 3), dice(1, 2, 3), dice(1, 23)
    numbers = [first() for _ in range(5)]
    assert [again() for _ in range(5)] == numbers != [other() for _ in range(5)]
    assert all(0 <= number < 1 for number in numbers)


def test_needs_merges():
    words = Tokenizer(models.WordLevel({"one": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="no byte-pair encoding"):
        BpeDropout(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))
