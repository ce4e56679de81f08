"""Metrics of the training log, from counts and a clock that are given."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_vanilla_transformer.training.trainer import log_metrics
from hf_vanilla_transformer.training.trainer.log_metrics import ThroughputMeter, perplexities


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(log_metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def batch(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Pairs with so many tokens, in rows of 5 and 4 places."""
    mask = torch.zeros(len(sizes), 5)
    labels = torch.full((len(sizes), 4), -100)
    for row, (source, target) in enumerate(sizes):
        mask[row, :source] = 1
        labels[row, :target] = 1
    return {"attention_mask": mask, "labels": labels}


def test_metrics_are_those_since_the_last_entry(clock: SimpleNamespace) -> None:
    meter = ThroughputMeter()
    state = SimpleNamespace(max_steps=100, global_step=40)
    assert meter.read(state, torch.mean, math.inf) == {}
    for _ in range(2):  # the second entry forgets the first one
        meter.count([batch((5, 4), (1, 1)), batch((3, 2))], torch.tensor(7))
        without = [{"input_ids": torch.zeros(9)}, {"labels": torch.ones(1, 9)}]
        without_labels = {"attention_mask": torch.ones(1, 9), "labels": None}  # as a collator makes
        meter.count([*without, {"attention_mask": torch.ones(1, 9)}, without_labels], None)
        meter.count([*without, batch((2, 2))], 2)
        for nll in (1.0, 2.0, 4.5):
            meter.add_nll(torch.tensor(nll))
        clock.now += 4.0
        expected = {
            "tokens_per_second": 2.2,
            "padding": 0.4444,  # 20 of 36 are tokens
            "minutes_left": 1.333,  # 60 updates of 4 / 3 seconds
            "nll_loss": 5.0,
        }
        assert meter.read(state, lambda nll: 2 * nll, math.inf) == expected
    assert meter.read(state, torch.mean, math.inf) == {"tokens_per_second": 0.0}
    meter.count([], 3)
    clock.now += 6.0
    assert meter.read(state, torch.mean, 0.25) == {"tokens_per_second": 0.5, "minutes_left": 0.25}
    meter.count([], 3)
    assert "minutes_left" not in meter.read(
        SimpleNamespace(max_steps=0, global_step=0), torch.mean, 1.0
    )


def test_perplexity_is_that_of_the_loss_without_smoothing() -> None:
    logs = {
        "loss": 1.0,
        "eval_loss": 2.0,
        "eval_a_loss": 699.0,
        "eval_b_loss": 700.0,
        "train_loss": 1.0,
        "eval_x": 3.0,
    }
    assert perplexities(logs) == {
        "perplexity": math.e,
        "eval_perplexity": math.exp(2),
        "eval_a_perplexity": math.exp(699),
        "eval_b_perplexity": math.inf,
    }
    smoothed = perplexities({"loss": 1.0, "eval_loss": 2.0, "nll_loss": 0.5}, exclude="eval_loss")
    assert smoothed == {"perplexity": math.exp(0.5)}
    assert perplexities({"loss": 1.0}, exclude="loss") == {}
