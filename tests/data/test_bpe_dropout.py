"""BPE-dropout against `tokenizers` at dropout 0 and 1, and against the exact distribution of the paper's algorithm."""

import copy
from collections import Counter
from functools import cache

import pytest

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.data.bpe_dropout import BpeDropout, seeded_random
from tests.model_helpers import word_tokenizer

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


def test_dropout_0_equals_the_tokenizer(tokenizer):
    encoder = BpeDropout(tokenizer)
    for text in TEXTS:
        assert encoder(text, 0.0, None) == tokenizer(text)["input_ids"][:-1]


def test_dropout_1_equals_the_tokenizer(tokenizer):
    """A dropout of 1 leaves out every merge: `tokenizers` is deterministic too."""
    encoder, backend = BpeDropout(tokenizer), copy.deepcopy(tokenizer).backend_tokenizer
    backend.model.dropout = 1.0
    for text in TEXTS:
        assert encoder(text, 1.0, seeded_random(0)) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_segmentations_have_the_probabilities_of_the_paper(tokenizer, dropout):
    encoder = BpeDropout(tokenizer)
    word = "Ġlaufend"

    @cache
    def probabilities(tokens):
        """Algorithm 1 without sampling: the exact probability of each segmentation of these tokens."""
        merges = [(encoder.rank[pair], i) for i, pair in enumerate(zip(tokens, tokens[1:], strict=False))
                  if pair in encoder.rank]  # fmt: skip
        found, left_out = Counter(), 1.0
        for _, i in sorted(merges):  # the best merge that is not left out is applied
            merged = (*tokens[:i], tokens[i] + tokens[i + 1], *tokens[i + 2 :])
            for result, probability in probabilities(merged).items():
                found[result] += left_out * (1 - dropout) * probability
            left_out *= dropout
        found[tokens] += left_out
        return found

    expected = probabilities(tuple(word))
    assert sum(expected.values()) == pytest.approx(1) and len(expected) > 5
    draw, trials = seeded_random(3), 6000
    counts = Counter(tuple(encoder.segment(word, dropout, draw)) for _ in range(trials))
    assert counts.keys() <= expected.keys()
    for result, probability in expected.items():
        deviation = (probability * (1 - probability) / trials) ** 0.5
        assert abs(counts[result] / trials - probability) <= 5 * deviation + 1e-4, result


def test_tokenizer_without_merges_is_refused():
    with pytest.raises(ValueError, match="bpe_dropout|byte-pair"):
        BpeDropout(word_tokenizer(["one", "<unk>"]))
