"""Token batches: every pair once per epoch, no batch over the limit, equal shares for all ranks, for any lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.batches.batching import (
    TokenBatchDataset,
    TokenBatchSampler,
    pair_lengths,
    shard_batches,
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


def test_split_into_batches_is_greedy():
    lengths = np.random.default_rng(1).integers(1, 30, 500)
    starts, batch = [0], []
    for row, length in enumerate(lengths):  # the definition, pair by pair
        if batch and (len(batch) + 1) * max(*batch, length) > 64:
            starts.append(row)
            batch = []
        batch.append(length)
    assert split_into_batches(lengths, 64).tolist() == [*starts, len(lengths)]


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
    assert len(each) == round(target.sum() / 2000)
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


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_shard_batches_balances_the_work_of_ranks(world_size):
    pairs = lengths_like_sentences()
    lengths = pairs.max(axis=1)
    whole = sampler(pairs, 500, tokens_per_update=8000)
    for number in range(len(whole)):
        shares = shard_batches(whole.update(number), lengths, world_size)
        work = [sum(len(batch) * lengths[batch].max() for batch in share) for share in shares]
        assert max(work) <= 1.35 * min(work)


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
