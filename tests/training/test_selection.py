"""A score that is not measured never selects in the place of another."""

import pytest
from transformers import PreTrainedTokenizerBase

from hf_vanilla_transformer.evaluation.metric_names import LOWER_IS_BETTER, TITLES
from hf_vanilla_transformer.training.run.argument_checks import check_selection
from hf_vanilla_transformer.training.run.arguments import score_options
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import error_of, run_tiny, write_pairs

PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier")]
EPOCHS = ["--output_dir", "unused", "--eval_strategy", "epoch"]
SELECTS = [*EPOCHS, "--save_strategy", "epoch", "--load_best_model_at_end", "true"]


def run_arguments(*flags):
    *_, args = parse_recipe(list(flags))
    return args


def test_explicit_score_that_is_not_measured_is_refused():
    args = run_arguments(*SELECTS, "--metric_for_best_model", "bleu")
    with pytest.raises(
        UserError, match=r"metric_for_best_model: 'bleu' is not measured; choose among ter, "
    ):
        check_selection(args, ["ter", "exact_match"])


@pytest.mark.parametrize(
    "selection",
    [
        ["--load_best_model_at_end", "true", "--save_strategy", "epoch"],
        ["--early_stopping_patience", "2", "--save_strategy", "epoch"],
        ["--save_strategy", "best"],
    ],
    ids=" ".join,
)
def test_score_of_a_run_that_selects_is_bleu(selection):
    args = run_arguments(*EPOCHS, *selection)
    assert (args.metric_for_best_model, args.greater_is_better) == ("bleu", True)
    assert run_arguments(*EPOCHS).metric_for_best_model is None


@pytest.mark.parametrize(
    ("measured", "fields", "metric", "greater"),
    [
        (["ter", "exact_match"], {}, "ter", False),
        (["ter", "chrf", "bleu"], {}, "bleu", True),
        (
            ["bleu", "chrf", "exact_match"],
            {"several": True},
            "chrf",
            True,
        ),  # the mean of several directions
        (["top_1"], {}, "top_1", True),
    ],
)
def test_default_score_is_the_first_that_is_measured(measured, fields, metric, greater):
    args = run_arguments(*SELECTS)
    check_selection(args, measured, **fields)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)


def test_own_direction_of_the_default_score_stays():
    args = run_arguments(*SELECTS, "--greater_is_better", "false")
    check_selection(args, ["bleu"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("bleu", False)
    check_selection(run_arguments(*EPOCHS), [])  # selects nothing
    for metric in ("loss", "eval_ter"):
        check_selection(run_arguments(*SELECTS, "--metric_for_best_model", metric), ["ter"])


def test_average_is_compared_by_a_score_that_is_measured(tmp_path):
    """Without BLEU the comparison of the averaged weights failed after training."""
    results = run_tiny(
        tmp_path / "run",
        **write_pairs(tmp_path, PAIRS, "train", "validation"),
        max_steps=2,
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        average_last=2,
        metrics=["ter"],
    )
    assert results["eval_ter"] == min(results["eval_ter_single"], results["eval_ter_averaged"])


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        *((name, name not in LOWER_IS_BETTER) for name in TITLES),
        ("top_5", True),
        ("eval_ter", False),
        ("wer", False),
        ("invalid", False),
        ("eval_loss", False),
    ],
)
def test_direction_of_each_score(metric, greater):
    args = run_arguments(*SELECTS, "--metric_for_best_model", metric)
    assert args.greater_is_better is greater


@pytest.mark.parametrize(
    "metric", ["mine:better", "rouge_filter", "my_error", "hinge_loss", "eval_accuracy"]
)
def test_direction_of_an_own_score_is_given(metric):
    """No part of its name tells whether more of it is better, so that the worst weights could be kept."""
    flags = [*SELECTS, "--metric_for_best_model", metric]
    message = error_of(parse_recipe, flags)
    assert f"{metric.removeprefix('eval_')}: " in message
    assert "greater_is_better" in message
    assert run_arguments(*flags, "--greater_is_better", "false").greater_is_better is False


def test_own_score_that_would_select_by_default_is_refused():
    assert "greater_is_better" in error_of(check_selection, run_arguments(*SELECTS), ["my_error"])


def test_scores_of_lists_are_refused_before_training():
    _, data_args, _ = parse_recipe([*EPOCHS, "--metrics", "exact_match", "top_k"])
    with pytest.raises(
        UserError, match="^metrics: top_k scores n-best lists, .*evaluate --n_best$"
    ):
        score_options(data_args, PreTrainedTokenizerBase())
