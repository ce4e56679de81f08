"""Steps of the trainer's update, its lines and its loaders, each with small objects in place of a run."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace as Fake
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers.trainer_pt_utils import LabelSmoother

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.batches.batching import LengthGroupedSampler, TokenBatchSampler
from hf_vanilla_transformer.batches.packing import PLAN_VERSION
from hf_vanilla_transformer.training.state.fingerprint import PACKING
from hf_vanilla_transformer.training.trainer import fast_paths, loaders, ownership
from hf_vanilla_transformer.training.trainer.fast_paths import (
    CAST_WEIGHTS,
    COMPILED_UPDATES,
    FUSED_LOSS,
    PACKED_ROWS,
    ROUNDED_SHAPES,
    Condition,
    FastPath,
)
from hf_vanilla_transformer.training.trainer.forward import ForwardChoice
from hf_vanilla_transformer.training.trainer.translating_trainer import TranslatingTrainer
from tests.model_helpers import error_of
from tests.trainer_helpers import uninitialised

bare = partial(uninitialised, VanillaTransformerTrainer)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("norm", [1.0, math.inf, math.nan])
def test_gradient_that_is_not_finite_is_an_error_or_left_out(norm: float, skips: bool) -> None:
    model = nn.Linear(1, 1)
    model.weight.grad = torch.ones(1, 1)
    trainer = bare(
        state=Fake(global_step=4),
        args=Fake(skip_nonfinite_gradients=skips),
        losses=Fake(skipped=0),
        _lines_of_gradient=lambda model: [3],
    )
    is_wrong = not math.isfinite(norm)
    for number in (norm, torch.tensor(norm)):
        if is_wrong and not skips:
            message = error_of(trainer._check_gradient, model, number)
            assert f"the gradient of update 5 is not finite (its norm is {norm})" in message
        else:
            trainer._check_gradient(model, number)
    assert trainer.losses.skipped == (2 if is_wrong and skips else 0)
    assert (model.weight.grad is None) is (is_wrong and skips)


@pytest.mark.parametrize(
    ("sharded", "skips", "asked"), [(False, True, 1), (False, False, 1), (True, False, 0)]
)
def test_norm_on_a_device_is_read_later(
    sharded: bool, skips: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    added: list[Any] = []
    monkeypatch.setattr(
        "hf_vanilla_transformer.training.trainer.trainer.leave_out_on_device",
        lambda *given: told.append(given) or True,
    )
    trainer = bare(
        state=Fake(global_step=4),
        args=Fake(skip_nonfinite_gradients=skips),
        losses=Fake(add=lambda *given: added.append(given)),
        is_fsdp_enabled=sharded,
        optimizer="fused",
    )
    norm = torch.zeros((), device="meta")
    trainer._check_gradient(nn.Linear(1, 1), norm)
    assert added == [(4, None, norm)]
    assert told == [("fused", norm)] * asked


@pytest.mark.parametrize(
    ("data", "update", "lines"),
    [
        ([], 5, None),  # of the epoch before
        ([], 6, [1, 4]),
        ([], 8, [3, 4]),
        (Dataset.from_dict({"line": [10, 20, 30, 40]}), 7, [20, 40]),
    ],
)
def test_lines_are_those_of_the_rows_of_a_batch(data: Any, update: int, lines: Any) -> None:
    trainer = bare(_epoch_start=6, train_dataset=data, _rows_of_batch=lambda *given: list(given))
    assert trainer._lines_of_batch(update, 3) == lines
    trainer._rows_of_batch = lambda *given: None
    assert trainer._lines_of_batch(update, 3) is None


def test_rows_are_those_of_the_plan_or_of_the_sampler() -> None:
    updates = MagicMock(spec=TokenBatchSampler)
    pairs = Fake(numbers=lambda batches: [[1, 2], [3]])
    trainer = bare(_updates=updates, _pairs=pairs)
    assert trainer._rows_of_batch(5, None) == [1, 2, 3]
    assert trainer._rows_of_batch(5, 1) == [3]
    updates.batches.assert_called_with(5)
    sampler = MagicMock(spec=LengthGroupedSampler, batch_size=3)
    sampler.__iter__.side_effect = lambda: iter(range(10))
    given = {"_updates": None, "_epoch": 2, "_get_train_sampler": lambda: sampler}
    by_pairs = bare(args=Fake(max_tokens_per_batch=None), **given)
    assert by_pairs._rows_of_batch(2, 0) == [6, 7, 8]
    sampler.set_epoch.assert_called_with(2)
    assert bare(args=Fake(max_tokens_per_batch=9), **given)._rows_of_batch(2, 0) is None


@pytest.mark.parametrize(("count", "updates", "size"), [(10, 4, 2), (11, 4, 3), (1, 4, 1)])
def test_size_of_an_update_is_the_mean_of_its_pairs(count: int, updates: int, size: int) -> None:
    sampler = MagicMock(spec=TokenBatchSampler, lengths=range(count))
    sampler.__len__.return_value = updates
    assert bare(_updates=sampler).get_total_train_batch_size(None) == size


@pytest.mark.parametrize("outputs", [{"nll_loss": torch.tensor(3.0)}, {}, (1, 2)])
@pytest.mark.parametrize(
    ("items", "averages", "factor"), [(7, True, 2), (7, False, 1), (None, True, None)]
)
def test_loss_without_smoothing_is_the_sum_over_data_parallel_ranks(
    outputs: Any, items: Any, averages: bool, factor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[float] = []
    monkeypatch.setattr(TranslatingTrainer, "compute_loss", lambda *given: ("loss", outputs))
    trainer = bare(
        _base_model=lambda: None,
        forwards=ForwardChoice(),
        state=Fake(global_step=2),
        args=Fake(consistency_start=3, average_tokens_across_devices=averages),
        consistency="not due",
        teacher=None,
        accelerator=Fake(num_processes=4),
        get_tp_size=lambda: 2,
        meter=Fake(add_nll=lambda nll: added.append(nll.item())),
    )
    model = nn.Linear(1, 1).train()
    assert trainer.compute_loss(model, {}, num_items_in_batch=items) == "loss"
    assert trainer.compute_loss(model, {}, True, items) == ("loss", outputs)
    is_added = "nll_loss" in outputs and factor is not None
    assert added == ([3.0 * factor] * 2 if is_added else [])


@pytest.mark.parametrize(("step", "is_due"), [(2, False), (3, True), (4, True)])
def test_consistency_is_due_from_its_start(step: int, is_due: bool) -> None:
    trainer = bare(state=Fake(global_step=step), args=Fake(consistency_start=3), consistency="on")
    assert trainer._due_consistency() == ("on" if is_due else None)


@pytest.mark.parametrize(
    ("drops", "training", "dropped"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_last_batch_is_dropped_in_training_alone(
    drops: bool, training: bool, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Fake(dataloader_drop_last=drops)

    def made(trainer: Any, is_training: bool) -> Any:
        return Fake(
            num_workers=0,
            persistent_workers=False,
            drops=trainer.args.dataloader_drop_last,
            training=is_training,
        )

    monkeypatch.setattr(TranslatingTrainer, "_get_dataloader", made)
    loader = bare(args=args)._get_dataloader(is_training=training)
    assert (loader.drops, loader.training) == (dropped, training)
    assert args.dataloader_drop_last is drops


@pytest.mark.parametrize(("packs", "version"), [(True, PLAN_VERSION), (False, None)])
def test_plan_of_packed_rows_is_a_fact(
    packs: bool, version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TranslatingTrainer, "_data", lambda trainer: {"pack": None})
    assert bare(packs=packs)._data() == {"pack": packs, PACKING: version}


@pytest.mark.parametrize(
    ("is_due", "fits", "count"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_first_batch_of_the_planned_shape_is_compiled(is_due: bool, fits: bool, count: int) -> None:
    compiled = MagicMock(is_due=is_due)
    compiled.fits.return_value = fits
    trainer = bare(
        forwards=Fake(compiled=compiled),
        _base_model=lambda: nn.Linear(1, 1),
        _prepare_inputs=lambda batch: {**batch, "prepared": True},
        _attention_kernels=nullcontext,
    )
    trainer._compile_if_due({"labels": 1}, 7)
    batch = {"labels": 1, "prepared": True, "num_items_in_batch": 7}
    assert compiled.compile.call_args_list == [((batch,),)] * count
    trainer.forwards.compiled = None
    trainer._compile_if_due({"labels": 1}, 7)


def test_smoother_of_the_caller_is_a_loss_of_its_own() -> None:
    for smoother, found in (
        (None, None),
        (LabelSmoother(), None),
        (Fake(), "an own label_smoother"),
    ):
        trainer = bare(compute_loss_func=None, label_smoother=smoother)
        assert ownership.foreign_loss(trainer) == found
    assert ownership.foreign_loss(bare(compute_loss_func=max)) == "compute_loss_func"


def test_columns_are_those_of_all_parts_of_a_dataset() -> None:
    table = Dataset.from_dict({"a": [1, 2], "b": [3, 4]})
    rows = [{"a": 1}, {"c": 2}]
    for data, columns in (
        (table, "ab"),
        (table.with_format(columns=["a"]), "a"),
        (rows, "ac"),
        (Subset(table, [0]), "ab"),
        (ConcatDataset([table, rows]), "abc"),
    ):
        assert ownership._columns(data) == set(columns)


# Loaders


def settings(**changed: Any) -> Any:
    given = {"max_tokens_per_batch": 60, "tokens_per_update": 90, "seed": 3, "data_seed": None}
    return Fake(**given | {"world_size": 2, "process_index": 1} | changed)


@pytest.mark.parametrize(("data_seed", "seed"), [(None, 3), (0, 0), (5, 5)])
def test_plan_has_the_seed_of_the_data(data_seed: int | None, seed: int) -> None:
    plan = loaders._plan(settings(data_seed=data_seed), 4)
    assert plan.pop("seed") == seed
    assert list(plan.values()) == [60, 90, 4, 2, 1]


@pytest.mark.parametrize(("longest", "is_told"), [(60, False), (61, True)])
def test_pair_that_is_longer_than_a_batch_is_told(
    longest: int, is_told: bool, capsys: pytest.CaptureFixture
) -> None:
    loaders._warn_of_long_pairs(settings(), longest)
    assert ("some pairs are longer" in capsys.readouterr().out) is is_told


def test_shapes_are_rounded_with_the_tokens_of_each_side() -> None:
    def padded(**config: Any) -> dict[str, Any]:
        return loaders.padded_batches(Fake(pad_token_id=1, **config), max, True).keywords

    assert padded(target_pad_token_id=5)["pad_token_ids"] == (1, 5)
    assert padded()["pad_token_ids"] == (1, 1)
    plain = loaders.padded_batches(Fake(), max, False)
    assert plain.keywords == {"collator": max}


def test_pairs_of_a_table_are_grouped_over_ranks_and_steps() -> None:
    table = Dataset.from_dict({"input_ids": [[1], [1, 2]], "labels": [[3], [4]]})
    given = {"train_batch_size": 2, "gradient_accumulation_steps": 3, "world_size": 5, "seed": 1}
    args: Any = Fake(train_sampling_strategy="group_by_length", **given)
    assert loaders.grouped_sampler(args, table).batch_size == 30
    assert loaders.grouped_sampler(args, list(table)) is None
    assert loaders.grouped_sampler(args, table.remove_columns("labels")) is None
    args.train_sampling_strategy = "random"
    assert loaders.grouped_sampler(args, table) is None


def test_data_without_pairs_or_without_ids_is_refused() -> None:
    assert error_of(loaders._lengths, []) == "there is no pair to train on"
    for rows in ([{"input_ids": [1]}], [{"input_ids": 1, "labels": 2}], [1]):
        assert "needs rows with lists of ids" in error_of(loaders._lengths, rows)


# Fast paths


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (False, "cuda", "is not asked for"),
        (None, "cpu", "is the default of GPUs only"),
        (None, "cuda", None),
        (True, "cpu", None),
    ],
)
def test_packing_is_the_default_of_gpus(
    asked: bool | None, device: str, reason: str | None
) -> None:
    trainer = Fake(packing_asked=asked, args=Fake(device=torch.device(device)))
    assert PACKED_ROWS.is_off(trainer) == reason


@pytest.mark.parametrize(
    ("asked", "device", "updates", "reason"),
    [
        (False, "cuda", None, "is not asked to compile"),
        (None, "cpu", None, "is not on a GPU"),
        (None, "cuda", None, "has no packed rows"),
        (True, "cpu", None, "has no packed rows"),
    ],
)
def test_compiled_updates_are_the_default_of_packed_rows_on_gpus(
    asked: bool | None, device: str, updates: Any, reason: str
) -> None:
    args = Fake(torch_compile=asked, device=torch.device(device))
    assert COMPILED_UPDATES.is_off(Fake(args=args, _updates=updates)) == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"checkpointing": True}, "computes activations again"),
        ({"model": "wrapped"}, "has adapters"),
        ({"is_fsdp_enabled": True}, "shards weights"),
        ({"is_deepspeed_enabled": True}, "shards weights"),
        ({"get_tp_size": lambda: 2}, "shards weights"),
    ],
)
def test_pass_of_another_kind_is_named(changed: dict[str, Any], reason: str | None) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    model[0].gradient_checkpointing = changed.pop("checkpointing", False)
    given = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "get_tp_size": lambda: 1}
    trainer = Fake(**{"model": model, "_base_model": lambda: model} | given | changed)
    assert fast_paths._different_pass(trainer) == reason


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (None, None),
        (Fake(enabled=True, cache_enabled=True), None),
        (Fake(enabled=False, cache_enabled=True), "an autocast_handler"),
        (Fake(enabled=True, cache_enabled=False), "an autocast_handler"),
    ],
)
def test_handler_that_changes_autocast_is_named(handler: Any, reason: str | None) -> None:
    assert fast_paths._own_autocast(bare(accelerator=Fake(autocast_handler=handler))) == reason


@pytest.mark.parametrize(
    ("precision", "device", "casting", "fused"),
    [
        ("no", "cuda", "is not in bf16", None),
        ("fp16", "cuda", "is not in bf16", "is in fp16"),
        ("bf16", "cpu", "is on a CPU", None),
        ("bf16", "cuda", None, None),
    ],
)
def test_precision_decides_about_casts_and_the_loss(
    precision: str, device: str, casting: str | None, fused: str | None
) -> None:
    args = Fake(device=torch.device(device))
    trainer = Fake(args=args, accelerator=Fake(mixed_precision=precision))
    assert CAST_WEIGHTS.is_off(trainer) == casting
    assert FUSED_LOSS.is_off(trainer) == fused
    scales = "scales its loss for fp16" if precision == "fp16" else None
    assert COMPILED_UPDATES.conditions[-1].find(trainer) == scales


@pytest.mark.parametrize(
    ("tokens", "packs", "bf16", "device", "reason"),
    [
        (True, False, True, "cpu", None),
        (False, False, True, "cpu", "has no padded token batches"),
        (True, True, True, "cpu", "has no padded token batches"),
        (True, False, False, "cpu", "is not in bf16 on a CPU"),
        (True, False, True, "cuda", "is not in bf16 on a CPU"),
    ],
)
def test_shapes_are_rounded_in_bfloat16_on_a_cpu(
    tokens: bool, packs: bool, bf16: bool, device: str, reason: str | None
) -> None:
    args = Fake(bf16=bf16, device=torch.device(device))
    assert ROUNDED_SHAPES.is_off(Fake(by_tokens=tokens, packs=packs, args=args)) == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"consistency": 0}, "computes two passes over a batch"),
        ({"teacher": 0}, "asks a teacher"),
        ({"label_smoother": LabelSmoother()}, "has a loss of its own"),
        ({"compute_loss_func": max}, "has a loss of its own"),
    ],
)
def test_objective_that_a_graph_lacks_is_named(changed: dict[str, Any], reason: str | None) -> None:
    plain = dict.fromkeys(("consistency", "teacher", "label_smoother", "compute_loss_func"))
    assert fast_paths._other_objective(bare(**plain | changed)) == reason


def test_models_of_transformers_have_a_table_of_positions() -> None:
    for config, kind in (
        (Fake(), "learned"),
        (Fake(position_encoding_type="learned"), "learned"),
        (Fake(position_encoding_type="sinusoidal"), None),
    ):
        trainer = Fake(_base_model=lambda config=config: Fake(config=config))
        assert fast_paths._table_of_positions(trainer) == kind


@pytest.mark.parametrize(
    ("found", "carried", "asked", "reason"),
    [
        (None, False, False, None),
        ("a", False, False, "has a"),
        ("a", True, False, "has a"),
        ("a", True, True, None),
        ("a", False, True, "has a"),
    ],
)
def test_carried_condition_is_left_out_if_the_path_is_asked_for(
    found: str | None, carried: bool, asked: bool, reason: str | None
) -> None:
    conditions = (
        Condition(lambda trainer: None),
        Condition(lambda trainer: "b", carried=True),
        Condition(lambda trainer: found, "has {}", carried),
    )
    conditions_of_a_run = conditions if asked else (conditions[0], conditions[2])
    path = FastPath("path", "it", "plain", lambda trainer: trainer, conditions_of_a_run)
    assert path.why_not(None, asked) == reason
    if not asked:
        assert path.is_on(None) is (reason is None)
        assert not path.is_on("off")
        assert path.line("off", False) == "path: no, because it off: plain"
        assert path.line(None, False) == f"path: no, because it {reason}: plain"
    assert path.line(None, True, ", so") == "path: yes, so"
