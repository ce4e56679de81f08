"""Token batches: every pair once per epoch, no batch over the limit, equal shares for all ranks, for any lengths."""

from itertools import groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.batches.batching import (
    TokenBatchDataset,
    TokenBatchSampler,
    collate_batches,
    even_groups,
    pair_lengths,
    rounded_shape,
    runs_of_equals,
    shard_batches,
    shuffled_runs,
    sort_by_length,
    split_into_batches,
)

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)
FEW = settings(max_examples=60)


def sampler(pairs, max_tokens=60, **plan):
    source, target = np.array(pairs).T
    return TokenBatchSampler(source, target, max_tokens, **plan)


def lengths_like_sentences(count=3000, seed=0):
    rng = np.random.default_rng(seed)
    source = rng.poisson(14, count) + 2
    return np.stack([source, np.maximum(1, (source * rng.uniform(0.7, 1.4, count)).astype(int))], axis=1)


@FEW
@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 500), st.integers(1, 5), st.integers(0, 3))
def test_every_pair_is_in_one_update_of_an_epoch(pairs, max_tokens, tokens_per_update, world_size, epoch):
    shares = []
    for rank in range(world_size):
        each = sampler(
            pairs,
            max_tokens,
            tokens_per_update=tokens_per_update,
            batches_per_update=world_size,
            world_size=world_size,
            rank=rank,
        )
        each.set_epoch(epoch)
        shares.append(list(each))
        assert len(shares[-1]) == len(each)
    rows = [row for share in shares for update in share for batch in update for row in batch if row >= 0]
    assert sorted(rows) == list(range(len(pairs)))
    for updates in zip(*shares, strict=True):  # one update, on each rank
        assert len({len(update) for update in updates}) == 1
        assert all(batch for update in updates for batch in update)
        counted = [row for update in updates for batch in update for row in batch if row >= 0]
        dummies = [row for update in updates for batch in update for row in batch if row < 0]
        assert counted
        if dummies:  # only if there are fewer pairs than ranks
            assert len(counted) < sum(map(len, updates)) and {~row for row in dummies} <= set(counted)


@FEW
@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 500), st.integers(1, 4))
def test_batches_keep_the_token_limit_on_both_sides(pairs, max_tokens, tokens_per_update, world_size):
    each = sampler(pairs, max_tokens, tokens_per_update=tokens_per_update, world_size=world_size)
    for update in each:
        for batch in update:
            padded = [len(batch) * max(pairs[max(row, ~row)][side] for row in batch) for side in (0, 1)]
            assert max(padded) <= max_tokens or len(batch) == 1


@FEW
@given(LENGTHS, st.integers(1, 500), st.integers(1, 6))
def test_update_has_the_same_pairs_for_any_world_size(pairs, tokens_per_update, world_size):
    alone = sampler(pairs, tokens_per_update=tokens_per_update)
    together = [
        sampler(pairs, tokens_per_update=tokens_per_update, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    for number in range(len(alone)):
        expected = sorted(row for batch in alone.batches(number) for row in batch)
        shares = [row for each in together for batch in each.batches(number) for row in batch if row >= 0]
        assert sorted(shares) == expected


@FEW
@given(LENGTHS)
def test_pairs_are_sorted_and_those_of_equal_lengths_shuffled(pairs):
    source, target = np.array(pairs).T

    def key(row):
        bucket = pairs[row][0] // 2
        return bucket, pairs[row][1] * (-1) ** bucket, pairs[row][0]

    order = sort_by_length(source, target)
    assert order.tolist() == sorted(range(len(pairs)), key=key)
    runs = runs_of_equals(source[order], target[order])
    groups = groupby(pairs[row] for row in order)
    assert runs.tolist() == [number for number, (_, run) in enumerate(groups, start=1) for _ in run]
    places = shuffled_runs(runs, np.random.default_rng(0))
    assert sorted(places) == list(range(len(pairs)))
    assert runs[places].tolist() == runs.tolist()


@FEW
@given(st.lists(st.integers(0, 30), min_size=1, max_size=120), st.integers(1, 64))
def test_split_into_batches_is_greedy(lengths, max_tokens):
    starts, batch = [0], []
    for row, length in enumerate(lengths):  # the definition, pair by pair
        if batch and (len(batch) + 1) * max(1, *batch, length) > max_tokens:
            starts.append(row)
            batch = []
        batch.append(length)
    assert split_into_batches(np.array(lengths), max_tokens).tolist() == [*starts, len(lengths)]


@FEW
@given(st.lists(st.integers(1, 40), min_size=8, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_groups_are_cut_at_the_nearest_borders(tokens, count):
    borders = [sum(tokens[:place]) for place in range(len(tokens) + 1)]
    cuts = []
    for number in range(count + 1):
        wanted = number * borders[-1] / count
        nearest = min(range(len(borders)), key=lambda place: abs(borders[place] - wanted))
        after_the_last = cuts[-1] + 1 if cuts else 0
        cuts.append(min(max(nearest, after_the_last), len(tokens) - count + number))
    assert even_groups(np.array(tokens), count).tolist() == cuts


def test_ranks_get_batches_forth_and_back_by_their_size():
    rng = np.random.default_rng(0)
    for _ in range(100):
        lengths = rng.integers(1, 1_000_000, rng.integers(1, 13))  # no two batches are of one size
        cuts = rng.integers(1, len(lengths) + 1, rng.integers(0, 6))
        batches = [batch for batch in np.split(np.arange(len(lengths)), sorted({*cuts})) if len(batch)]
        ranks = int(rng.integers(1, 6))

        def size(batch, lengths=lengths):
            return len(batch) * max(lengths[max(row, ~row)] for row in batch)

        parts = [batch.tolist() for batch in batches]
        while len(parts) % ranks and (several := [part for part in parts if len(part) > 1]):
            largest = max(several, key=size)
            parts.remove(largest)
            parts += [largest[: (len(largest) + 1) // 2], largest[(len(largest) + 1) // 2 :]]
        if ranks > 1:
            parts.sort(key=size, reverse=True)
        parts += [[~parts[0][0]]] * (-len(parts) % ranks)
        rounds = [parts[start : start + ranks] for start in range(0, len(parts), ranks)]
        rounds = [each[:: (-1) ** number] for number, each in enumerate(rounds)]
        shares = [list(share) for share in zip(*rounds, strict=True)]
        found = shard_batches(batches, lengths, ranks)
        assert [[batch.tolist() for batch in share] for share in found] == shares


@FEW
@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30), st.integers(1, 8))
def test_rounded_shape_is_the_smallest(pairs, source, target, unit):
    shapes = product(*(range(size, size + unit) for size in (pairs, source, target)))
    fitting = [shape for shape in shapes if shape[0] * shape[1] % unit == shape[0] * shape[2] % unit == 0]
    smallest = min(fitting, key=lambda shape: (shape[0] * (shape[1] + shape[2]), shape))
    assert rounded_shape(pairs, source, target, unit) == smallest


@pytest.mark.parametrize("unit", [1, 6])
def test_rounded_batches_have_padding_and_dummies(unit):
    def collator(rows):
        names = {"input_ids": 5, "labels": -100}
        columns = {name: [torch.tensor(row[name]) for row in rows] for name in names}
        batch = {name: torch.nn.utils.rnn.pad_sequence(columns[name], True, value) for name, value in names.items()}
        return batch | {"attention_mask": batch["input_ids"].ne(5), "decoder_input_ids": batch["labels"].clip(7)}

    rows = [{"input_ids": [8] * size, "labels": [9] * (size + 2)} for size in (1, 3)]
    (batch,) = collate_batches([rows], collator, unit, (5, 7))
    size, source, target = (2, 3, 5) if unit == 1 else rounded_shape(2, 3, 5, unit)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (size, source),
        "attention_mask": (size, source),
        "labels": (size, target),
        "decoder_input_ids": (size, target),
    }
    assert batch["input_ids"].ne(5).equal(batch["attention_mask"].bool())
    assert batch["attention_mask"][:2].sum(dim=1).tolist() == [1, 3]
    assert batch["labels"].eq(9).sum(dim=1).tolist() == [3, 5, *[0] * (size - 2)]
    assert set(batch["labels"][batch["labels"] != 9].tolist()) == {-100}
    assert set(batch["decoder_input_ids"][batch["labels"] != 9].tolist()) == {7}
    own = {"extra": torch.zeros(2)}
    (batch,) = collate_batches([rows], lambda rows: collator(rows) | own, unit, (5, 7))
    assert batch["labels"].shape == (2, 5)


def test_epoch_order_depends_on_the_epoch_and_the_seed():
    pairs = lengths_like_sentences()
    each, again, other = (sampler(pairs, 500, tokens_per_update=2000, seed=seed) for seed in (1, 1, 2))
    first = list(each)
    each.set_epoch(1)
    second = list(each)
    each.set_epoch(0)
    again.set_epoch(1)
    assert list(each) == first and list(again) == second
    assert first != second and list(other) != first
    # not only the order of the batches differs, but also the pairs in them
    assert {frozenset(batch) for update in first for batch in update} != {
        frozenset(batch) for update in second for batch in update
    }


def test_epochs_have_the_same_number_of_updates_of_similar_size():
    pairs = lengths_like_sentences()
    each = sampler(pairs, 500, tokens_per_update=2000)
    target = pairs[:, 1]
    for tokens in range(1900, 2000, 7):  # rounded up and down
        assert len(sampler(pairs, 500, tokens_per_update=tokens)) == round(target.sum() / tokens)
    for epoch in range(4):
        each.set_epoch(epoch)
        tokens = [sum(target[batch].sum() for batch in update) for update in each]
        assert len(tokens) == len(each) and min(tokens) >= 1500 and max(tokens) <= 2500


def test_batches_are_not_in_order_of_length():
    pairs = lengths_like_sentences()
    longest = [max(pairs[batch[0]][0] for batch in update) for update in sampler(pairs, 500)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3


def test_padding_share_is_small():
    pairs = lengths_like_sentences(20_000)
    real = padded = 0
    for update in sampler(pairs, 2048):
        for batch in update:
            real += pairs[batch].sum()
            padded += len(batch) * pairs[batch].max(axis=0).sum()
    assert 1 - real / padded <= 0.06


def test_pair_lengths_of_a_list_of_rows():
    rows = [{"input_ids": [4, 2], "labels": [5, 6, 2]}, {"input_ids": [2], "labels": [2]}]
    source, target = pair_lengths(rows)
    assert source.tolist() == [2, 1] and target.tolist() == [3, 1]


class Grown:
    """Pairs of other lengths than those that their batches were planned for."""

    grows = True

    def __init__(self, pairs):
        self.rows = [{"input_ids": [row] * source, "labels": [row] * target} for row, (source, target) in pairs]

    def __getitem__(self, number):
        return self.rows[number]


@FEW
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60), st.integers(1, 200))
def test_updates_of_grown_pairs_keep_the_limit(lengths, max_tokens):
    dataset = TokenBatchDataset(Grown(enumerate(lengths)), max_tokens)
    planned = [list(range(start, min(start + 9, len(lengths)))) for start in range(0, len(lengths), 9)]
    batches = dataset.numbers(planned)
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    longest = [max(max(lengths[number]) for number in batch) for batch in batches]
    sizes = [len(batch) * length for batch, length in zip(batches, longest, strict=True) if len(batch) > 1]
    assert max(sizes, default=0) <= max_tokens
    rows = [[row["input_ids"][0] for row in batch] for batch in dataset.__getitems__(planned)]
    assert rows == batches


def test_dummy_pair_has_no_labels():
    rows = [{"input_ids": [9] * (1 + i % 7), "labels": [i + 1] * (1 + i % 5), "line": i + 1} for i in range(50)]
    data = TokenBatchDataset(rows)
    ((first, second), (third,)) = data.__getitems__([[3, ~4], [5]])
    assert (first["line"], second["line"], third["line"]) == (4, 5, 6)
    assert second["labels"] == [-100] * 5 and second["input_ids"] == rows[4]["input_ids"]
    assert first["labels"] == [4] * 4 and rows[4]["labels"] == [5] * 5
    assert len(data) == 50
