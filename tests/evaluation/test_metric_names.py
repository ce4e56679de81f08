"""The names of the scores: titles, which is better, and the scores of a kind of model."""

import pytest

from hf_vanilla_transformer.evaluation.metric_classes import CLASSES
from hf_vanilla_transformer.evaluation.metric_names import (
    LOWER_IS_BETTER,
    SIGNED,
    TITLES,
    TOP,
    ScoreOptions,
    default_metrics,
    lower_is_better,
    title_of,
)


def test_names_and_classes_agree():
    assert list(CLASSES) == list(TITLES)


@pytest.mark.parametrize(
    ("name", "is_lower", "title"),
    [
        ("bleu", False, "BLEU"),
        ("chrf++", False, "chrF++"),
        ("ter", True, "TER"),
        ("exact_match", False, "exact match"),
        ("character_error_rate", True, "character error rate"),
        ("sequence_error_rate", True, "sequence error rate"),
        ("top_1", False, "top 1"),
        ("top_50", False, "top 50"),
        ("top_2", None, "top 2"),  # no score of this package
        ("wer", True, "wer"),
        ("loss", True, "loss"),
        ("rouge_l", None, "rouge_l"),
    ],
)
def test_score_has_a_direction_and_a_title(name, is_lower, title):
    assert lower_is_better(name) is is_lower
    assert title_of(name) == title


def test_error_rates_are_the_built_in_scores_of_which_less_is_better():
    rates = {name for name in TITLES if "error" in name}
    assert rates | {"ter"} == TITLES.keys() & set(LOWER_IS_BETTER)


def test_top_counts_are_those_of_retrosynthesis():
    """Top 1, 3, 5, 10 and 50, as in Liu et al. 2017 and later papers."""
    assert TOP == (1, 3, 5, 10, 50)


@pytest.mark.parametrize(
    ("task", "split", "names"),
    [
        ("language", None, ("bleu", "chrf")),
        ("language", str.split, ("bleu", "chrf")),
        ("sequence", None, ("exact_match", "character_error_rate")),
        ("sequence", str.split, ("exact_match", "token_error_rate")),
    ],
)
def test_kind_of_a_model_has_its_scores(task, split, names):
    assert default_metrics(task, split) == names


def test_signed_scores_are_those_that_sacrebleu_computes():
    computed = {name for name, each in CLASSES.items() if hasattr(each, "scorer")}
    assert set(SIGNED) == computed


def test_each_option_may_be_left_out():
    assert not ScoreOptions.__required_keys__
