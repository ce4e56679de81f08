"""n-best lists as candidates: their probabilities, duplicates that are merged, and several spellings of one input."""

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.inference import Hypothesis
from hf_vanilla_transformer.inference.candidates import (
    Candidate,
    candidate_lines,
    merge_candidates,
    read_n_best,
    translate_candidates,
)
from hf_vanilla_transformer.inference.file_translation import translate_file, translated_lines
from hf_vanilla_transformer.inference.line_warnings import LineWarnings
from tests.model_helpers import error_of, save_model

LINES = ["two hundred", "seven and one", "", "a thousand and three"]
SETTINGS: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = save_model(
        tmp_path_factory.mktemp("model"),
        LINES * 2,
        vocab_size=290,
        tie_word_embeddings=False,
    )
    return Translator.from_pretrained(folder, device="cpu")


def found(**probabilities: float) -> list[Hypothesis]:
    """Hypotheses of these texts."""
    logs = {text: math.log(probability) for text, probability in probabilities.items()}
    return [Hypothesis(text, score=log / 2, log_probability=log) for text, log in logs.items()]


def texts_of(candidates: Iterable[Candidate | Hypothesis]) -> list[str]:
    return [one.text for one in candidates]


def sorted_letters(text: str) -> str | None:
    """An atom string in one order. A word is none."""
    if text == "raises":
        raise ValueError(text)
    return None if text == "invalid" else "".join(sorted(text))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length_penalty": 0.3},
        {"no_repeat_ngram_size": 2},
        # what transformers' search does
        {"num_beam_groups": 1, "min_p": 0.1, "do_sample": True},
        {"suppress_tokens": [9], "output_logits": True},
    ],
    ids=["paper", "power", "n-grams", "sampling", "transformers"],
)
def test_log_probability_is_the_sum_over_the_tokens(
    translator: Translator, settings: dict[str, Any]
) -> None:
    # `probabilities` come from another pass of the decoder, with the whole sequence
    lists = translator.translate_nbest(
        ["two hundred", "seven"],
        3,
        probabilities=True,
        **SETTINGS,
        **settings,
    )
    for hypothesis in itertools.chain(*lists):
        assert hypothesis.probabilities
        summed = sum(map(math.log, hypothesis.probabilities))
        assert hypothesis.log_probability == pytest.approx(summed, abs=1e-3)


def test_probabilities_are_shares_and_duplicates_are_added() -> None:
    candidates = merge_candidates([found(CN=0.3, CO=0.2, OC=0.15, C=0.05)], sorted_letters)
    assert texts_of(candidates) == ["CN", "CO", "C"], "in the order of their scores"
    assert [one.probability for one in candidates] == pytest.approx([3 / 7, 0.5, 0.05 / 0.7])
    assert candidates[1].score == pytest.approx(math.log(0.2) / 2)


def test_spellings_of_an_input_count_the_same() -> None:
    merged = merge_candidates([found(b=0.03, a=0.01), found(c=0.6, a=0.2)])
    probabilities = {one.text: one.probability for one in merged}
    assert probabilities == pytest.approx({"a": 0.25, "b": 0.375, "c": 0.375})


def test_candidates_of_spellings_are_ranked_by_their_places() -> None:
    """By the sum of 1 / place over the lists (Zhong et al. 2022), and then by probability."""
    lists = [
        found(a=0.9, b=0.05, B=0.04, c=0.01),
        found(d=0.4, c=0.3, b=0.2, a=0.1),
        found(b=0.5, e=0.3, a=0.2),
    ]
    places = {
        "a": [1, 4, 3],
        "b": [2, 3, 1],
        "c": [3, 2],
        "d": [1],
        "e": [2],
    }  # "B" has no place of its own
    expected = sorted(places, key=lambda text: -sum(1 / place for place in places[text]))
    assert texts_of(merge_candidates(lists, str.lower)) == expected == ["b", "a", "d", "c", "e"]
    tie = [found(x=0.6, y=0.4), found(y=0.9, x=0.1)]
    assert texts_of(merge_candidates(tie)) == ["y", "x"]


def test_evaluate_counts_the_places_that_predict_writes() -> None:
    """`top_k` of `evaluate --n_best` and the ranks of candidates are one rule."""
    hypotheses = found(CN=0.3, invalid=0.25, CO=0.2, OC=0.15, C=0.05)
    hypotheses.insert(4, hypotheses[1])
    assert texts_of(merge_candidates([hypotheses], sorted_letters)) == ["CN", "invalid", "CO", "C"]
    for reference, top_1, top_3 in (("NC", 100, 100), ("OC", 0, 100), ("C", 0, 0)):
        scores = score_translations(
            ["CN"],
            [reference],
            metrics=["top_k"],
            n_best=[texts_of(hypotheses)],
            normalize=sorted_letters,
        )
        assert scores["top_1"] == top_1
        assert scores["top_3"] == top_3


def test_invalid_texts_are_kept_and_counted() -> None:
    counts = LineWarnings()
    candidates = merge_candidates([found(raises=0.5, invalid=0.3, CO=0.2)], sorted_letters, counts)
    assert {one.text: one.valid for one in candidates} == {
        "raises": False,
        "invalid": False,
        "CO": True,
    }
    assert texts_of(candidates) == ["raises", "invalid", "CO"]
    assert counts.invalid == 2
    assert counts.hypotheses == 3


def test_blank_line_is_no_spelling() -> None:
    """An input with fewer spellings than others has blank lines for the rest."""
    blank = [Hypothesis("", 0.0)]
    candidates = merge_candidates([found(b=0.6, a=0.4), blank, found(a=0.9)])
    assert texts_of(candidates) == ["a", "b"]
    assert sum(one.probability for one in candidates) == pytest.approx(1)
    assert texts_of(merge_candidates([blank, blank])) == [""]


# Of a translator


def test_candidates_of_a_translator_are_its_n_best_list(translator: Translator) -> None:
    candidates = list(translate_candidates(translator, LINES, 4, **SETTINGS))
    lists = translator.translate_nbest(LINES, 4, **SETTINGS)
    for merged, hypotheses in zip(candidates, lists, strict=True):
        assert set(texts_of(merged)) == set(texts_of(hypotheses))
        assert sum(one.probability for one in merged) == pytest.approx(1)
        scores = [one.score for one in merged]
        assert sorted(scores, reverse=True) == scores
    assert texts_of(candidates[2]) == [""]  # a blank line


def test_lists_of_spellings_are_joined_before_they_are_cut(translator: Translator) -> None:
    joined = merge_candidates(list(translator.translate_nbest(LINES[:2], 4, **SETTINGS)))
    assert len(joined) > 4  # beams
    for most in (1, 3, len(joined), 20):
        (found,) = translate_candidates(
            translator,
            LINES[:2],
            most,
            spellings=2,
            **SETTINGS,
        )
        assert texts_of(found) == texts_of(joined[:most])
    assert error_of(translate_candidates, translator, LINES, 0, spellings=2).startswith("n_best: ")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("spellings", [1, 2])
def test_formats_have_the_same_candidates(
    translator: Translator,
    tmp_path: Path,
    spellings: int,
    chunked: bool,
) -> None:
    lines = LINES * 5

    def written(n_best_format: str) -> list[str]:
        settings = {
            **SETTINGS,
            "n_best": 3,
            "n_best_format": n_best_format,
            "batch_size": 1,
            "spellings": spellings,
        }
        if not chunked:
            return list(translated_lines(translator, lines, **settings))
        output = tmp_path / "out"
        translate_file(translator, lines, output, **settings)
        return output.read_text(encoding="utf-8").splitlines()

    candidates = list(
        translate_candidates(
            translator,
            lines,
            3,
            spellings=spellings,
            **SETTINGS,
        )
    )
    rows = [json.loads(line) for line in written("jsonl")]
    assert [row["line"] for row in rows] == list(range(1, 20 // spellings + 1))
    for row, merged in zip(rows, candidates, strict=True):
        assert [one["text"] for one in row["candidates"]] == texts_of(merged)
    cells = iter(written("tsv"))
    for number, merged in enumerate(candidates, start=1):
        for rank, one in enumerate(merged, start=1):
            *names, score, probability = next(cells).split("\t")
            assert names == [str(number), str(rank), one.text]
            # batches of another size round differently
            assert float(score) == pytest.approx(one.score, abs=2e-4)
            assert float(probability) == pytest.approx(one.probability, abs=2e-4)
    assert not list(cells)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"n_best": 2, "n_best_format": "csv"}, "n_best_format"),
        ({"n_best_format": "tsv"}, "n_best_format"),
        ({"n_best": 2, "spellings": 2}, "n_best_format"),
        ({"n_best": 2, "normalize": str.lower}, "n_best_format"),
        ({"n_best": 2, "n_best_format": "tsv", "spellings": 0}, "spellings"),
        ({"n_best": 2, "n_best_format": "tsv", "alignment": True}, "n_best_format"),
        ({"n_best": 9, "n_best_format": "tsv"}, "n_best"),
    ],
)
def test_wrong_combinations_are_refused_early(
    translator: Translator,
    settings: Any,
    argument: str,
) -> None:
    assert error_of(
        translated_lines,
        translator,
        LINES,
        **SETTINGS,
        **settings,
    ).startswith(f"{argument}: ")


def test_missing_spelling_is_refused(translator: Translator) -> None:
    candidates = translate_candidates(
        translator,
        LINES,
        2,
        spellings=3,
        **SETTINGS,
    )
    assert error_of(list, candidates).startswith("spellings: the last input has 1 lines of 3")


@pytest.mark.parametrize("n_best_format", ["moses", "tsv", "jsonl"])
def test_lists_are_read_in_every_format_that_is_written(
    translator: Translator,
    tmp_path: Path,
    n_best_format: str,
) -> None:
    lines = translated_lines(
        translator,
        LINES,
        **SETTINGS,
        n_best=3,
        n_best_format=n_best_format,
    )
    path = tmp_path / f"best.{n_best_format}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    expected = map(texts_of, translate_candidates(translator, LINES, 3, **SETTINGS))
    assert read_n_best(path, 4) == list(expected)
    assert f"{n_best_format}: line 5 of " in error_of(read_n_best, path, 5)
    assert "a list of line 4 of 3 lines" in error_of(read_n_best, path, 3)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a b",
        "x ||| a ||| -1",
        "1\\ta\\tb\\tc",
        "{}",
        '{"line": 1}',
        "[1]",
        '{"line": 1, "candidates": []}',
    ],
)
def test_line_of_no_list_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "best").write_text(f"0 ||| a ||| -1\n{line}\n", encoding="utf-8")
    assert "best, line 2: it is no line of an n-best list" in error_of(
        read_n_best, tmp_path / "best", 1
    )


def test_lists_are_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    """As text, which `sort` compares, rank 10 comes before rank 2."""
    texts = [f"text {rank}" for rank in range(1, 13)]
    candidates = [Candidate(text, None, 1 / 12) for text in texts]
    lines = sorted(candidate_lines(candidates, 1, "tsv"))
    path = tmp_path / "best.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_n_best(path, 1) == [texts]


@pytest.mark.parametrize("n_best_format", ["tsv", "jsonl"])
def test_two_lists_of_a_line_are_refused(tmp_path: Path, n_best_format: str) -> None:
    lines = [*candidate_lines([Candidate("a", None, 1)], 1, n_best_format)] * 2
    path = tmp_path / "best"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert "best, line 2: line 1 has rank 1 twice" in error_of(read_n_best, path, 1)
