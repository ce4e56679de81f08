"""Rewriting of training pairs: anew in every epoch, the same in every process, and nothing lost."""

from random import Random

import pytest
import torch
from datasets import Dataset

from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.batches.rewriting import with_rewriting
from hf_vanilla_transformer.text.symbol_tokenizers import train_any_tokenizer
from hf_vanilla_transformer.utils.errors import UserError

PAIRS = [(" ".join("abcdef"[: 2 + number % 5]), " ".join("xyzuvw"[: 2 + number % 5])) for number in range(40)]


def both_together(source: str, target: str, draw: Random) -> tuple[str, str]:
    """The same order for source and target."""
    order = list(range(len(source.split())))
    draw.shuffle(order)
    return " ".join(source.split()[place] for place in order), " ".join(target.split()[place] for place in order)


def source_alone(source: str, target: str, draw: Random) -> tuple[str, str]:
    return " ".join(draw.sample(source.split(), len(source.split()))), target


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for pair in PAIRS for text in pair]
    return train_any_tokenizer(zip(texts, range(len(texts)), strict=True), "words", vocab_size=100)


def rewritten(tokenizer, rewrite, epoch=0, **settings):
    pairs = Dataset.from_list([{"source": source, "target": target} for source, target in PAIRS])
    encoded, _ = encode_pairs(pairs, tokenizer, drop_too_long=True)
    changed = with_rewriting(encoded, tokenizer, rewrite=rewrite, **settings)
    changed.set_epoch(epoch)
    return changed


def texts_of(tokenizer, rows):
    names = ("input_ids", "labels")
    return [tuple(tokenizer.decode(row[name], skip_special_tokens=True) for name in names) for row in rows]


def test_both_sides_are_rewritten_together(tokenizer):
    rows = texts_of(tokenizer, rewritten(tokenizer, both_together))
    partners = dict(zip("abcdef", "xyzuvw", strict=True))
    for (source, target), (old_source, old_target) in zip(rows, PAIRS, strict=True):
        assert sorted(source) == sorted(old_source) and sorted(target) == sorted(old_target)
        assert [partners[letter] for letter in source.split()] == target.split()
    assert sum(row != pair for row, pair in zip(rows, PAIRS, strict=True)) > len(PAIRS) / 2


def test_one_side_is_rewritten(tokenizer):
    rows = texts_of(tokenizer, rewritten(tokenizer, source_alone))
    assert [target for _, target in rows] == [target for _, target in PAIRS]
    assert [source for source, _ in rows] != [source for source, _ in PAIRS]


def test_rewriting_depends_on_seed_epoch_and_line_alone(tokenizer):
    first = list(rewritten(tokenizer, both_together, epoch=3))
    again = rewritten(tokenizer, both_together, epoch=3)
    assert [again[row] for row in reversed(range(len(PAIRS)))] == first[::-1]  # as after resuming, in any order
    assert list(rewritten(tokenizer, both_together, epoch=4)) != first
    assert list(rewritten(tokenizer, both_together, epoch=3, seed=1)) != first
    loader = torch.utils.data.DataLoader(again, batch_size=None, num_workers=2)
    assert sorted(map(str, loader)) == sorted(map(str, first))


def test_pairs_that_cannot_be_rewritten_stay_as_they_are(tokenizer, caplog):
    def failing(source, target, draw):
        if len(source.split()) == 2:
            raise ValueError("two are too few")
        if len(source.split()) == 3:
            return source + " unknown", target
        if len(source.split()) == 4:
            return source * 100, target
        return both_together(source, target, draw)

    rows = texts_of(tokenizer, rewritten(tokenizer, failing, limits=(20, 20)))
    counts = [sum(len(source.split()) == length for source, _ in PAIRS) for length in (2, 3, 4)]
    for row, pair in zip(rows, PAIRS, strict=True):
        assert row == pair or len(pair[0].split()) > 4
    message = caplog.text
    assert (
        f"{counts[0]} of the first {len(PAIRS)} pairs" in message and "line 1: ValueError: two are too few" in message
    )
    assert f"{counts[1] + counts[2]} become too long" in message


@pytest.mark.parametrize("result", [None, ("a", ""), ("a",), ("a", None)])
def test_a_function_that_returns_no_pair_is_refused(tokenizer, result):
    with pytest.raises(UserError, match="^rewrite: 40 of the first 40 pairs cannot be rewritten; line 1: "):
        rewritten(tokenizer, lambda source, target, draw: result)
