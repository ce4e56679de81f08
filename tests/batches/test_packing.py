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
from accelerate import Accelerator
from datasets import Dataset
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
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
from tests.model_helpers import PAD, START, padded, tiny_model
from tests.trainer_helpers import QUIET

ROWS: list[dict[str, list[int]]] = []
_rng = np.random.default_rng(1)
for _ in range(60):
    source, target = (_rng.integers(4, 40, _rng.integers(1, 20)).tolist() for _ in range(2))
    ROWS.append({"input_ids": source, "labels": target})
LENGTHS = [np.array([len(row[name]) for row in ROWS]) for name in ("input_ids", "labels")]


def padded_batch(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    source = padded([row["input_ids"] for row in rows])
    labels = padded([row["labels"] for row in rows], value=-100)
    return {"input_ids": source, "attention_mask": source.ne(PAD).long(), "labels": labels}


def exact_gradients(model: Any, batch: dict[str, Any], forward: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, where the models' own losses are float32."""
    model.zero_grad()
    labels = batch.pop("labels")
    if forward is None and "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    logits = (forward or model)(**batch).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


VARIANTS: list[dict[str, Any]] = [
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
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_packed_rows_have_the_gradients_of_padded_pairs(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields).train().double()
    rows = ROWS[:23]
    loss, expected = exact_gradients(model, padded_batch(rows))
    batch = PackedCollator(model.config, 32, 40, rows=16)(rows)
    assert batch["input_ids"].shape == (16, 32)
    assert batch["labels"].shape == (16, 40)
    found, actual = exact_gradients(model, batch)
    # Sinusoids are float32, and equal in both.
    assert found == pytest.approx(loss, rel=1e-9)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("vocab_size", [65_436, 70_000])
def test_unlabelled_tokens_and_large_ids_are_those_of_padded_pairs(vocab_size: int) -> None:
    """-100 is in the first place, inside and at the end of targets, and stands for the pad token in the decoder."""
    model = tiny_model(vocab_size=vocab_size, d_model=16).train()
    rng = np.random.default_rng(2)
    rows: list[dict[str, list[int]]] = []
    for number in range(12):
        source, labels = (rng.integers(vocab_size - 200, vocab_size, size).tolist() for size in (4, 5))
        for place in ((), (0,), (2, 3), (4,))[number % 4]:
            labels[place] = -100
        rows.append({"input_ids": source, "labels": labels})
    expected = model(**padded_batch(rows)).loss
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    layout = PackedLayout.of(model.config, (16, 20))
    parts = np.split(np.arange(len(rows)), 4)
    for pairs in (FlatPairs.of_table(Dataset.from_list(rows)), FlatPairs.of_rows(rows)):
        model.zero_grad()
        loss = model(**layout.pack(pairs, parts)).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_ids_of_a_column_are_kept_whatever_their_size() -> None:
    for extremes in ([0, 65_535], [-100, 5], [0, 65_536], [2**33, 1]):
        column = FlatIds.of_column(Dataset.from_list([{"labels": extremes}]), "labels")
        assert column.ids.tolist() == extremes


# Packed batches in other people's code


def padded_collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded_batch(rows)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_positions_and_decoder_inputs_follow_from_segments(backend: str) -> None:
    """Ids, labels and segments are enough: positions, the shift of labels and masks are made for each segment."""
    model = tiny_model(attn_implementation=backend).train().double()
    rows = ROWS[:23]
    loss, expected = exact_gradients(model, padded_batch(rows))
    packed = PackedCollator(model.config, 32, 40)(rows)
    batch = {name: packed[name] for name in ("input_ids", "labels", "segment_ids", "decoder_segment_ids")}
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"], batch["decoder_segment_ids"])
    places = packed["decoder_segment_ids"] != 0
    assert shifted[places].equal(packed["decoder_input_ids"][places])
    found, actual = exact_gradients(model, batch | {"decoder_input_ids": shifted})
    assert found == pytest.approx(loss, rel=1e-9)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    assert model(**batch).loss.item() == pytest.approx(model(**padded_batch(rows)).loss.item(), rel=1e-6)


def test_mask_hides_tokens_of_packed_rows() -> None:
    """A mask (B, S) hides tokens in the middle of packed sentences as it does in padded ones."""
    model = tiny_model().double()
    rows = [row for row in ROWS if len(row["input_ids"]) > 4][:8]
    padded_rows = padded_batch(rows)
    padded_rows["attention_mask"][:, [0, 2]] = 0
    packed = PackedCollator(model.config, 32, 40)(rows)
    mask = packed["segment_ids"].ne(0) & ~torch.isin(packed.pop("position_ids"), torch.tensor([0, 2]))
    loss, expected = exact_gradients(model, padded_rows)
    found, actual = exact_gradients(model, packed | {"attention_mask": mask.long()})
    assert found == pytest.approx(loss, rel=1e-9)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def _focal(outputs: Any, labels: torch.Tensor, num_items: Any = None) -> torch.Tensor:
    log_p = outputs.logits.log_softmax(dim=-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    losses = -((1 - log_p.exp()) ** 2) * log_p
    count = (labels != -100).sum() if num_items is None else num_items
    return losses[labels != -100].sum() / count


class OwnLoss(Seq2SeqTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = _focal(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class OwnStep(Seq2SeqTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = _focal(model(**inputs), inputs["labels"], num_items_in_batch)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("trainer_class", [Seq2SeqTrainer, OwnLoss, OwnStep], ids=lambda each: each.__name__)
def test_stock_trainer_packs_with_the_collator(trainer_class: type[Seq2SeqTrainer], tmp_path: Path) -> None:
    """The updates of packed rows are those of padded pairs, also with the user's own loss or step."""
    weights = []
    for collator in (padded_collator, PackedCollator(tiny_model().config, 64, 64)):
        model = tiny_model()
        settings = {"max_steps": 2, "per_device_train_batch_size": 16, "optim": "sgd", "learning_rate": 0.1}
        args = Seq2SeqTrainingArguments(str(tmp_path), **settings, **QUIET)
        trainer_class(model=model, args=args, train_dataset=ROWS, data_collator=collator).train()
        weights.append(dict(model.named_parameters()))
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_plain_loop_packs_with_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    losses = []
    for collator in (padded_collator, PackedCollator(tiny_model().config, 64, 64)):
        model, loader = accelerator.prepare(tiny_model().train(), DataLoader(ROWS[:24], 24, collate_fn=collator))
        for batch in loader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            losses.append(outputs.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_segments_that_cannot_be_masked_are_refused() -> None:
    model = tiny_model()
    batch = PackedCollator(model.config, 32, 40)(ROWS[:4])
    one_side = {name: each for name, each in batch.items() if name != "segment_ids"}
    with pytest.raises(ValueError, match="segment_ids"):
        model(**one_side)
    with pytest.raises(ValueError, match="segment_ids"):
        model(**batch | {"segment_ids": batch["segment_ids"][:, :-1]})
    for name in ("segment_ids", "decoder_segment_ids"):
        shorter = batch | {name: batch[name][:, :-1], "encoder_outputs": (torch.zeros(*batch["input_ids"].shape, 16),)}
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            model(**shorter)
    labels_only = {name: each for name, each in shorter.items() if name != "decoder_input_ids"}
    with pytest.raises(ValueError, match="^decoder_segment_ids has shape .* labels"):
        model(**labels_only)
    other = {name: each for name, each in batch.items() if name != "decoder_segment_ids"}
    with pytest.raises(ValueError, match="decoder_segment_ids"):
        model(**other)
    classifier = VanillaTransformerForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="segment_ids"):
        classifier(batch["input_ids"], segment_ids=batch["segment_ids"])
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention"):
        model(**batch)


OTHERS = {
    "Marian": (MarianMTModel, MarianConfig, {"decoder_start_token_id": START}),
    "BART": (BartForConditionalGeneration, BartConfig, {"decoder_start_token_id": START, "forced_eos_token_id": None}),
}


@pytest.fixture(scope="module")
def packed_forward(repository: Path) -> Any:
    """The function of the guide."""
    guide = (repository / "scripts" / "docs" / "scale.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["packed_forward"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packed_rows_serve_other_models(name: str, backend: str, packed_forward: Any) -> None:
    model_class, config_class, fields = OTHERS[name]
    sizes: dict[str, Any] = {"d_model": 32, "vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": PAD}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}
    torch.manual_seed(0)
    config = config_class(**sizes, **fields, dropout=0.0, attn_implementation=backend)
    model = model_class(config).train().double()
    rows = ROWS[:23]
    plain = padded_batch(rows)
    model.zero_grad()
    loss = model(**plain).loss
    loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    packed = packed_forward(model, PackedCollator(config, 32, 40)(rows)).loss
    packed.backward()
    assert packed.item() == pytest.approx(loss.item(), rel=1e-9)
    for key, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-9, atol=1e-9, msg=key)
    assert model(**plain).loss.item() == pytest.approx(loss.item(), rel=1e-12)  # positions are its own again


def places_by_the_rule(source: np.ndarray, target: np.ndarray, max_tokens: int) -> tuple[int, ...]:
    """S and T in proportion to the tokens of their sides, in exact shares."""

    def rounded(number: Fraction, unit: int) -> int:
        return math.ceil(number / unit) * unit

    totals = [Fraction(int(side.sum())) for side in (source, target)]
    longest = [int(side.max()) for side in (source, target)]
    shares = [total / max(totals) for total in totals]
    places = rounded(Fraction(max(longest)), 128)
    places = max(places, *(rounded(most / share, 8) for most, share in zip(longest, shares, strict=True)))
    if max_tokens < places:
        places = max(*longest, max_tokens)
    both = zip(longest, shares, strict=True)
    return tuple(min(max(rounded(places * share, 8), most), places) for most, share in both)


def test_places_of_a_row_are_in_proportion_to_the_tokens_of_their_sides() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        source, target = (rng.integers(1, rng.choice([5, 40, 130, 300]), 3) for _ in range(2))
        places = packing.row_lengths(source, target, max_tokens := int(rng.choice([50, 128, 500, 5000])))
        assert places == places_by_the_rule(source, target, max_tokens)


def rows_by_the_rule(kinds: list[tuple[int, int]], places: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """The lengths of the pairs of each row, one pair after the other and in exact shares of a row."""
    left = Counter(kinds)
    rows = []
    for kind in sorted(left):
        if kind[0] > places[0] or kind[1] > places[1]:
            rows += [[kind]] * left.pop(kind)
    while left.total():
        row: list[tuple[int, int]] = []
        while True:
            candidates = []
            for kind in (each for each, count in left.items() if count):
                free = [
                    Fraction(size - sum(lengths) - length, size)
                    for size, length, *lengths in zip(places, kind, *row, strict=True)
                ]
                if min(free) >= 0:
                    candidates.append((sum(free) + 2 * abs(free[0] - free[1]), kind))
            if not candidates:
                break
            row.append(min(candidates)[1])
            left[row[-1]] -= 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("first_look", [2, packing.FIRST_LOOK])
@pytest.mark.parametrize("places", [(16, 12), (18, 18)])  # some pairs are longer
def test_rows_are_those_of_the_rule_for_one_pair_after_the_other(
    places: tuple[int, int], first_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row is repeated, because its kinds of pairs are frequent."""
    monkeypatch.setattr(packing, "FIRST_LOOK", first_look)
    rng = np.random.default_rng(2)
    source = rng.integers(1, 8, 200) + 12 * (rng.random(200) < 0.1)
    target = np.maximum(source + rng.integers(-1, 2, 200), 1)
    rows = fill_rows(source, target, places)
    assert sorted(np.concatenate(rows)) == list(range(200))
    lengths = [[(int(source[pair]), int(target[pair])) for pair in row] for row in rows]
    kinds = list(zip(source.tolist(), target.tolist(), strict=True))
    assert lengths == rows_by_the_rule(kinds, places)


def test_rows_are_planned_in_windows_of_random_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", 25)
    sampler = PackedBatchSampler(*LENGTHS, 64, seed=3)
    first, *_, last = np.split(sampler.planned, [25, 50])
    assert sorted(sampler.planned) == list(range(len(ROWS)))
    assert {25, 50} <= set(sampler.row_starts.tolist())
    assert max(first) > 25 and min(last) < 50


@pytest.mark.parametrize("plan", [{"batches_per_update": 4}, {"tokens_per_update": 150}])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pair_occurs_once_in_an_epoch_and_updates_are_those_of_one_rank(
    plan: dict[str, int], world_size: int
) -> None:
    def updates(world_size: int, rank: int, epoch: int) -> list[set[int]]:
        sampler = PackedBatchSampler(*LENGTHS, 64, seed=3, world_size=world_size, rank=rank, **plan)
        sampler.set_epoch(epoch)
        shapes = {len(batch) for update in sampler for batch in update}
        assert shapes == {sampler.rows_of_batch}
        assert len(list(sampler)) == len(sampler)
        assert sampler.rows_of_batch * max(sampler.places) <= 64
        if batches := plan.get("batches_per_update"):
            assert {len(update) for update in sampler} == {math.ceil(batches / world_size)}
        return [{int(pair) for batch in update for row in batch for pair in row} for update in sampler]

    for epoch in (0, 1):
        together = updates(1, 0, epoch)
        assert sorted(pair for update in together for pair in update) == list(range(len(ROWS)))
        ranks = [updates(world_size, rank, epoch) for rank in range(world_size)]
        assert [set().union(*parts) for parts in zip(*ranks, strict=True)] == together
    assert updates(1, 0, 0) != updates(1, 0, 1)
    assert updates(1, 0, 1) == updates(1, 0, 1)


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
            allowed = [updates for updates in range(1, rows + 1) if 10 * abs(updates - nearest) <= nearest]
            fewest = min(empty_rows(rows, updates) for updates in allowed)
            best = [updates for updates in allowed if empty_rows(rows, updates) == fewest]
            chosen = even_updates(rows, requested, most_rows)
            assert chosen in best
            assert abs(chosen - nearest) == min(abs(updates - nearest) for updates in best)


@pytest.mark.parametrize("size", [1, 2**31 - 1, 2**31, 2**40])
def test_pairs_are_numbered_by_the_smaller_dtype_that_has_their_number(size: int) -> None:
    dtype = packing._index_dtype(size)
    assert dtype(size) == size
    assert dtype is (np.int32 if size < 2**31 else np.int64)


def test_table_and_rows_make_the_same_tensors() -> None:
    table = Dataset.from_list(ROWS).select(range(5, 50))  # its ids are read through an index
    sampler = PackedBatchSampler(*pair_lengths(table), 120, seed=1)
    places, target_places = sampler.places
    layout = PackedLayout(sampler.places, PAD, PAD, START)
    planned = next(iter(sampler))
    of_table = PackedPairs(table, layout, sampler).__getitems__(planned)
    of_rows = PackedPairs(ROWS[5:50], layout, sampler).__getitems__(planned)
    flat = FlatPairs.of_table(table)
    assert flat.source.ids.dtype.itemsize <= 2
    for one, other in zip(of_table, of_rows, strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
    # the tokens of the pairs, written down one by one
    batch = of_table[0]
    for row, pairs in enumerate(planned[0]):
        ids = [token for pair in pairs for token in table[int(pair)]["input_ids"]]
        assert batch["input_ids"][row].tolist() == ids + [PAD] * (places - len(ids))
        inputs = [token for pair in pairs for token in [START, *table[int(pair)]["labels"][:-1]]]
        assert batch["decoder_input_ids"][row].tolist() == inputs + [PAD] * (target_places - len(inputs))


class Changing:
    """Pairs that are twice as long when they are read."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return ROWS[number]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, list[int]]]:
        return [doubled(ROWS[number], 0) for number in numbers]


def segment_lengths(batch: dict[str, torch.Tensor]) -> list[int]:
    """Tokens of the targets, row by row."""
    rows = (row.unique(return_counts=True) for row in batch["decoder_segment_ids"])
    return [int(count) for names, counts in rows for name, count in zip(names, counts, strict=True) if name]


def doubled(row: dict[str, list[int]], epoch: int) -> dict[str, list[int]]:
    return {name: ids * 2 for name, ids in row.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("collator", [None, padded_batch])
def test_pairs_that_change_are_packed_once_over_all_ranks(world_size: int, collator: Any) -> None:
    """Augmented ones are dealt anew, and those of an own collator stay in their batches."""
    data: Any = Changing() if collator else RedrawnDataset(Dataset.from_list(ROWS), doubled)
    targets: list[tuple[int, ...]] = []
    batches = []
    for rank in range(world_size):
        sampler = PackedBatchSampler(*LENGTHS, 64, batches_per_update=4, world_size=world_size, rank=rank)
        layout = PackedLayout(sampler.places, PAD, PAD, START)
        updates = PackedPairs(data, layout, sampler, collator)
        made = [updates.__getitems__(planned) for planned in sampler]
        batches.append([len(update) for update in made])
        numbers = [updates.numbers(planned) for planned in sampler]
        for batch, pairs in zip(chain(*made), chain(*numbers), strict=True):
            lengths = sorted(len(ROWS[pair]["labels"]) * 2 for pair in pairs)
            assert lengths == sorted(segment_lengths(batch))
            if collator is None:  # a pair has as many rows as it needs
                times, rest = divmod(batch["labels"].shape[1], layout.places[1])
                assert batch["input_ids"].shape[1] == times * layout.places[0]
                assert (batch["labels"].shape[0], rest) == (max(1, sampler.rows_of_batch // times), 0)
                sizes = [[2 * side[pair] for side in LENGTHS] for pair in pairs]
                assert {max(-(-np.array(each) // layout.places)) for each in sizes} <= {times}
            for row, segments in zip(batch["labels"], batch["decoder_segment_ids"], strict=True):
                targets += [tuple(row[segments == segment].tolist()) for segment in segments.unique() if segment]
    assert sorted(targets) == sorted(tuple(row["labels"] * 2) for row in ROWS)
    assert all(each == batches[0] for each in batches), "all ranks make the same number of batches"


def test_pairs_of_a_collator_stay_in_their_rows_while_they_fit() -> None:
    planned = [np.array(row) for row in ([0, 1], [2, 3], [4])]
    sizes = [(3, 4), (5, 2), (2, 2), (2, 2), (8, 6)]
    rows = [{"input_ids": [5 + n] * source, "labels": [5 + n] * target} for n, (source, target) in enumerate(sizes)]
    sampler = PackedBatchSampler(*np.array(sizes).T, 8)
    layout = PackedLayout((8, 6), PAD, PAD, START)

    def packed(*changed: Any) -> dict[str, torch.Tensor]:
        each = PackedPairs(rows, layout, sampler, lambda pairs: padded_batch([*map(dict.__or__, pairs, changed)]))
        return each.collated(planned, each.collator)

    same: list[Any] = [{}] * len(rows)
    expected = layout.pack(FlatPairs.of_rows(rows), planned)
    for name, tensor in packed(*same).items():
        assert tensor.equal(expected[name]), name
    for side, places in (("input_ids", 8), ("labels", 6)):
        shorter = {"input_ids": [6], "labels": [6]}
        for more in (0, 1):  # than the places of a row
            longer = {**shorter, side: [9] * (places + more)}
            for batch in (packed(*same[:4], longer), packed(*same[:3], longer, shorter)):
                assert batch[side].shape[1] == places + more
                assert batch[side].eq(9).sum() == batch[side].eq(9).sum(dim=1).max() >= places + more
                assert len(batch[side]) in (3, 4)
    fewer = packed(*same[:3])
    assert fewer["labels"].shape == (3, 6)
    assert sorted(segment_lengths(fewer)) == [2, 2, 4]


def test_fixed_rows_are_those_that_no_code_of_the_caller_makes() -> None:
    table = Dataset.from_list(ROWS)
    changing = Changing()
    parts = (torch.utils.data.Subset, torch.utils.data.ConcatDataset)
    for data in (table, table.with_format("numpy"), ROWS, tuple(ROWS), []):
        assert packing.is_fixed(data)
        assert packing.is_fixed(parts[0](data, [0])) and packing.is_fixed(parts[1]([ROWS, table]))
    for data in (table.with_transform(dict), [changing], changing, type("Own", (list,), {})(ROWS), [UserDict()]):
        assert not packing.is_fixed(data)
        assert not packing.is_fixed(parts[0](data, [0])) and not packing.is_fixed(parts[1]([table, [changing]]))


def test_collator_refuses_columns_without_a_place() -> None:
    collator = PackedCollator(tiny_model().config, 32, 40)
    hidden = [{**row, "attention_mask": [0, *[1] * (len(row["input_ids"]) - 1)]} for row in ROWS]
    batch = collator(hidden)
    visible = sorted(token for row in ROWS for token in row["input_ids"][1:])
    assert sorted(batch["input_ids"][batch["segment_ids"] != 0].tolist()) == visible
    with pytest.raises(ValueError, match="^packed rows have no place for weight, only for input_ids, "):
        collator([{**ROWS[0], "weight": 1}])
    with pytest.raises(ValueError, match="^packed rows need input_ids and labels, not labels$"):
        collator([{"labels": [5]}])
    with pytest.raises(ValueError, match="^attention_mask has other lengths than input_ids$"):
        collator([{**ROWS[0], "attention_mask": [1]}])
    needed = len(collator(ROWS)["labels"])
    with pytest.raises(ValueError, match=rf"^60 pairs need {needed} rows of \(32, 40\) places, not {needed - 1}$"):
        PackedCollator(tiny_model().config, 32, 40, rows=needed - 1)(ROWS)
    for rows in (needed, needed + 2):
        assert len(PackedCollator(tiny_model().config, 32, 40, rows)(ROWS)["labels"]) == rows
    with pytest.raises(ValueError, match="^33 tokens in a row of 32 places$"):
        collator([{"input_ids": [5] * 33, "labels": [5]}])


# mean, standard deviation of the logarithm, longest sentence, standard deviation of the ratio of both sides
NATURAL = {"Multi30k": (13.5, 0.35, 45, 0.15), "WMT14": (26.0, 0.6, 250, 0.2), "WMT14, unlike": (26.0, 0.6, 250, 0.3)}
PLANS: list[dict[str, int]] = [{"max_tokens": 16_384}, {"max_tokens": 4_096, "tokens_per_update": 25_000}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("corpus", NATURAL)
def test_natural_lengths_leave_few_places_free(corpus: str, plan: dict[str, int]) -> None:
    mean, deviation, longest, ratio = NATURAL[corpus]
    rng = np.random.default_rng(0)
    source = rng.lognormal(np.log(mean) - deviation**2 / 2, deviation, 20_000).round().clip(1, longest)
    target = (source * 28 / 26 * np.exp(rng.normal(0, ratio, len(source)))).round().clip(1, longest)
    source, target = source.astype(int), target.astype(int)
    sampler = PackedBatchSampler(source, target, **plan)
    places = sampler.updates * sampler.batches_of_update * sampler.rows_of_batch * sum(sampler.places)
    assert 1 - (source.sum() + target.sum()) / places <= 0.04
    if "tokens_per_update" in plan:
        assert target.sum() / sampler.updates == pytest.approx(plan["tokens_per_update"], rel=0.12)
