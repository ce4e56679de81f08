"""Rewriting of training pairs: anew in every epoch, the same in every process, and nothing lost."""

from random import Random

import pytest
from datasets import Dataset

from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.batches.rewriting import with_rewriting
from hf_vanilla_transformer.text.symbol_tokenizers import train_any_tokenizer
from hf_vanilla_transformer.utils.errors import UserError

SIZES = [2 + number % 5 for number in range(40)]
PAIRS = [(" ".join("abcdef"[:size]), " ".join("xyzuvw"[:size])) for size in SIZES]


def both_together(source: str, target: str, draw: Random) -> tuple[str, str]:
    """The same order for source and target."""
    words = list(zip(source.split(), target.split(), strict=True))
    draw.shuffle(words)
    return " ".join(word for word, _ in words), " ".join(word for _, word in words)


def source_alone(source: str, target: str, draw: Random) -> tuple[str, str]:
    return " ".join(draw.sample(source.split(), len(source.split()))), target


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for pair in PAIRS for text in pair]
    return train_any_tokenizer(
        zip(texts, range(len(texts)), strict=True),
        "words",
        vocab_size=100,
    )


def rewritten(tokenizer, rewrite, epoch=0, **settings):
    source, target = zip(*PAIRS, strict=True)
    pairs = Dataset.from_dict({"source": source, "target": target})
    encoded, _ = encode_pairs(pairs, tokenizer, drop_too_long=True)
    changed = with_rewriting(encoded, tokenizer, rewrite=rewrite, **settings)
    changed.set_epoch(epoch)
    return changed


def texts_of(tokenizer, rows):
    names = ("input_ids", "labels")
    return [
        tuple(tokenizer.decode(row[name], skip_special_tokens=True) for name in names)
        for row in rows
    ]


def test_both_sides_are_rewritten_together(tokenizer):
    rows = texts_of(tokenizer, rewritten(tokenizer, both_together))
    partners = dict(zip("abcdef", "xyzuvw", strict=True))
    for (source, target), (old_source, _) in zip(rows, PAIRS, strict=True):
        assert sorted(source) == sorted(old_source)
        assert [partners[letter] for letter in source.split()] == target.split()
    assert sum(row != pair for row, pair in zip(rows, PAIRS, strict=True)) > len(PAIRS) / 2


def test_one_side_is_rewritten(tokenizer):
    sources, targets = zip(*texts_of(tokenizer, rewritten(tokenizer, source_alone)), strict=True)
    old_sources, old_targets = zip(*PAIRS, strict=True)
    assert targets == old_targets
    assert sources != old_sources


def test_rewriting_depends_on_seed_epoch_and_line_alone(tokenizer):
    first = list(rewritten(tokenizer, both_together, epoch=3))
    again = rewritten(tokenizer, both_together, epoch=3)
    assert [again[row] for row in reversed(range(len(PAIRS)))] == first[
        ::-1
    ]  # as after resuming, in any order
    assert list(rewritten(tokenizer, both_together, epoch=4)) != first
    assert list(rewritten(tokenizer, both_together, epoch=3, seed=1)) != first


def test_pairs_that_cannot_be_rewritten_stay_as_they_are(tokenizer, caplog):
    def failing(source, target, draw):
        size = len(source.split())
        if size == 2:
            raise ValueError("two are too few")
        if size == 3:
            return source + " unknown", target
        if size == 4:
            return source * 100, target
        return both_together(source, target, draw)

    rows = texts_of(tokenizer, rewritten(tokenizer, failing, limits=(20, 20)))
    for row, pair, size in zip(rows, PAIRS, SIZES, strict=True):
        assert row == pair or size > 4
    assert "8 of the first 40 pairs" in caplog.text
    assert "line 1: ValueError: two are too few" in caplog.text
    assert "16 become too long" in caplog.text


@pytest.mark.parametrize("result", [None, ("a", ""), ("a",), ("a", None)])
def test_a_function_that_returns_no_pair_is_refused(tokenizer, result):
    with pytest.raises(
        UserError, match="^rewrite: 40 of the first 40 pairs cannot be rewritten; line 1: "
    ):
        rewritten(tokenizer, lambda source, target, draw: result)
