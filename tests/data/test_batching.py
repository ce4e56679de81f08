"""Updates of token batches: every pair once an epoch, no batch over the limit, equal shares, whatever the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.data.batching import UpdateSampler, cut, deal, even_groups, pair_lengths

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def sampler(pairs, max_tokens=60, **plan):
    source, target = np.array(pairs).T
    return UpdateSampler(source, target, max_tokens, **plan)


def lengths_like_sentences(count=3000, seed=0):
    rng = np.random.default_rng(seed)
    source = rng.poisson(14, count) + 2
    return np.stack([source, np.maximum(1, (source * rng.uniform(0.7, 1.4, count)).astype(int))], axis=1)


@FEW
@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 500), st.integers(1, 5), st.integers(0, 3))
def test_every_pair_is_in_one_update_of_an_epoch(pairs, max_tokens, tokens_per_update, processes, epoch):
    shares = []
    for process in range(processes):
        each = sampler(
            pairs,
            max_tokens,
            tokens_per_update=tokens_per_update,
            batches_per_update=processes,
            processes=processes,
            process=process,
        )
        each.set_epoch(epoch)
        shares.append(list(each))
        assert len(shares[-1]) == len(each)
    seen = [row for share in shares for update in share for batch in update for row in batch if row >= 0]
    assert sorted(seen) == list(range(len(pairs)))
    for updates in zip(*shares, strict=True):  # one update, as each of the processes has it
        assert len({len(update) for update in updates}) == 1
        assert all(batch for update in updates for batch in update)
        counted = [row for update in updates for batch in update for row in batch if row >= 0]
        filled = [row for update in updates for batch in update for row in batch if row < 0]
        assert counted
        if filled:  # only where there are not enough pairs to go round
            assert len(counted) < sum(map(len, updates)) and {~row for row in filled} <= set(counted)


@FEW
@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 500), st.integers(1, 4))
def test_no_batch_is_over_the_limit_on_either_side(pairs, max_tokens, tokens_per_update, processes):
    each = sampler(pairs, max_tokens, tokens_per_update=tokens_per_update, processes=processes)
    for update in each:
        for batch in update:
            padded = [len(batch) * max(pairs[max(row, ~row)][side] for row in batch) for side in (0, 1)]
            assert max(padded) <= max_tokens or len(batch) == 1


@FEW
@given(LENGTHS, st.integers(1, 500), st.integers(1, 6))
def test_an_update_is_of_the_same_pairs_in_any_number_of_processes(pairs, tokens_per_update, processes):
    alone = sampler(pairs, tokens_per_update=tokens_per_update)
    together = [
        sampler(pairs, tokens_per_update=tokens_per_update, processes=processes, process=process)
        for process in range(processes)
    ]
    for number in range(len(alone)):
        expected = sorted(row for batch in alone.batches(number) for row in batch)
        shares = [row for each in together for batch in each.batches(number) for row in batch if row >= 0]
        assert sorted(shares) == expected


@FEW
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
def test_even_groups_are_not_empty_and_near_their_size(tokens, data):
    count = data.draw(st.integers(1, len(tokens)))
    starts = even_groups(np.array(tokens), count)
    assert starts[0] == 0 and starts[-1] == len(tokens) and len(starts) == count + 1
    assert (np.diff(starts) > 0).all()


def test_cut_is_the_greedy_one():
    lengths = np.random.default_rng(1).integers(1, 30, 500)
    cuts, batch = [0], []
    for row, length in enumerate(lengths):  # the definition, pair by pair
        if batch and (len(batch) + 1) * max(*batch, length) > 64:
            cuts.append(row)
            batch = []
        batch.append(length)
    assert cut(lengths, 64).tolist() == [*cuts, len(lengths)]


def test_epochs_differ_and_come_again_with_the_same_seed():
    pairs = lengths_like_sentences()
    each, again, other = (sampler(pairs, 500, tokens_per_update=2000, seed=seed) for seed in (1, 1, 2))
    first = list(each)
    each.set_epoch(1)
    second = list(each)
    each.set_epoch(0)
    again.set_epoch(1)
    assert list(each) == first and list(again) == second
    assert first != second and list(other) != first
    # not only the batches change places, but also the pairs in them
    assert {frozenset(batch) for update in first for batch in update} != {
        frozenset(batch) for update in second for batch in update
    }


def test_all_epochs_have_the_same_number_of_updates_of_nearly_the_same_size():
    pairs = lengths_like_sentences()
    each = sampler(pairs, 500, tokens_per_update=2000)
    target = pairs[:, 1]
    assert len(each) == round(target.sum() / 2000)
    for epoch in range(4):
        each.set_epoch(epoch)
        words = [sum(target[batch].sum() for batch in update) for update in each]
        assert len(words) == len(each) and min(words) >= 1500 and max(words) <= 2500


def test_batches_are_shuffled_and_not_in_order_of_length():
    pairs = lengths_like_sentences()
    longest = [max(pairs[batch[0]][0] for batch in update) for update in sampler(pairs, 500)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3


def test_little_is_padding():
    pairs = lengths_like_sentences(20_000)
    real = padded = 0
    for update in sampler(pairs, 2048):
        for batch in update:
            real += pairs[batch].sum()
            padded += len(batch) * pairs[batch].max(axis=0).sum()
    assert 1 - real / padded <= 0.06


def test_a_pair_longer_than_the_limit_is_a_batch_of_its_own():
    batches = [batch for update in sampler([(3, 4), (90, 2), (5, 5)], 20) for batch in update]
    assert sorted(map(sorted, batches)) == [[0, 2], [1]]


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
def test_work_is_shared_evenly(processes):
    pairs = lengths_like_sentences()
    lengths = pairs.max(axis=1)
    whole = sampler(pairs, 500, tokens_per_update=8000)
    for number in range(len(whole)):
        shares = deal(whole.update(number), lengths, processes)
        work = [sum(len(batch) * lengths[batch].max() for batch in share) for share in shares]
        assert max(work) <= 1.35 * min(work)


def test_more_processes_than_pairs():
    shares = [sampler([(3, 4), (5, 5)], batches_per_update=4, processes=4, process=p).batches(0) for p in range(4)]
    rows = sorted(row for share in shares for batch in share for row in batch)
    assert [len(share) for share in shares] == [1] * 4
    assert [row for row in rows if row >= 0] == [0, 1] and len(rows) == 4


def test_lengths_of_rows_that_are_no_table():
    rows = [{"input_ids": [4, 2], "labels": [5, 6, 2]}, {"input_ids": [2], "labels": [2]}]
    source, target = pair_lengths(rows)
    assert source.tolist() == [2, 1] and target.tolist() == [3, 1]
