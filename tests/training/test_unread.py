"""Settings without effect are named, and a score that is not measured never selects in the place of another."""

import re

import pytest

from hf_vanilla_transformer.evaluation.metric_names import LOWER_IS_BETTER, TITLES
from hf_vanilla_transformer.training.argument_checks import check_selection
from hf_vanilla_transformer.training.arguments import score_options
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.unread import unread_settings
from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier")]


def unread(folder, *flags):
    return unread_settings(*parse_recipe(["--output_dir", str(folder), *flags]))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--max_tokens_per_batch 99 --per_device_train_batch_size 4", "per_device_train_batch_size=4, .*max_tokens"),
        ("--max_tokens_per_batch 99 --train_sampling_strategy random", "train_sampling_strategy=random, .*max_tokens"),
        ("--max_steps 9 --num_train_epochs 3", "num_train_epochs=3.0, .*max_steps=9"),
        ("--eval_steps 9", "eval_steps=9.*, because eval_strategy is no"),
        ("--save_strategy epoch --save_steps 9", "save_steps=9.*, because save_strategy is epoch"),
        ("--logging_strategy no --logging_steps 9", "logging_steps=9.*, because logging_strategy is no"),
        ("--lr_scheduler_type constant --learning_rate 1 --warmup_steps 9", "warmup_steps=9.0, .* is constant"),
        ("--lora_alpha 9", "lora_alpha=9, because lora_r is 0"),
        ("--teacher_weight 0.1", "teacher_weight=0.1, because there is no teacher"),
        ("--sampling_temperature 2", "sampling_temperature=2.0, because there are no directions"),
        ("--tokenizer_name X --vocab_size 99", "vocab_size=99, because X has its tokenizer"),
        ("--metric_for_best_model chrf", "metric_for_best_model=chrf, because load_best_model_at_end is False"),
        ("--hub_model_id X", "hub_model_id=X, because push_to_hub is False"),
        ("--optim sgd --adam_beta1 0.5", "adam_beta1=0.5, because optim is sgd"),
        ("--optim_args eps=1e-3", "optim_args=eps=1e-3, because optim is adamw_torch_fused, which knows no eps"),
        ("--optim sgd --optim_args momentum=0.9,eps=1e-3", "optim_args=.*, because optim is sgd, which knows no eps$"),
        ("--pack true --dataloader_num_workers 2", "dataloader_num_workers=2, .*packed rows"),
    ],
)
def test_setting_without_effect_is_named_with_the_reason(tmp_path, flags, line):
    (found,) = unread(tmp_path, *flags.split())
    assert re.match(f"not read: {line}", found), found


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--per_device_train_batch_size 4 --num_train_epochs 3 --save_steps 9 --logging_steps 9 --warmup_steps 9",
        "--optim sgd --optim_args momentum=0.9 --learning_rate 1",
        "--adam_beta1 0.5 --adam_epsilon 1e-3",
        "--metric_for_best_model chrf --average_last 3",
        "--lr_scheduler_type constant --warmup_steps 9",
        "--pack true --augment copy=0.1 --dataloader_num_workers 2",
    ],
)
def test_settings_that_are_read_are_not_named(tmp_path, flags):
    assert unread(tmp_path, *flags.split()) == []


def test_recipe_is_explicit_too(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("max_tokens_per_batch: 99\nper_device_train_batch_size: 4\n")
    arguments = parse_recipe([str(recipe), "--output_dir", str(tmp_path)])
    assert len(unread_settings(*arguments)) == 1
    assert arguments[-1].explicit == {"max_tokens_per_batch", "per_device_train_batch_size", "output_dir"}


SELECTS = ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "true"]


def test_explicit_score_that_is_not_measured_is_refused(tmp_path):
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS, "--metric_for_best_model", "bleu"])[-1]
    with pytest.raises(UserError, match=r"metric_for_best_model: 'bleu' is not measured; choose among ter, "):
        check_selection(args, ["ter", "exact_match"])


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


def test_average_is_compared_by_a_score_that_is_measured(tmp_path, capsys):
    """Without BLEU the comparison of the averaged weights failed after training."""
    text = write_pairs(tmp_path / "text", PAIRS) | write_pairs(tmp_path / "text", PAIRS[:2], "validation")
    settings = {"vocab_size": 280, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_steps": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "average_last": 2, "metrics": ["ter"], "eval_steps": 1}
    results = run_tiny(tmp_path / "run", **text, **settings)
    scores = {name: results[f"eval_ter_{name}"] for name in ("single", "averaged")}
    assert results["eval_ter"] == min(scores.values())
    assert "not read" not in capsys.readouterr().out.replace("not read: eval_steps", "")


@pytest.mark.parametrize(
    ("metric", "greater"),
    [(name, name not in LOWER_IS_BETTER) for name in TITLES]
    + [("mine:better", True), ("rouge_filter", True), ("eval_ter", False), ("wer", False), ("invalid", False)],
)
def test_direction_of_each_score(tmp_path, metric, greater):
    """The end of a name does not tell: "better" ends with "ter"."""
    args = parse_recipe(["--output_dir", str(tmp_path), *SELECTS, "--metric_for_best_model", metric])[-1]
    assert args.greater_is_better is greater


def test_scores_of_lists_are_refused_before_training(tmp_path):
    _, data_args, _ = parse_recipe(["--output_dir", str(tmp_path), "--metrics", "exact_match", "top_k"])
    with pytest.raises(UserError, match="^metrics: top_k scores n-best lists, .*evaluate --n_best$"):
        score_options(data_args)
