"""Limits of cleaning at their boundaries, against what their descriptions say of small texts."""

import math
import statistics

import pytest
from datasets import Dataset

from hf_vanilla_transformer.cleaning.judging import CleaningReport, PairRow, sample_warnings
from hf_vanilla_transformer.cleaning.rules import (
    FittingLimits,
    PairLimits,
    broken_rule,
    flaws,
    main_scripts,
)

LONG = "Donaudampfschifffahrtsgesellschaftskapitän"  # 42 letters


def breaks(rule: str, source: str, target: str, **limits: object) -> bool:
    return broken_rule((source, target), [rule], PairLimits(**limits)) == rule  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "smallest"), [(999, 2.0), (1000, 1.5)])
def test_ratios_are_within_five_deviations_of_their_median(count: int, smallest: float) -> None:
    for lengths in ((10, 10), (10, 10, 10, 14, 4), (3, 9, 27)):
        pairs = [("x" * 7, "y" * lengths[place % len(lengths)]) for place in range(count)]
        ratios = [math.log((len(target) + 5) / 12) for _, target in pairs]
        middle = statistics.median(ratios)
        spread = 5 * 1.4826 * statistics.median([abs(ratio - middle) for ratio in ratios])
        expected = middle, max(spread, math.log(smallest))
        assert PairLimits.of_sample(pairs).ratio == pytest.approx(expected)
    assert breaks("ratio", "a" * 5, "b" * 16, ratio=(0.0, math.log(2)))
    assert not breaks("ratio", "a" * 5, "b" * 15, ratio=(0.0, math.log(2) + 1e-9))
    assert not breaks("ratio", "a" * 15, "b" * 5, ratio=(0.0, math.log(2) + 1e-9))
    assert PairLimits.of_sample([]).ratio == (0.0, math.log(2))


def test_limits_of_a_side_are_those_of_enough_of_it() -> None:
    for latin, scripts in ((20, {"LATIN", "CYRILLIC"}), (19, {"CYRILLIC"})):
        pairs = [("a" * latin + "б" * (100 - latin) + "1 .", "x")]
        assert PairLimits.of_sample(pairs).scripts == (scripts, {"LATIN"})
    for long, usual in ((5, False), (6, True)):  # of 100, more than a twentieth
        pairs = [("x", LONG if place < long else "y") for place in range(100)]
        assert PairLimits.of_sample(pairs).long_words == (False, usual)
    for common, close in ((3, False), (4, True)):  # of ten words, more than 0.3 and less than 0.8
        words = [f"{letter}{letter}" for letter in "abcdefghij"]
        pair = (
            " ".join(words),
            " ".join(words[:common] + [word.upper() + "z" for word in words[common:]]),
        )
        assert PairLimits.of_sample([pair] * 3 + [(pair[0], pair[0])] * 9).close_languages is close
    assert not PairLimits.of_sample([("same words here", "same words here")]).close_languages


@pytest.mark.parametrize(("one_direction", "share"), [(True, 20), (False, 5)])
def test_scripts_have_their_own_limits_where_they_are_frequent(
    one_direction: bool, share: int
) -> None:
    for count, total in ((share, 100), (share - 1, 100), (5, 20), (4, 20)):
        pairs = [("one dog", "одна собака")] * count + [("one dog", "ein Hund")] * (total - count)
        frequent = count >= max(5, share * total / 100)
        found = FittingLimits(pairs, one_direction)
        assert (("LATIN", "CYRILLIC") in found.by_scripts) is frequent
        assert found.of(pairs[0]).scripts[1] >= ({"CYRILLIC"} if frequent else set())
        assert found.of(("1", "2")) is found.others
    assert main_scripts(("ab βγδ", "12")) == ("GREEK", "") and main_scripts(("漢字かな", "a")) == (
        "CJK",
        "LATIN",
    )


def test_rules_begin_at_their_limits() -> None:
    assert [breaks("length", "a" * size, "b", max_characters=7) for size in (7, 8)] == [False, True]
    assert [breaks("length", "a", "b" * size, max_characters=7) for size in (7, 8)] == [False, True]
    # 4 of 5 words, of 4 words or more; all of them in 20 characters
    assert breaks("copy", "a b c d e", "a b c d f") and not breaks("copy", "a b c d e", "a b c g f")
    assert breaks("copy", "a b c d", "A b, c d!") and not breaks("copy", "a b c", "a b c")
    assert [breaks("copy", "a b" + "c" * size, "a b" + "c" * size) for size in (16, 17)] == [
        False,
        True,
    ]
    for times in (2, 3):
        words = " ".join(["one two three four five"] * times)
        assert breaks("repetition", words, "x") is breaks("repetition", "x", words) is (times == 3)
        assert not breaks("repetition", words + " six", words)
    assert not breaks("repetition", "a b c d e f a b c d e f a b c d e f", "x")
    assert [breaks("repetition", "ab" * times, "x") for times in (3, 4)] == [False, True]
    assert [breaks("repetition", "abcdefghijklm"[:size] * 4, "x") for size in (1, 12, 13)] == [
        False,
        True,
        False,
    ]
    # of 20 letters on either side, more than half small
    for other, found in (
        ("ab" * 10, True),
        ("ab" * 9 + "a", False),
        ("AB" * 5 + "ab" * 5, False),
        ("a" * 11 + "B" * 9, True),
    ):
        assert breaks("capitals", "THE ROAD TO THE NORTH OF IT", other) is found
        assert breaks("capitals", other, "THE ROAD TO THE NORTH OF IT") is found
    assert not breaks("capitals", "A" * 19, "a" * 30) and breaks("capitals", "A" * 20, "a" * 30)
    assert breaks("spaces", LONG, "x") and not breaks("spaces", LONG, "x", long_words=(True, False))
    assert breaks("spaces", "x", LONG, long_words=(True, False))


def test_flaws_are_counted() -> None:
    for text, count in {
        **{
            "A dog.": 0,
            "a dog.": 1,
            "A DOG.": 2,
            "A dog!": 0,
            "A dog!?": 1,
            "A dog..": 1,
            "A dog...": 0,
        },
        **{"A dog,,": 1, "A  dog": 1, "A  dog!! Now??": 3, "...": 0},
    }.items():
        assert flaws((text, "Ein Hund")) == flaws(("Ein Hund", text)) == count, text


def test_report_has_ten_examples_and_the_counts() -> None:
    report = CleaningReport()
    for line in range(1, 12):
        report.count("copy", PairRow(line, "a", "b"), True)
    report.count("ratio", PairRow(12, "a", "b"), False)
    assert report.summary() == "kept 0 of 12 pairs; dropped 12: 11 copy, 1 ratio"
    report.count(None, PairRow(13, "a", "b"), True)
    report.count(None, PairRow(14, "a", "b"), False)
    assert [line for line, *_ in report.examples["copy"]] == list(range(1, 11))
    expected = "kept 2 of 14 pairs; 1 with characters instead of entities (&amp;); dropped 12: 11 copy, 1 ratio"
    assert report.summary() == expected


@pytest.mark.parametrize(
    ("count", "total", "warns"), [(5, 100, False), (6, 100, True), (8, 400, False), (9, 400, True)]
)
def test_training_warns_of_more_than_five_pairs_and_of_two_percent(
    count: int, total: int, warns: bool
) -> None:
    for damaged in (("<b>one dog", "ein Hund"), ("one &amp; dog", "ein Hund")):
        pairs = [
            damaged if place < count else (f"dog {place}", f"Hund {place}")
            for place in range(total)
        ]
        sources, targets = map(list, zip(*pairs, strict=True))
        table = Dataset.from_dict(
            {"source": sources, "target": targets, "line": list(range(1, total + 1))}
        )
        lines = list(sample_warnings(table))
        assert len(lines) == warns
        if warns:
            assert lines[0].startswith(
                f"warning: about {count / total:.0%} of the training pairs: "
            )
            assert ("<" not in damaged[0]) or "(lines 1, 2, 3, …)" in lines[0]
