"""Augmentation: which pairs are perturbed and how often, drawn from seed, epoch and line alone."""

from collections import Counter

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer.batches import encode_pairs, with_augmentation
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.perturbations import PERTURBATIONS, parse_augment
from tests.model_helpers import error_of

ROWS = 200
SOURCES = [f"two dogs run over field {number} ." for number in range(ROWS)]
TARGETS = [f"zwei Hunde laufen über Feld {number} ." for number in range(ROWS)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*SOURCES, *TARGETS], vocab_size=400)


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return encode(SOURCES, TARGETS, tokenizer)


def encode(source, target, tokenizer):
    pairs, _ = encode_pairs(
        Dataset.from_dict({"source": source, "target": target}),
        tokenizer,
        drop_too_long=True,
    )
    return pairs


def texts_of(data, tokenizer, epoch):
    data.set_epoch(epoch)
    rows = [data[row] for row in range(len(data))]
    columns = []
    for side in ("input_ids", "labels"):
        assert all(row[side][-1] == tokenizer.eos_token_id for row in rows)
        columns.append(
            tokenizer.batch_decode([row[side] for row in rows], skip_special_tokens=True)
        )
    return list(zip(*columns, strict=True))


def kind_of(source, target, line):
    """Recognise a perturbation from the text alone."""
    if (source, target) == (SOURCES[line], TARGETS[line]):
        return None
    if source == target:
        return "copy"
    if source.isupper():
        return "upper"
    if source == SOURCES[line].title():
        return "title"
    if source.count("dogs") == 2 and target.count("Hunde") == 2:
        return "merge"
    if (source, target) == (SOURCES[line][:-2], TARGETS[line][:-2]):
        return "end_punctuation"
    return "typos" if target == TARGETS[line] else "noise"


def test_each_kind_has_its_probability(encoded, tokenizer):
    augment = {
        "upper": 0.1,
        "title": 0.1,
        "typos": 0.1,
        "end_punctuation": 0.1,
        "merge": 0.1,
        "copy": 0.05,
        "noise": 0.05,
    }
    data = with_augmentation(encoded, tokenizer, augment=augment, seed=3)
    counts = Counter()
    for epoch in range(12):
        counts.update(
            kind_of(*texts, line) for line, texts in enumerate(texts_of(data, tokenizer, epoch))
        )
    trials = 12 * ROWS
    for name, share in augment.items():
        deviation = (share * (1 - share) / trials) ** 0.5
        assert abs(counts[name] / trials - share) < 4 * deviation, (name, counts)


def test_choice_depends_on_seed_epoch_and_line_alone(encoded, tokenizer):
    augment = dict.fromkeys(PERTURBATIONS, 0.1)
    first, again, other = (
        with_augmentation(encoded, tokenizer, augment=augment, seed=seed) for seed in (1, 1, 2)
    )
    expected = [texts_of(first, tokenizer, epoch) for epoch in (0, 1)]
    assert [texts_of(again, tokenizer, epoch) for epoch in (1, 0)] == expected[::-1]
    assert texts_of(other, tokenizer, 0) != expected[0] != expected[1]
    lines = first.encoded.select([7, 8, 9])  # another share of the rows, as of a rank
    share = with_augmentation(lines, tokenizer, augment={"typos": 0.5}, seed=1)
    whole = with_augmentation(encoded, tokenizer, augment={"typos": 0.5}, seed=1)
    assert texts_of(share, tokenizer, 2) == texts_of(whole, tokenizer, 2)[7:10]


def test_changes_follow_each_other(encoded, tokenizer):
    augment = {"copy": 0.3, "merge": 0.2}
    plain = with_augmentation(encoded, tokenizer, augment=augment)
    both = with_augmentation(plain, tokenizer, augment={"upper": 1.0})
    upper = [(source.upper(), target.upper()) for source, target in texts_of(plain, tokenizer, 1)]
    assert texts_of(both, tokenizer, 1) == upper
    assert both.encoded is encoded
    merged = with_augmentation(plain, tokenizer, augment={"merge": 1.0})
    assert all(" . " in source for source, _ in texts_of(merged, tokenizer, 1))


def test_pairs_stay_within_the_limits(encoded, tokenizer):
    limits = max(map(len, encoded["input_ids"])), max(map(len, encoded["labels"]))
    data = with_augmentation(encoded, tokenizer, augment={"merge": 1.0}, limits=limits)
    assert texts_of(data, tokenizer, 0) == list(zip(SOURCES, TARGETS, strict=True))


def test_impossible_augmentation_is_refused():
    for item in ("upper", "upper=x", "upside=0.1", "upper=-0.1", "upper=2"):
        assert error_of(parse_augment, [item]).startswith("augment: ")
    assert "add up to" in error_of(parse_augment, ["upper=0.6", "title=0.6"])
    letters = Tokenizer(models.BPE({"o": 0, "n": 1, "<unk>": 2}, [], unk_token="<unk>"))
    poor = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>")
    pairs = encode(["one two", "three four"], ["eins", "zwei"], poor)
    assert error_of(with_augmentation, pairs, poor, augment={"upper": 0.1}).startswith("augment: ")


def test_capitals_are_those_of_the_language():
    texts = ["istanbul ilk"] * 20
    tokenizer = train_tokenizer([*texts, "İSTANBUL İLK", "ISTANBUL ILK"] * 3, vocab_size=300)
    pairs = encode(texts, texts, tokenizer)
    data = with_augmentation(pairs, tokenizer, augment={"upper": 1.0}, languages=[("tr", "en")])
    assert set(texts_of(data, tokenizer, 0)) == {("İSTANBUL İLK", "ISTANBUL ILK")}
