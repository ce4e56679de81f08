"""What the trainer refuses at the start, and numbers that are not finite: small objects in place of a run."""

import math
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hf_vanilla_transformer.training.trainer import loss_check, packing_check, trainer_checks
from hf_vanilla_transformer.training.trainer.loss_check import (
    LossCheck,
    leave_out_on_device,
    require_finite_on_all_ranks,
    require_loss_scale,
)
from hf_vanilla_transformer.training.trainer.packing_check import mixing
from hf_vanilla_transformer.training.trainer.trainer_checks import (
    check_collator,
    check_objective,
    check_token_batches,
    check_unsharded,
)
from tests.model_helpers import PAD, error_of, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


# Settings


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


def run(**changed: Any) -> Any:
    """A trainer that can train token batches, but for what is changed."""
    args = Fake(
        max_tokens_per_batch=40,
        average_tokens_across_devices=True,
        n_gpu=changed.pop("n_gpu", 1),
        train_sampling_strategy=changed.pop("strategy", "random"),
        ema_decay=changed.pop("ema_decay", 0.0),
        muon=changed.pop("muon", False),
    )
    args.average_tokens_across_devices = changed.pop("averages", True)
    sizes = {name: (lambda size: lambda: size)(changed.pop(name, 1)) for name in ("tp", "cp", "sp")}
    given = {
        "args": args,
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": True,
        "train_dataset": [1],
        "passed_by": None,
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
        **{f"get_{name}_size": size for name, size in sizes.items()},
    }
    return Fake(**given | changed)


@pytest.fixture(autouse=True)
def passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_checks, "_methods_of_loaders", lambda trainer: trainer.passed_by)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"averages": False}, "needs average_tokens_across_devices=True"),
        ({"n_gpu": 2}, "does not go with 2 GPUs"),
        ({"tp": 2}, "excludes tensor, context and sequence parallelism"),
        ({"cp": 2}, "excludes tensor, context and sequence parallelism"),
        ({"sp": 2}, "excludes tensor, context and sequence parallelism"),
        ({"train_dataset": Stream()}, "needs a dataset with a length"),
        ({"strategy": "sequential"}, "leave train_sampling_strategy=sequential out"),
        ({"passed_by": "_get_dataloader"}, "never calls _get_dataloader"),
    ],
)
def test_token_batches_are_refused_where_the_mean_would_be_wrong(
    changed: dict[str, Any], message: str, model: Any
) -> None:
    assert message in error_of(check_token_batches, run(**changed), model)


def test_token_batches_are_for_a_loss_that_counts_them(model: Any) -> None:
    for change in ({}, {"n_gpu": 0}, {"strategy": "group_by_length"}, {"compute_loss_func": max}):
        check_token_batches(run(**change), model)
    check_token_batches(run(compute_loss_func=max), nn.Linear(1, 1))
    assert "give Linear a compute_loss_func" in error_of(
        check_token_batches, run(), nn.Linear(1, 1)
    )
    undivided = run(model_accepts_loss_kwargs=False)
    assert "let its forward pass on **kwargs" in error_of(check_token_batches, undivided, model)


def test_collator_that_pads_on_the_right_is_taken() -> None:
    for tokenizer in (None, Fake(padding_side="right")):
        check_collator(Fake(data_collator=Fake(tokenizer=tokenizer)))
    left = Fake(data_collator=Fake(tokenizer=Fake(padding_side="left")))
    assert "pads on the left" in error_of(check_collator, left)


def test_objective_needs_the_model_of_the_package_in_one_piece(model: Any) -> None:
    check_objective(run(), model, "teacher=a")
    assert "not Linear" in error_of(check_objective, run(), nn.Linear(1, 1), "teacher=a")
    sharded = run(is_fsdp_enabled=True)
    assert "FSDP shards them" in error_of(check_objective, sharded, model, "teacher=a")


@pytest.mark.parametrize(
    ("setting", "fsdp", "deepspeed", "zero3", "is_refused"),
    [
        ({}, True, True, True, False),
        ({"ema_decay": 0.9}, False, True, False, False),  # ZeRO-2
        ({"ema_decay": 0.9}, True, False, False, True),
        ({"ema_decay": 0.9}, False, True, True, True),
        ({"muon": True}, False, False, False, False),
        ({"muon": True}, True, False, False, True),
        ({"muon": True}, False, True, False, True),
    ],
)
def test_average_and_muon_need_whole_weights(
    setting: dict[str, Any],
    fsdp: bool,
    deepspeed: bool,
    zero3: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_checks, "is_deepspeed_zero3_enabled", lambda: zero3)
    trainer = run(**setting, is_fsdp_enabled=fsdp, is_deepspeed_enabled=deepspeed)
    if is_refused:
        (name,) = setting
        assert error_of(check_unsharded, trainer).startswith(f"{name}=")
    else:
        check_unsharded(trainer)


# Numbers that are not finite


def lines_of(update: int, batch: int | None) -> list[int] | None:
    """The lines of the fourth update and of one of its batches."""
    return {(4, 2): [7, 3, 7], (4, None): [9]}.get((update, batch))


@pytest.mark.parametrize(
    ("update", "batch", "message"),
    [
        (4, 2, "the loss of update 5 is nan; its batch contains the lines 3, 7"),
        (4, 1, "the loss of update 5 is nan"),
        (
            4,
            None,
            "the gradient of update 5 is not finite (its norm is nan), although its loss is; its data contains "
            "the lines 9; skip_nonfinite_gradients leaves such updates out",
        ),
    ],
)
def test_number_that_is_not_finite_is_named_with_its_lines(
    update: int, batch: int | None, message: str
) -> None:
    losses = LossCheck()
    losses.add(3, 0, torch.tensor(1.0))
    losses.add(update, batch, torch.tensor(math.nan))
    assert error_of(losses.require_finite, lines_of) == message
    losses.require_finite(lines_of)  # each is read once


def test_gradients_are_counted_where_updates_are_left_out() -> None:
    losses = LossCheck()
    for number in (math.inf, 1.0, math.nan):
        losses.add(4, None, torch.tensor(number))
    losses.require_finite(lines_of, skips=True)
    assert losses.skipped == 2
    losses.add(4, 2, torch.tensor(math.inf))
    assert "loss of update 5 is inf" in error_of(losses.require_finite, lines_of, skips=True)


def test_numbers_are_kept_as_they_were_until_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_check, "MOST_UNREAD", 2)
    losses = LossCheck()
    number = torch.ones((), requires_grad=True)
    full = []
    for _ in range(3):
        losses.add(0, 0, number)
        full.append(losses.is_full)
    assert full == [False, True, True]
    number.data.fill_(math.nan)
    losses.require_finite(lines_of)
    assert not losses.is_full


@pytest.mark.parametrize(("scale", "stops"), [(1e-4, False), (0.9e-4, True)])
def test_scale_of_fp16_has_an_end(scale: float, stops: bool) -> None:
    require_loss_scale(None)
    scaler: Any = Fake(get_scale=lambda: scale)
    if stops:
        assert "down to 9.0e-05" in error_of(require_loss_scale, scaler)
    else:
        require_loss_scale(scaler)


def test_wrapped_optimizer_is_told_on_the_device() -> None:
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    for norm, left_out in ((math.inf, 1.0), (2.0, 0.0)):
        assert leave_out_on_device(Fake(optimizer=plain), torch.tensor(norm)) is True
        assert (plain.grad_scale, plain.found_inf) == (None, left_out)


def test_weights_of_another_rank_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [("fc1", torch.tensor([math.inf]))]
    monkeypatch.setattr(loss_check, "gather_object", lambda own: [None, *own])
    require_finite_on_all_ranks([("fc1", torch.ones(1))], "here", "stop")
    assert error_of(require_finite_on_all_ranks, weights, "here", "stop").startswith("here: fc1 ")


# Models whose rows are packed


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (0.99e-5, None),
        (1e-5, "a token of one changes by 1e-05 of its logits next to others"),
        (ValueError("two\nlines"), "ValueError: two lines"),
    ],
)
def test_copy_with_noise_in_its_weights_is_tried(
    difference: Any, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def found(copied: Any) -> float:
        tried.append(copied)
        if isinstance(difference, Exception):
            raise difference
        return difference

    monkeypatch.setattr(packing_check, "_difference", found)
    model: Any = nn.Linear(100, 100).train()
    model.device = torch.device("cpu")
    model.forward = of_library = nn.Linear.forward  # as accelerate's
    model._original_forward = "own"
    before = model.weight.detach().clone()
    assert mixing(model) == line
    (copied,) = tried
    assert (copied.training, copied.weight.dtype, copied.forward) == (False, torch.float64, "own")
    noise = (copied.weight - before).detach()
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)
    assert model.weight.equal(before)
    assert (model.training, model.forward) == (True, of_library)


def test_difference_is_relative_to_the_spread_of_the_outputs() -> None:
    batches: list[dict[str, torch.Tensor]] = []

    def model(**batch: torch.Tensor) -> Any:
        """Logits that are the labels, and a loss that is lower by a half in packed rows."""
        batches.append(batch)
        loss = torch.tensor(-0.5 if "segment_ids" in batch else 0.0)
        return Fake(logits=batch["labels"][..., None].double(), loss=loss)

    model.config = tiny_config()
    model.device = torch.device("cpu")
    found = packing_check._difference(model)
    packed, padded = batches
    labels = padded["labels"]
    outputs = torch.cat([labels[labels != -100], torch.zeros(1)])
    assert found == pytest.approx(0.5 / outputs.std().item())
    assert len(packed["labels"]) == 1
    source = padded["input_ids"]
    assert padded["attention_mask"].equal(source.ne(PAD).long())
    for side in (source.ne(PAD), labels.ne(-100)):
        lengths = side.sum(dim=1)
        assert len(lengths) == 10
        assert 1 <= lengths.min() < lengths.max() <= 9
        assert side.equal(torch.arange(side.shape[1]) < lengths[:, None]), "none within is padding"
