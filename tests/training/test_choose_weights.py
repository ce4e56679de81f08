"""The weights that a run keeps: the last ones, the average of its checkpoints or its moving average."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_vanilla_transformer.training.run.finishing import choose_weights, load_full_state_dict
from hf_vanilla_transformer.training.state.callbacks import WeightAverage
from tests.model_helpers import assert_same_gradients, error_of, tiny_model


def chosen(
    folder: Path,
    scores: list[dict[str, float]],
    ema: Any = None,
    **settings: Any,
) -> tuple[Any, dict]:
    """The model and results of a run of three updates, from the scores of its last weights and of the average."""
    if "average_last" in settings:
        (folder / ".saving").mkdir()  # as a crash leaves it
    for step in (1, 2, 3):
        tiny_model(step).save_pretrained(folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    single, average = scores
    trainer = SimpleNamespace(
        model=tiny_model(7),
        eval_dataset=[1],
        ema=ema,
        state=SimpleNamespace(global_step=3),
        scores={} if ema else {3: single},
        evaluate=lambda: single,
        predict=lambda data, metric_key_prefix: SimpleNamespace(metrics=average),
    )
    arguments = {
        "average_last": 0,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
    }
    results = choose_weights(trainer, folder, SimpleNamespace(**arguments | settings))
    assert trainer.model.lm_head.weight is trainer.model.get_input_embeddings().weight  # still tied
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
    ]
    return trainer.model, results


@pytest.mark.parametrize(("single", "average"), [(40.0, 30.0), (30.0, 40.0), (30.0, 30.0)])
@pytest.mark.parametrize("kind", ["averaged", "ema"])
def test_better_weights_are_kept(
    tmp_path: Path,
    kind: str,
    single: float,
    average: float,
    capsys: pytest.CaptureFixture,
) -> None:
    ema = WeightAverage(0.9)
    ema.average = {name: each.detach() for name, each in tiny_model(5).named_parameters()}
    last = dict(tiny_model(3).named_parameters())
    before = dict(tiny_model(2).named_parameters())
    averages = {
        "averaged": {name: (last[name] + before[name]) / 2 for name in last},
        "ema": ema.average,
    }
    settings = {"averaged": {"average_last": 2}, "ema": {"ema": ema, "ema_decay": 0.9}}
    losses = {"eval_loss": 1.0} if single != average else {}
    model, results = chosen(
        tmp_path,
        [{"eval_bleu": single} | losses, {"eval_bleu": average} | losses],
        **settings[kind],
    )
    printed = capsys.readouterr().out
    assert "of equal ones" not in printed, "there is no loss, or none are equal"
    assert "warning: " not in printed
    is_average = average >= single
    expected = averages[kind] if is_average else dict(tiny_model(7).named_parameters())
    assert_same_gradients(dict(model.named_parameters()), expected, tolerance=1e-6)
    facts = {"averaged_checkpoints": 2 if is_average and kind == "averaged" else 0}
    if is_average and kind == "ema":
        facts["ema_decay"] = 0.9
    assert results == {
        "eval_bleu": max(single, average),
        "eval_bleu_single": single,
        f"eval_bleu_{kind}": average,
        **losses,
        **facts,
    }


@pytest.mark.parametrize(
    ("losses", "kept"), [((2.0, 3.0), "single"), ((3.0, 2.0), "averaged"), ((2.0, 2.0), "averaged")]
)
def test_loss_decides_between_equal_scores(
    tmp_path: Path, losses: tuple[float, float], kept: str, capsys: pytest.CaptureFixture
) -> None:
    scores = [{"eval_bleu": 0.0, "eval_loss": loss} for loss in losses]
    _, results = chosen(tmp_path, scores, average_last=2)
    assert results["averaged_checkpoints"] == (2 if kept == "averaged" else 0)
    assert results["eval_loss"] == min(losses)
    assert "eval_perplexity" not in results
    assert f"of equal ones that of the lowest loss, {min(losses):.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "greater", "average", "averaged"),
    [
        ("loss", False, 2.0, 3),
        ("loss", False, 4.0, 0),
        ("eval_perplexity", False, 2.0, 3),
        ("chrf", True, 2.0, 0),
    ],
)
def test_weights_are_chosen_by_the_metric_for_the_best_model(
    tmp_path: Path,
    metric: str,
    greater: bool,
    average: float,
    averaged: int,
    capsys: pytest.CaptureFixture,
) -> None:
    name = f"eval_{metric.removeprefix('eval_')}"
    scores = [{name: 3.0, "eval_bleu": 0.0}, {name: average, "eval_bleu": 0.0}]
    if metric == "eval_perplexity":  # it is computed if the last weights have one
        scores[1] = {"eval_loss": math.log(average)}
    settings = {
        "average_last": 4,
        "metric_for_best_model": metric,
        "greater_is_better": greater,
    }
    _, results = chosen(tmp_path, scores, **settings)
    assert "average_last=4" in capsys.readouterr().out, "there are fewer"
    assert results["averaged_checkpoints"] == averaged
    assert {f"{name}_single", f"{name}_averaged"} <= results.keys()


@pytest.mark.parametrize(("last", "warns"), [(0, False), (1, False), (2, True)])
def test_one_checkpoint_is_no_average(
    tmp_path: Path, last: int, warns: bool, capsys: pytest.CaptureFixture
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    trainer = SimpleNamespace(eval_dataset=None, ema=None)
    assert choose_weights(trainer, tmp_path, SimpleNamespace(average_last=last)) == {}
    assert ("warning: average_last" in capsys.readouterr().out) is warns


def test_weights_that_are_loaded_may_have_more_but_not_less() -> None:
    model = tiny_model(1)
    weights = dict(tiny_model(2).state_dict())
    load_full_state_dict(model, weights | {"other": weights["lm_head.weight"]})
    assert_same_gradients(dict(model.state_dict()), weights, tolerance=0)
    names = [name for name, _ in model.named_parameters()]
    message = error_of(load_full_state_dict, model, {names[0]: weights[names[0]]})
    assert message == f"the weights lack {min(names[1:])}"
