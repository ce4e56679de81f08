"""Token batches: every pair once per epoch, no batch over the limit, equal shares for all ranks, for any lengths."""

from itertools import chain, groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, none, sampled_from, tuples
from numpy.random import default_rng

from hf_vanilla_transformer.batches.batching import (
    TokenBatchDataset,
    TokenBatchSampler,
    collate_batches,
    even_groups,
    rounded_shape,
    runs_of_equals,
    shard_batches,
    shuffled_runs,
    sort_by_length,
    split_into_batches,
)
from tests.model_helpers import tiny_model
from tests.trainer_helpers import padding_collator

LENGTHS = lists(tuples(integers(1, 40), integers(1, 40)), min_size=1, max_size=120)
FEW = settings(max_examples=60)


def sampler(pairs, max_tokens=60, epoch=0, **plan):
    source, target = np.array(pairs).T
    each = TokenBatchSampler(source, target, max_tokens, **plan)
    each.set_epoch(epoch)
    return each


def lengths_like_sentences():
    rng = default_rng(0)
    source = rng.poisson(14, 3000) + 2
    target = (source * rng.uniform(0.7, 1.4, 3000)).astype(int)
    return np.stack([source, np.maximum(1, target)], axis=1)


@FEW
@given(
    pairs=LENGTHS,
    max_tokens=integers(1, 100),
    tokens_per_update=none() | integers(1, 500),
    world_size=integers(1, 5),
    epoch=integers(0, 3),
)
def test_ranks_share_updates_in_which_every_pair_occurs_once(
    pairs,
    max_tokens,
    tokens_per_update,
    world_size,
    epoch,
):
    plan = {"tokens_per_update": tokens_per_update, "batches_per_update": world_size}
    alone = sampler(pairs, max_tokens, epoch, **plan)
    ranks = [
        sampler(pairs, max_tokens, epoch, world_size=world_size, rank=rank, **plan)
        for rank in range(world_size)
    ]
    assert sorted(chain(*chain(*alone))) == list(range(len(pairs)))
    for number, shares in enumerate(zip(*ranks, strict=True)):
        expected = sorted(chain(*alone.batches(number)))
        assert expected
        batches = list(chain(*shares))
        rows = list(chain(*batches))
        assert sorted(row for row in rows if row >= 0) == expected
        assert len({len(share) for share in shares}) == 1
        dummies = [~row for row in rows if row < 0]
        if dummies:  # only if there are fewer pairs than ranks
            assert len(expected) < len(batches)
            assert set(dummies) <= set(expected)
        for batch in batches:
            longest = max(max(pairs[max(row, ~row)]) for row in batch)
            assert len(batch) == 1 or len(batch) * longest <= max_tokens
    assert number + 1 == len(alone) == len(ranks[0])


@FEW
@given(LENGTHS)
def test_pairs_are_sorted_and_those_of_equal_lengths_shuffled(pairs):
    def key(row):
        source, target = pairs[row]
        bucket = source // 2
        return bucket, target * (-1) ** bucket, source

    source, target = np.array(pairs).T
    order = sort_by_length(source, target)
    assert order.tolist() == sorted(range(len(pairs)), key=key)
    runs = runs_of_equals(source[order], target[order])
    groups = groupby(pairs[row] for row in order)
    assert runs.tolist() == [number for number, (_, run) in enumerate(groups, start=1) for _ in run]
    places = shuffled_runs(runs, default_rng(0))
    assert sorted(places) == list(range(len(pairs)))
    assert runs[places].tolist() == runs.tolist()


@FEW
@given(lists(integers(0, 30), min_size=1, max_size=120), integers(1, 64))
def test_split_into_batches_is_greedy(lengths, max_tokens):
    starts = [0]
    batch = []
    for row, length in enumerate(lengths):  # the definition, pair by pair
        if batch and (len(batch) + 1) * max(1, *batch, length) > max_tokens:
            starts.append(row)
            batch = []
        batch.append(length)
    assert split_into_batches(np.array(lengths), max_tokens).tolist() == [*starts, len(lengths)]


@FEW
@given(lists(integers(1, 40), min_size=8, max_size=40), sampled_from([1, 2, 4, 8]))
def test_groups_are_cut_at_the_nearest_borders(tokens, count):
    borders = np.cumsum([0, *tokens])
    cuts = []
    for number in range(count + 1):
        wanted = number * borders[-1] / count
        nearest = int(np.abs(borders - wanted).argmin())
        after_the_last = cuts[-1] + 1 if cuts else 0
        before_the_next = len(tokens) - count + number
        cuts.append(min(max(nearest, after_the_last), before_the_next))
    assert even_groups(np.array(tokens), count).tolist() == cuts


def shares_by_the_rule(batches, lengths, ranks):
    def size(batch):
        return len(batch) * lengths[batch].max()

    parts = list(batches)
    while len(parts) % ranks and (several := [part for part in parts if len(part) > 1]):
        largest = max(several, key=size)
        half = (len(largest) + 1) // 2
        parts.remove(largest)
        parts += [largest[:half], largest[half:]]
    if ranks > 1:
        parts.sort(key=size, reverse=True)
    dummy = [~parts[0][0]]
    parts += [dummy] * (-len(parts) % ranks)
    shares = [[] for _ in range(ranks)]
    for number in range(0, len(parts), ranks):
        forth = number // ranks % 2 == 0
        turn = shares if forth else shares[::-1]
        for share, part in zip(turn, parts[number : number + ranks], strict=True):
            share.append(part)
    return shares


def test_ranks_get_batches_forth_and_back_by_their_size():
    rng = default_rng(0)
    for _ in range(100):
        pairs = rng.integers(1, 13)
        lengths = rng.integers(1, 1_000_000, pairs)  # no two batches are of one size
        cuts = rng.integers(1, pairs + 1, rng.integers(0, 6))
        parts = np.split(np.arange(pairs), np.unique(cuts))
        batches = [part.tolist() for part in parts if len(part)]
        ranks = int(rng.integers(1, 6))
        found = shard_batches([np.array(batch) for batch in batches], lengths, ranks)
        shares = [[batch.tolist() for batch in share] for share in found]
        assert shares == shares_by_the_rule(batches, lengths, ranks)


@FEW
@given(integers(1, 9), integers(1, 30), integers(1, 30), integers(1, 8))
def test_rounded_shape_is_the_smallest(pairs, source, target, unit):
    def places(shape):
        return shape[0] * (shape[1] + shape[2])

    shapes = product(*(range(size, size + unit) for size in (pairs, source, target)))
    fitting = [
        shape for shape in shapes if shape[0] * shape[1] % unit == shape[0] * shape[2] % unit == 0
    ]
    assert rounded_shape(pairs, source, target, unit) == min(
        fitting, key=lambda shape: (places(shape), shape)
    )


@pytest.mark.parametrize(("unit", "shape"), [(1, (3, 3, 5)), (8, (4, 4, 6))])
def test_rounded_batches_have_padding_and_dummies(unit, shape):
    rows = [{"input_ids": [8] * size, "labels": [9] * (size + 2)} for size in (1, 2, 3)]
    collator = padding_collator(tiny_model())
    (batch,) = collate_batches([rows], collator, unit, (1, 7))
    assert rounded_shape(3, 3, 5, unit) == shape
    pairs, source, target = shape
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (pairs, source)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (pairs, target)
    assert batch["input_ids"].eq(8).equal(batch["attention_mask"].bool())
    assert batch["input_ids"].ne(8).equal(batch["input_ids"].eq(1))
    assert batch["attention_mask"][:3].sum(dim=1).tolist() == [1, 2, 3]
    assert batch["labels"].eq(9).sum(dim=1).tolist() == [3, 4, 5, 0][:pairs]
    assert batch["labels"].ne(9).equal(batch["labels"].eq(-100))
    assert batch["decoder_input_ids"][:, 5:].eq(7).all()

    def with_own_tensor(rows):
        return {**collator(rows), "extra": torch.zeros(3)}

    def with_own_mask(rows):
        batch = collator(rows)
        return {**batch, "attention_mask": batch["attention_mask"][:, None, None].bool()}

    for own in (with_own_tensor, with_own_mask):
        (batch,) = collate_batches([rows], own, unit, (1, 7))
        assert batch["labels"].shape == (3, 5)


def test_epoch_order_depends_on_the_epoch_and_the_seed():
    pairs = lengths_like_sentences()

    def updates(epoch, seed):
        return list(sampler(pairs, 500, epoch, tokens_per_update=2000, seed=seed))

    first = updates(epoch=0, seed=1)
    again = sampler(pairs, 500, epoch=1, tokens_per_update=2000, seed=1)
    assert list(again) == updates(epoch=1, seed=1) != first
    again.set_epoch(0)
    assert list(again) == first != updates(epoch=0, seed=2)
    # not only the order of the batches differs, but also the pairs in them
    contents = [set(map(frozenset, chain(*updates(epoch, seed=1)))) for epoch in (0, 1)]
    assert contents[0] != contents[1]


def test_epochs_have_the_same_number_of_updates_of_similar_size():
    pairs = lengths_like_sentences()
    target = pairs[:, 1]
    for tokens in range(1900, 2000, 7):  # rounded up and down
        assert len(sampler(pairs, 500, tokens_per_update=tokens)) == round(target.sum() / tokens)
    for epoch in range(4):
        each = sampler(pairs, 500, epoch, tokens_per_update=2000)
        tokens = [target[list(chain(*update))].sum() for update in each]
        assert len(tokens) == len(each)
        assert min(tokens) >= 1500
        assert max(tokens) <= 2500


def test_batches_are_not_in_order_of_length():
    pairs = lengths_like_sentences()
    longest = [pairs[batch[0]][0] for (batch,) in sampler(pairs, 500)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3


class Grown(list):
    """Pairs of other lengths than those that their batches were planned for."""

    grows = True


@FEW
@given(lists(tuples(integers(1, 60), integers(1, 60)), min_size=1, max_size=60), integers(1, 200))
def test_updates_of_grown_pairs_keep_the_limit(lengths, max_tokens):
    rows = [
        {"input_ids": [row] * source, "labels": [row] * target}
        for row, (source, target) in enumerate(lengths)
    ]
    dataset = TokenBatchDataset(Grown(rows), max_tokens)
    numbers = list(range(len(lengths)))
    planned = [numbers[start : start + 9] for start in numbers[::9]]
    batches = dataset.numbers(planned)
    assert sorted(chain(*batches)) == numbers
    for batch in batches:
        longest = max(max(lengths[number]) for number in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens
    made = [[row["input_ids"][0] for row in batch] for batch in dataset.__getitems__(planned)]
    assert made == batches


def test_dummy_pair_has_no_labels():
    rows = [
        {"input_ids": [9] * size, "labels": [size] * (size + 1), "line": size} for size in range(50)
    ]
    data = TokenBatchDataset(rows)
    ((first, second), (third,)) = data.__getitems__([[3, ~4], [5]])
    assert [first, third] == [rows[3], rows[5]]
    assert second == rows[4] | {"labels": [-100] * 5}
    assert rows[4]["labels"] == [4] * 5
    assert len(data) == 50
