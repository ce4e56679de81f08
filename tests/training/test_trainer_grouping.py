"""Batches of pairs grouped by both lengths: every pair once, little padding, another order each epoch."""

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from numpy.random import default_rng
from transformers.trainer_pt_utils import LengthGroupedSampler as SourceLengthSampler

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.batches import batching
from hf_vanilla_transformer.batches.batching import LengthGroupedSampler, pair_lengths
from hf_vanilla_transformer.training.run.arguments import RunArguments
from tests.model_helpers import error_of, tiny_model
from tests.trainer_helpers import collate, make_trainer

BATCH = 16


@pytest.fixture
def lengths():
    """Lengths of 1,000 pairs, correlated as in real text: targets are 0.7 to 1.5 times as long."""
    rng = default_rng(0)
    source = rng.integers(3, 40, 1000)
    target = (source * rng.uniform(0.7, 1.5, 1000)).round().astype(int)
    return source, np.maximum(1, target)


def batches(sampler, size=BATCH):
    order = list(sampler)
    return [order[start : start + size] for start in range(0, len(order), size)]


def test_pair_lengths_are_of_both_sides_after_transforms(monkeypatch):
    monkeypatch.setattr(batching, "ROWS_PER_READ", 2)  # read in several batches
    columns = {
        "input_ids": [[5, 2], [2], [5, 6, 2]],
        "labels": [[2], [7, 8, 9, 2], [7, 2]],
    }
    data = Dataset.from_dict(columns)

    def longer(batch):
        return {name: [[*ids, 9] for ids in batch[name]] for name in columns}

    def lists(data):
        return [lengths.tolist() for lengths in pair_lengths(data)]

    assert lists(data) == lists(list(data)) == [[2, 1, 3], [1, 4, 2]]
    assert lists(data.with_transform(longer)) == [[3, 2, 4], [2, 5, 3]]
    assert lists(data.select([2, 0])) == [[3, 2], [2, 1]]


def test_batches_are_consecutive_among_the_sorted_pairs(lengths):
    """By buckets of two tokens of the source, whose borders shift, then by the target."""
    source, target = lengths
    sampler = LengthGroupedSampler(*lengths, BATCH, seed=1)
    shifts = set()
    for epoch in range(8):
        sampler.set_epoch(epoch)
        *whole, last = batches(sampler)
        for shift in (0, 1):
            keys = list(zip((source + shift) // 2, target, strict=True))
            found = sorted(sorted(keys[row] for row in batch) for batch in whole)
            rest = sorted(keys[row] for row in last)
            in_order = sorted(keys)
            places = (in_order[place : place + len(rest)] for place in range(1000))
            if found == batches(sorted(sum(found, []))) and rest in places:
                shifts.add(shift)
                break
        else:
            raise AssertionError(epoch)
    assert shifts == {0, 1}


@pytest.mark.parametrize("count", [5, 1000])
def test_incomplete_batch_is_from_all_lengths(lengths, count):
    """`dataloader_drop_last` leaves it out."""
    source, target = (side[:count] for side in lengths)
    sampler = LengthGroupedSampler(source, target, BATCH, seed=1)
    rest = count % BATCH
    left_out = []
    for epoch in range(60):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert order == list(sampler)
        assert sorted(order) == list(range(count))
        left_out.append(order[count - rest :])
    if count > BATCH:
        means = [source[last].mean() for last in left_out]
        lower, upper = np.quantile(source, [0.25, 0.75])
        assert min(means) < lower
        assert max(means) > upper
        times = np.bincount(np.concatenate(left_out), minlength=count)
        assert times.max() <= 6  # 60 · 8 / 1,000 is 0.5 on average


def trainer(folder, count=26, collator=None, **settings):
    rng = default_rng(1)

    def side(shortest):  # each row begins with its number, to identify the rows of a batch
        sizes = rng.integers(shortest, shortest + 6, count)
        return [[4 + row, *[4] * size, 2] for row, size in enumerate(sizes)]

    args = RunArguments(
        use_cpu=True,
        learning_rate=0.01,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        **{"output_dir": str(folder), "save_strategy": "no", **settings},
    )
    return VanillaTransformerTrainer(
        model=tiny_model(),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": side(1), "labels": side(2)}),
        data_collator=collator,
    )


def test_trainer_groups_over_gradient_accumulation_steps(tmp_path):
    sampler = trainer(tmp_path, gradient_accumulation_steps=3)._get_train_sampler()
    assert isinstance(sampler, LengthGroupedSampler)
    assert (sampler.batch_size, len(sampler)) == (12, 26)
    other = trainer(tmp_path, train_sampling_strategy="random")._get_train_sampler()
    assert not isinstance(other, LengthGroupedSampler)


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], None])
def test_rows_that_are_no_pairs_are_grouped_as_in_transformers(tmp_path, labels):
    """Those of a classifier, for example, or of a collator that makes the labels."""
    made = trainer(tmp_path)
    columns = {"input_ids": [[5, 2], [6, 7, 2], [2], [8, 2]], "labels": labels}
    made.train_dataset = Dataset.from_dict(
        {name: column for name, column in columns.items() if column}
    )
    assert isinstance(made._get_train_sampler(), SourceLengthSampler)


@pytest.mark.parametrize(
    "columns", [{"text": ["a", "b"]}, {"input_ids": [[5, 2], [2]], "labels": [0, 1]}]
)
def test_token_batches_of_rows_that_are_no_pairs_are_refused(tmp_path, columns):
    settings = {"max_tokens_per_batch": 40, "remove_unused_columns": False}
    made = make_trainer(tmp_path, Dataset.from_dict(columns), **settings)
    assert "lists of ids, input_ids and labels" in error_of(made.get_train_dataloader)


def test_trainer_reads_every_pair_once_per_epoch_in_a_new_order(tmp_path):
    seen = []

    def collator(rows):
        seen.append([row["input_ids"][0] - 4 for row in rows])
        return collate(rows)

    made = trainer(tmp_path, collator=collator)
    made.train()
    assert made.state.global_step == 14
    first, second = seen[:7], seen[7:]
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == list(range(26))
        assert [len(batch) for batch in epoch] == [4] * 6 + [2]
    assert first != second


def test_rank_of_several_resumes_in_the_order_of_its_epoch(tmp_path):
    """accelerate wraps the sampler for several ranks, and again to skip what was trained."""

    def batches_of_second_rank(resume=None, **settings):
        seen = []

        def collator(rows):
            seen.append([row["input_ids"][0] for row in rows])
            return collate(rows)

        made = trainer(tmp_path, collator=collator, **settings)
        loader = made.get_train_dataloader()
        made.get_train_dataloader = lambda: prepare_data_loader(
            loader, num_processes=2, process_index=1
        )
        made.train(resume_from_checkpoint=resume)
        return seen

    whole = batches_of_second_rank(save_strategy="steps", save_steps=3, save_total_limit=2)
    assert whole[:4] != whole[4:]
    resumed = batches_of_second_rank(tmp_path / "checkpoint-6", output_dir=str(tmp_path / "again"))
    assert resumed == whole[6:]
