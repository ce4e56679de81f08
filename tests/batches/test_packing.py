"""Packed rows: the loss and gradients of padded pairs, in one shape, with every pair once."""

import math
import re
from collections import Counter, UserDict
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from numpy.random import default_rng
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
)

from hf_vanilla_transformer import VanillaTransformerForSequenceClassification
from hf_vanilla_transformer.batches import PackedCollator, packing
from hf_vanilla_transformer.batches.batching import pair_lengths
from hf_vanilla_transformer.batches.packing import (
    FlatIds,
    FlatPairs,
    PackedBatchSampler,
    PackedLayout,
    PackedPairs,
    even_updates,
    fill_rows,
)
from hf_vanilla_transformer.batches.redrawing import RedrawnDataset
from tests.model_helpers import PAD, SMALL_SIZES, START, assert_same_gradients, padded, tiny_model
from tests.trainer_helpers import make_trainer, padding_collator

Row = dict[str, list[int]]
Batch = dict[str, Tensor]

_rng = default_rng(1)
ROWS = [
    {
        "input_ids": _rng.integers(4, 40, source).tolist(),
        "labels": _rng.integers(4, 40, target).tolist(),
    }
    for source, target in _rng.integers(1, 20, (60, 2))
]
LENGTHS = pair_lengths(ROWS)


def padded_batch(rows: list[Row]) -> Batch:
    source = padded([row["input_ids"] for row in rows])
    labels = padded([row["labels"] for row in rows], value=-100)
    return {
        "input_ids": source,
        "attention_mask": source.ne(PAD).long(),
        "labels": labels,
    }


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: each for name, each in batch.items() if name not in names}


def loss_and_gradients(model: Any, loss: Tensor) -> Batch:
    model.zero_grad()
    loss.backward()
    gradients = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    return {"loss": loss.detach(), **gradients}


def assert_same_training(model: Any, packed: Batch, plain: Batch, forward: Any = None) -> None:
    """A packed batch has the loss and the gradients of a padded one."""
    expected = loss_and_gradients(model, model(**plain).loss)
    outputs = forward(model, packed) if forward else model(**packed)
    actual = loss_and_gradients(model, outputs.loss)
    assert_same_gradients(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_norm_position": "pre"},
        {"position_encoding_type": "learned"},
        {"position_encoding_type": "sinusoidal_split"},
        {"position_encoding_type": "sinusoidal_fairseq"},
        {
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
            "decoder_vocab_size": 41,
            "lm_head_bias": True,
        },
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_packed_rows_have_the_gradients_of_padded_pairs(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields).train().double()
    packed = PackedCollator(model.config, 32, 40, rows=16)(ROWS[:23])
    assert packed["input_ids"].shape == (16, 32)
    assert packed["labels"].shape == (16, 40)
    assert_same_training(model, packed, padded_batch(ROWS[:23]))


@pytest.mark.parametrize("vocab_size", [65_436, 70_000])
def test_unlabelled_tokens_and_large_ids_are_those_of_padded_pairs(vocab_size: int) -> None:
    """-100 is in the first place, inside and at the end of targets, and stands for the pad token in the decoder."""
    model = tiny_model(vocab_size=vocab_size, d_model=16).train()
    rng = default_rng(2)
    rows = []
    for unlabelled in [(), (0,), (2, 3), (4,)] * 3:
        ids = rng.integers(vocab_size - 200, vocab_size, 9)
        labels = ids[4:].copy()
        labels[list(unlabelled)] = -100
        rows.append({"input_ids": ids[:4].tolist(), "labels": labels.tolist()})
    layout = PackedLayout.of(model.config, (16, 20))
    parts = np.split(np.arange(12), 4)
    for pairs in (FlatPairs.of_table(Dataset.from_list(rows)), FlatPairs.of_rows(rows)):
        assert_same_training(model, layout.pack(pairs, parts), padded_batch(rows))


@pytest.mark.parametrize("extremes", [[0, 65_535], [-100, 5], [0, 65_536], [2**33, 1]])
def test_ids_of_a_column_are_kept_whatever_their_size(extremes: list[int]) -> None:
    table = Dataset.from_list([{"labels": extremes}])
    assert FlatIds.of_column(table, "labels").ids.tolist() == extremes


# Packed batches in other people's code


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_positions_and_decoder_inputs_follow_from_segments(backend: str) -> None:
    """Ids, labels and segments are enough: positions, the shift of labels and masks are made for each segment."""
    model = tiny_model(attn_implementation=backend).train().double()
    packed = PackedCollator(model.config, 32, 40)(ROWS[:23])
    shifted = model.prepare_decoder_input_ids_from_labels(
        packed["labels"], packed["decoder_segment_ids"]
    )
    used = packed["decoder_segment_ids"] != 0
    assert shifted[used].equal(packed["decoder_input_ids"][used])
    batch = without(packed, "position_ids", "decoder_position_ids", "decoder_input_ids")
    assert_same_training(model, batch, padded_batch(ROWS[:23]))


def test_mask_hides_tokens_of_packed_rows() -> None:
    """A mask (B, S) hides tokens in the middle of packed sentences as it does in padded ones."""
    model = tiny_model().double()
    rows = [row for row in ROWS if len(row["input_ids"]) > 4][:8]
    plain = padded_batch(rows)
    plain["attention_mask"][:, [0, 2]] = 0
    packed = PackedCollator(model.config, 32, 40)(rows)
    hidden = torch.isin(packed.pop("position_ids"), torch.tensor([0, 2]))
    packed["attention_mask"] = (packed["segment_ids"].ne(0) & ~hidden).long()
    assert_same_training(model, packed, plain)


def focal_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    log_p = outputs.logits.log_softmax(dim=-1)
    log_p = log_p.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    losses = -((1 - log_p.exp()) ** 2) * log_p
    return losses[labels != -100].sum() / num_items_in_batch


@pytest.mark.parametrize("loss", [None, focal_loss])
def test_stock_trainer_packs_with_the_collator(loss: Any, tmp_path: Path) -> None:
    """The updates of packed rows are those of padded pairs, also with the user's own loss."""

    def weights(collator: Any) -> dict[str, Any]:
        trainer = make_trainer(
            tmp_path,
            ROWS,
            kind=Seq2SeqTrainer,
            data_collator=collator,
            compute_loss_func=loss,
            max_steps=2,
            per_device_train_batch_size=16,
            optim="sgd",
            learning_rate=0.1,
        )
        trainer.train()
        return dict(trainer.model.named_parameters())

    packed = weights(PackedCollator(tiny_model().config, 64, 64))
    assert_same_gradients(packed, weights(padding_collator(tiny_model())))


def test_segments_that_cannot_be_masked_are_refused() -> None:
    model = tiny_model()
    batch = PackedCollator(model.config, 32, 40)(ROWS[:4])

    def shorter(name: str) -> dict[str, Any]:
        return batch | {name: batch[name][:, :-1]}

    encoded = {"encoder_outputs": (torch.zeros(*batch["input_ids"].shape, 16),)}
    refused = [
        ("segment_ids", without(batch, "segment_ids")),
        ("decoder_segment_ids", without(batch, "decoder_segment_ids")),
        ("segment_ids", shorter("segment_ids")),
        ("^segment_ids has shape", shorter("segment_ids") | encoded),
        ("^decoder_segment_ids has shape", shorter("decoder_segment_ids") | encoded),
        (
            "^decoder_segment_ids has shape .* labels",
            without(shorter("decoder_segment_ids"), "decoder_input_ids") | encoded,
        ),
    ]
    for message, inputs in refused:
        with pytest.raises(ValueError, match=message):
            model(**inputs)
    classifier = VanillaTransformerForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="segment_ids"):
        classifier(batch["input_ids"], segment_ids=batch["segment_ids"])
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention"):
        model(**batch)


@pytest.fixture(scope="module")
def packed_forward(repository: Path) -> Any:
    """The function of the guide."""
    guide = (repository / "scripts" / "docs" / "scale.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names = {}
    exec(code, names)
    return names["packed_forward"]


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(MarianMTModel, MarianConfig), (BartForConditionalGeneration, BartConfig)],
)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packed_rows_serve_other_models(
    model_class: Any, config_class: Any, backend: str, packed_forward: Any
) -> None:
    torch.manual_seed(0)
    config = config_class(
        **SMALL_SIZES,
        vocab_size=40,
        max_position_embeddings=64,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        dropout=0.0,
        attn_implementation=backend,
    )
    model = model_class(config).train().double()
    plain = padded_batch(ROWS[:23])
    packed = PackedCollator(config, 32, 40)(ROWS[:23])
    before = model(**plain).loss
    assert_same_training(model, packed, plain, packed_forward)
    assert model(**plain).loss.item() == pytest.approx(
        before.item(), rel=1e-12
    )  # positions are its own again


# Which pairs share a row


def places_by_the_rule(source: np.ndarray, target: np.ndarray, max_tokens: int) -> tuple[int, ...]:
    """S and T in proportion to the tokens of their sides, in exact shares."""

    def rounded(number: Fraction, unit: int) -> int:
        return math.ceil(number / unit) * unit

    totals = [int(source.sum()), int(target.sum())]
    longest = [int(source.max()), int(target.max())]
    shares = [Fraction(total, max(totals)) for total in totals]
    sides = list(zip(longest, shares, strict=True))
    whole = rounded(Fraction(max(longest)), 128)
    places = max(whole, *(rounded(most / share, 8) for most, share in sides))
    if max_tokens < places:
        places = max(*longest, max_tokens)
    return tuple(min(max(rounded(places * share, 8), most), places) for most, share in sides)


def test_places_of_a_row_are_in_proportion_to_the_tokens_of_their_sides() -> None:
    rng = default_rng(0)
    for _ in range(300):
        source = rng.integers(1, rng.choice([5, 40, 130, 300]), 3)
        target = rng.integers(1, rng.choice([5, 40, 130, 300]), 3)
        max_tokens = int(rng.choice([50, 128, 500, 5000]))
        places = packing.row_lengths(source, target, max_tokens)
        assert places == places_by_the_rule(source, target, max_tokens)


Lengths = tuple[int, int]  # of a pair, or of a row


def free_shares(row: list[Lengths], places: Lengths) -> list[Fraction]:
    """The free share of both sides of a row."""
    used = np.array(row).sum(axis=0).tolist()
    return [Fraction(size - tokens, size) for size, tokens in zip(places, used, strict=True)]


def rows_by_the_rule(kinds: list[Lengths], places: Lengths) -> list[list[Lengths]]:
    """The lengths of the pairs of each row, one pair after the other and in exact shares of a row."""
    left = Counter(kinds)
    rows = []
    for kind in sorted(left):
        if min(free_shares([kind], places)) < 0:
            rows += [[kind]] * left.pop(kind)
    while left.total():
        row = []
        while True:
            candidates = []
            for kind in +left:
                source, target = free_shares([*row, kind], places)
                if min(source, target) >= 0:
                    candidates.append((source + target + 2 * abs(source - target), kind))
            if not candidates:
                break
            _, best = min(candidates)
            row.append(best)
            left[best] -= 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("first_look", [2, packing.FIRST_LOOK])
@pytest.mark.parametrize("places", [(16, 12), (18, 18)])  # some pairs are longer
def test_rows_are_those_of_the_rule_for_one_pair_after_the_other(
    places: Lengths, first_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row is repeated, because its kinds of pairs are frequent."""
    monkeypatch.setattr(packing, "FIRST_LOOK", first_look)
    rng = default_rng(2)
    source = rng.integers(1, 8, 200) + 12 * (rng.random(200) < 0.1)
    target = np.maximum(source + rng.integers(-1, 2, 200), 1)
    kinds = list(zip(source.tolist(), target.tolist(), strict=True))
    rows = fill_rows(source, target, places)
    assert sorted(np.concatenate(rows)) == list(range(200))
    lengths = [[kinds[pair] for pair in row] for row in rows]
    assert lengths == rows_by_the_rule(kinds, places)


def test_rows_are_planned_in_windows_of_random_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", 25)
    sampler = PackedBatchSampler(*LENGTHS, 64, seed=3)
    first, *_, last = np.split(sampler.planned, [25, 50])
    assert sorted(sampler.planned) == list(range(60))
    assert {25, 50} <= set(sampler.row_starts.tolist())
    assert max(first) > 25
    assert min(last) < 50


@pytest.mark.parametrize("pairs", [1, 8, 16, 40])
def test_updates_share_all_rows_and_no_more(pairs: int) -> None:
    lengths = np.full(pairs, 8)
    sampler = PackedBatchSampler(lengths, lengths, 64)
    rows = len(sampler.row_starts) - 1
    rows_of_update = 64 // max(sampler.places)
    assert sampler.starts[-1] == rows
    assert len(sampler) == math.ceil(rows / rows_of_update)


@pytest.mark.parametrize("plan", [{"batches_per_update": 4}, {"tokens_per_update": 150}])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pair_occurs_once_in_an_epoch_and_updates_are_those_of_one_rank(
    plan: dict[str, int], world_size: int
) -> None:
    def updates(world_size: int, rank: int, epoch: int) -> list[set[int]]:
        sampler = PackedBatchSampler(
            *LENGTHS,
            64,
            seed=3,
            world_size=world_size,
            rank=rank,
            **plan,
        )
        sampler.set_epoch(epoch)
        planned = list(sampler)
        assert len(planned) == len(sampler)
        assert {len(batch) for batch in chain(*planned)} == {sampler.rows_of_batch}
        assert sampler.rows_of_batch * max(sampler.places) <= 64
        if batches := plan.get("batches_per_update"):
            assert {len(update) for update in planned} == {math.ceil(batches / world_size)}
        return [set(np.concatenate([*chain(*update)]).tolist()) for update in planned]

    for epoch in (0, 1):
        together = updates(1, 0, epoch)
        assert sorted(chain(*together)) == list(range(60))
        ranks = [updates(world_size, rank, epoch) for rank in range(world_size)]
        assert [set().union(*parts) for parts in zip(*ranks, strict=True)] == together
    assert updates(1, 0, 0) != together
    assert updates(1, 0, 1) == together


@pytest.mark.parametrize("most_rows", [1, 3, 8])
def test_number_of_updates_is_the_best_within_a_tenth_of_the_requested(most_rows: int) -> None:
    def empty_rows(rows: int, updates: int) -> int:
        """Updates differ by one row, and all have the batches and the rows of the largest."""
        most = math.ceil(rows / updates)
        batches = math.ceil(most / most_rows)
        return updates * batches * math.ceil(most / batches) - rows

    for rows in (1, 9, 100, 333, 1000):
        for requested in (1, 10, 19, 64, 90, 100, 250, 2000):
            nearest = min(requested, rows)
            allowed = [
                updates for updates in range(1, rows + 1) if 10 * abs(updates - nearest) <= nearest
            ]
            chosen = even_updates(rows, requested, most_rows)
            ranks = {
                updates: (empty_rows(rows, updates), abs(updates - nearest)) for updates in allowed
            }
            assert ranks[chosen] == min(ranks.values())


@pytest.mark.parametrize("size", [1, 2**31 - 1, 2**31, 2**40])
def test_pairs_are_numbered_by_the_smaller_dtype_that_has_their_number(size: int) -> None:
    dtype = packing._index_dtype(size)
    assert dtype is (np.int32 if size < 2**31 else np.int64)


# The tensors of packed rows


def test_table_and_rows_make_the_same_tensors() -> None:
    table = Dataset.from_list(ROWS).select(range(5, 50))  # its ids are read through an index
    assert FlatPairs.of_table(table).source.ids.dtype.itemsize <= 2
    sampler = PackedBatchSampler(*pair_lengths(table), 120, seed=1)
    layout = PackedLayout(sampler.places, PAD, PAD, START)
    planned = next(iter(sampler))
    of_table = PackedPairs(table, layout, sampler).__getitems__(planned)
    of_rows = PackedPairs(ROWS[5:50], layout, sampler).__getitems__(planned)
    assert_close(of_table, of_rows, rtol=0, atol=0)


@pytest.mark.parametrize(
    "source",
    [{"input_ids": []}, {"input_ids": [5], "attention_mask": [0]}],
    ids=["empty", "hidden"],
)
def test_pair_without_a_source_is_refused(source: dict[str, list[int]]) -> None:
    row = {"input_ids": [4, 2], "attention_mask": [1, 1], "labels": [6, 2]}
    rows = [row, {**row, "attention_mask": [], **source}]
    for make in (FlatPairs.of_rows, lambda rows: FlatPairs.of_table(Dataset.from_list(rows))):
        make([row])
        with pytest.raises(ValueError, match="no source token.*: leave it out"):
            make(rows)


def doubled(row: Row, epoch: int = 0) -> Row:
    return {name: ids * 2 for name, ids in row.items()}


class Changing(list):
    """Pairs that are twice as long when they are read."""

    def __getitems__(self, numbers: list[int]) -> list[Row]:
        return [doubled(self[number]) for number in numbers]


def targets_of(batch: Batch) -> list[tuple[int, ...]]:
    """The labels of each pair, row by row."""
    targets = []
    for labels, segments in zip(batch["labels"], batch["decoder_segment_ids"], strict=True):
        targets += [
            tuple(labels[segments == segment].tolist()) for segment in segments.unique() if segment
        ]
    return targets


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("collator", [None, padded_batch])
def test_pairs_that_change_are_packed_once_over_all_ranks(world_size: int, collator: Any) -> None:
    """Augmented ones are dealt anew, and those of an own collator stay in their batches."""
    data = Changing(ROWS) if collator else RedrawnDataset(Dataset.from_list(ROWS), doubled)
    targets = []
    counts = []
    for rank in range(world_size):
        sampler = PackedBatchSampler(
            *LENGTHS,
            64,
            batches_per_update=4,
            world_size=world_size,
            rank=rank,
        )
        layout = PackedLayout(sampler.places, PAD, PAD, START)
        updates = PackedPairs(data, layout, sampler, collator)
        made = [updates.__getitems__(planned) for planned in sampler]
        numbers = [updates.numbers(planned) for planned in sampler]
        counts.append([len(update) for update in made])
        for batch, pairs in zip(chain(*made), chain(*numbers), strict=True):
            expected = [tuple(ROWS[pair]["labels"] * 2) for pair in pairs]
            assert sorted(targets_of(batch)) == sorted(expected)
            targets += expected
            if collator is None:  # a pair has as many rows as it needs
                rows, width = batch["labels"].shape
                times = width // layout.places[1]
                assert batch["input_ids"].shape == (rows, times * layout.places[0])
                assert width == times * layout.places[1]
                assert rows == max(1, sampler.rows_of_batch // times)
                sizes = 2 * np.stack(LENGTHS, axis=1)[pairs]
                needed = np.ceil(sizes / layout.places).max(axis=1)
                assert set(needed) <= {times}
    assert sorted(targets) == sorted(tuple(row["labels"] * 2) for row in ROWS)
    assert all(each == counts[0] for each in counts), "all ranks make the same number of batches"


def test_pairs_of_a_collator_stay_in_their_rows_while_they_fit() -> None:
    planned = [np.array(row) for row in ([0, 1], [2, 3], [4])]
    sizes = [(3, 4), (5, 2), (2, 2), (2, 2), (8, 6)]
    rows = [
        {"input_ids": [10 + pair] * source, "labels": [20 + pair] * target}
        for pair, (source, target) in enumerate(sizes)
    ]
    sampler = PackedBatchSampler(*np.array(sizes).T, 8)
    layout = PackedLayout((8, 6), PAD, PAD, START)

    def packed(rows: list[Row]) -> Batch:
        """A batch of a collator that returns these rows."""
        each = PackedPairs(ROWS, layout, sampler, lambda planned: padded_batch(rows))
        return each.collated(planned, each.collator)

    expected = layout.pack(FlatPairs.of_rows(rows), planned)
    assert_close(packed(rows), expected, rtol=0, atol=0)
    shorter = {"input_ids": [6], "labels": [6]}
    for side, places in (("input_ids", 8), ("labels", 6)):
        for more in (0, 1):  # than the places of a row
            longer = shorter | {side: [9] * (places + more)}
            for changed in ([*rows[:4], longer], [*rows[:3], longer, shorter]):
                batch = packed(changed)
                rows_of_batch, width = batch[side].shape
                in_rows = batch[side].eq(9).sum(dim=1)
                assert width == in_rows.max() == in_rows.sum() == places + more
                assert rows_of_batch in (3, 4)
    fewer = packed(rows[:3])
    assert fewer["labels"].shape == (3, 6)
    assert sorted(map(len, targets_of(fewer))) == [2, 2, 4]


def test_fixed_rows_are_those_that_no_code_of_the_caller_makes() -> None:
    table = Dataset.from_list(ROWS)
    for data in (table, table.with_format("numpy"), ROWS, tuple(ROWS), []):
        assert packing.is_fixed(data)
        assert packing.is_fixed(Subset(data, [0]))
        assert packing.is_fixed(ConcatDataset([ROWS, table]))
    for data in (table.with_transform(dict), Changing(ROWS), [[]], [UserDict()]):
        assert not packing.is_fixed(data)
        assert not packing.is_fixed(Subset(data, [0]))
        assert not packing.is_fixed(ConcatDataset([table, data]))


def test_collator_leaves_hidden_tokens_out_and_has_the_rows_that_were_asked_for() -> None:
    config = tiny_model().config
    long = [row for row in ROWS if len(row["input_ids"]) > 1]
    hidden = [{**row, "attention_mask": [0, *[1] * (len(row["input_ids"]) - 1)]} for row in long]
    batch = PackedCollator(config, 32, 40)(hidden)
    visible = chain(*(row["input_ids"][1:] for row in long))
    assert sorted(batch["input_ids"][batch["segment_ids"] != 0].tolist()) == sorted(visible)
    needed = len(PackedCollator(config, 32, 40)(ROWS)["labels"])
    for rows in (needed, needed + 2):
        assert len(PackedCollator(config, 32, 40, rows)(ROWS)["labels"]) == rows
    message = rf"^60 pairs need {needed} rows of \(32, 40\) places, not {needed - 1}$"
    with pytest.raises(ValueError, match=message):
        PackedCollator(config, 32, 40, needed - 1)(ROWS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROWS[0], "weight": 1}, "^packed rows have no place for weight, only for input_ids, "),
        ({"labels": [5]}, "^packed rows need input_ids and labels, not labels$"),
        ({**ROWS[0], "attention_mask": [1]}, "^attention_mask has other lengths than input_ids$"),
        ({"input_ids": [5] * 33, "labels": [5]}, "^33 tokens in a row of 32 places$"),
    ],
)
def test_collator_refuses_columns_without_a_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCollator(tiny_model().config, 32, 40)([row])


def test_batch_with_a_mask_of_four_dimensions_has_no_place() -> None:
    ids = np.array([[5, 6, 2], [7, 2, 1]])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": (ids != 1)[:, None, None]}
    message = r"^packed rows have no place for attention_mask of shape \(2, 1, 1, 3\)$"
    with pytest.raises(ValueError, match=message):
        FlatPairs.of_batch(batch, 1)


# mean, standard deviation of the logarithm, longest sentence, standard deviation of the ratio of both sides
NATURAL = {
    "Multi30k": (13.5, 0.35, 45, 0.15),
    "WMT14": (26.0, 0.6, 250, 0.2),
    "WMT14, unlike": (26.0, 0.6, 250, 0.3),
}


@pytest.mark.parametrize(
    "plan", [{"max_tokens": 16_384}, {"max_tokens": 4_096, "tokens_per_update": 25_000}], ids=str
)
@pytest.mark.parametrize("corpus", NATURAL)
def test_natural_lengths_leave_few_places_free(corpus: str, plan: dict[str, int]) -> None:
    mean, deviation, longest, ratio = NATURAL[corpus]
    rng = default_rng(0)
    source = (
        rng.lognormal(np.log(mean) - deviation**2 / 2, deviation, 20_000).round().clip(1, longest)
    )
    target = (source * 28 / 26 * np.exp(rng.normal(0, ratio, 20_000))).round().clip(1, longest)
    sampler = PackedBatchSampler(source.astype(int), target.astype(int), **plan)
    batches = sampler.updates * sampler.batches_of_update
    places = batches * sampler.rows_of_batch * sum(sampler.places)
    assert 1 - (source.sum() + target.sum()) / places <= 0.04
    if "tokens_per_update" in plan:
        assert target.sum() / sampler.updates == pytest.approx(plan["tokens_per_update"], rel=0.12)
