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


SELECTS = ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "true"]


def test_explicit_score_that_is_not_measured_is_refused(tmp_path):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS, "--metric_for_best_model", "bleu"])[-1]
    with pytest.raises(UserError, match=r"metric_for_best_model: 'bleu' is not measured; choose among ter, "):
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
def test_score_of_a_run_that_selects_is_bleu(tmp_path, selection):
    arguments = ["--output_dir", str(tmp_path), "--eval_strategy", "epoch"]
    args = parse_recipe([*arguments, *selection])[-1]
    assert (args.metric_for_best_model, args.greater_is_better) == ("bleu", True)
    assert parse_recipe(arguments)[-1].metric_for_best_model is None


def test_default_score_is_the_first_that_is_measured(tmp_path):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS])[-1]
    check_selection(args, ["ter", "exact_match"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("ter", False)
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS])[-1]
    check_selection(args, ["ter", "bleu"])
    assert (args.metric_for_best_model, args.greater_is_better) == ("bleu", True)


def test_mean_of_several_directions_is_one_of_chrf(tmp_path):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS])[-1]
    check_selection(args, ["bleu", "chrf", "exact_match"], several=True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("chrf", True)


def test_average_is_compared_by_a_score_that_is_measured(tmp_path):
    """Without BLEU the comparison of the averaged weights failed after training."""
    text = write_pairs(tmp_path / "text", PAIRS) | write_pairs(tmp_path / "text", PAIRS[:2], "validation")
    settings = {"vocab_size": 280, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_steps": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "average_last": 2, "metrics": ["ter"], "eval_steps": 1}
    results = run_tiny(tmp_path / "run", **text, **settings)
    scores = {name: results[f"eval_ter_{name}"] for name in ("single", "averaged")}
    assert results["eval_ter"] == min(scores.values())


@pytest.mark.parametrize(
    ("metric", "greater"),
    [(name, name not in LOWER_IS_BETTER) for name in TITLES]
    + [("top_5", True), ("eval_ter", False), ("wer", False), ("invalid", False), ("eval_loss", False)],
)
def test_direction_of_each_score(tmp_path, metric, greater):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS, "--metric_for_best_model", metric])[-1]
    assert args.greater_is_better is greater


@pytest.mark.parametrize("metric", ["mine:better", "rouge_filter", "my_error", "hinge_loss", "eval_accuracy"])
def test_direction_of_an_own_score_is_given(tmp_path, metric):
    """No part of its name tells whether more of it is better, so that the worst weights could be kept."""
    flags = ["--output_dir", str(tmp_path), *SELECTS, "--metric_for_best_model", metric]
    assert f"{metric.removeprefix('eval_')}: " in (message := error_of(parse_recipe, flags))
    assert "greater_is_better" in message
    assert parse_recipe([*flags, "--greater_is_better", "false"])[-1].greater_is_better is False


def test_own_score_that_would_select_by_default_is_refused(tmp_path):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS])[-1]
    assert "greater_is_better" in error_of(check_selection, args, ["my_error"])


def test_scores_of_lists_are_refused_before_training(tmp_path):
    _, data_args, _ = parse_recipe(["--output_dir", str(tmp_path), "--metrics", "exact_match", "top_k"])
    with pytest.raises(UserError, match="^metrics: top_k scores n-best lists, .*evaluate --n_best$"):
        score_options(data_args, PreTrainedTokenizerBase())
