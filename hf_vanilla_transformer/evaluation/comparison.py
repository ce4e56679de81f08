"""Comparison of systems on one test set: significance, groups of sentences, and the largest differences."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
from sacrebleu.metrics import CHRF
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.significance import estimate_ci

from ..text.words import words
from ..utils.normalization import Normalizer, normalized_references
from .metric_classes import CharacterErrorRate, RatioMetric, ratio
from .metric_names import DEFAULT, SIGNED
from .metrics import (
    Groups,
    Metrics,
    NBestLists,
    References,
    Texts,
    compute_metric,
    compute_metrics,
    inputs_of,
    longest,
    make_metrics,
    of_equal_length,
    reference_lists,
    text_list,
)

if TYPE_CHECKING:
    from evaluate import EvaluationModule

SAMPLES = 1000
TRIALS = 10000
LENGTHS = 10, 20, 30, 50  # words, the ends of the groups
_ROUNDING = 1e-9  # of a score, by which equal differences can differ

#: `score`, `mean`, `interval` and the p-values of a metric.
ComparedScores: TypeAlias = dict[str, float]
#: Results by system and metric.
Results: TypeAlias = dict[str, dict[str, ComparedScores]]


class Comparison(TypedDict):
    """Systems and their baseline."""

    signatures: dict[str, str]  #: by metric
    systems: Results


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    references: References,
    *,
    sources: Sequence[str] | None = None,
    metrics: Metrics = DEFAULT,
    tokenize: str | None = None,
    lowercase: bool = False,
    normalize: Normalizer | None = None,
    n_best: Mapping[str, NBestLists] | None = None,
) -> Comparison:
    """Compare systems with the first of them, the baseline.

    Args:
        systems: hypotheses by the name of the system.
        references: one for each hypothesis, or several such lists.
        sources: for metrics that need them.
        metrics, tokenize, lowercase, normalize: as of `score_translations`. The score of a function is the mean over
            the sentences. A metric of `evaluate.load` has a score without an interval, because it does not tell those
            of sentences.
        n_best: for `top_k`, the n-best lists by the name of the system.

    Returns:
        `signatures` by metric, and `systems`: by system and metric `score`, `mean` and `interval` (half of the 95 %
        confidence interval) over bootstrap resamples, and but for the baseline `p_bootstrap` and `p_randomization`.

    Source: paired bootstrap (Koehn 2004) and approximate randomization (Riezler and Maxwell 2005) as in sacreBLEU, but
    for ties, which are evidence against a difference.
    """
    columns = reference_lists(references)
    lists = _lists_of_systems(n_best)
    of_systems: dict[str, Texts] = {}
    for system, hypotheses in systems.items():
        texts = Texts(text_list(hypotheses, "systems"), columns, sources, lists.get(system))
        texts.check_lengths()
        of_systems[system], _ = texts.normalized(normalize)
    columns = normalized_references(columns, normalize)
    results: Results = {system: {} for system in systems}
    signatures: dict[str, str] = {}
    for name, metric in make_metrics(metrics, tokenize, lowercase).items():
        tests = _tests_of(name, metric, of_systems)
        for score, (scorer, inputs) in tests.items():
            outcomes, signatures[score] = _paired_tests(scorer, inputs, columns)
            for system, outcome in outcomes.items():
                results[system][score] = outcome
        if tests:
            continue
        for system, texts in of_systems.items():
            scores, _ = compute_metric(name, metric, texts)
            for score, value in scores.items():
                results[system][score] = {"score": value}
                signatures[score] = name
    return {"signatures": signatures, "systems": results}


class _Ratio:
    """A score of a `RatioMetric` in the form of sacreBLEU. Its hypotheses are numerators and denominators, (N, 2)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_signature(self) -> Signature:
        return Signature({"num_refs": 1})

    def _extract_corpus_statistics(self, hypotheses: np.ndarray, references: object) -> np.ndarray:
        return hypotheses

    def _aggregate_and_compute(self, statistics: np.ndarray) -> Score:
        return self._compute_score_from_stats(statistics.sum(axis=0))

    def _compute_score_from_stats(self, sums: np.ndarray) -> Score:
        return Score(self.name, ratio(sums))


def _tests_of(
    name: str, metric: "EvaluationModule", of_systems: Mapping[str, Texts]
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """sacreBLEU's object and its input from each system, by score. Empty without scores of sentences."""
    if name in SIGNED:
        columns = next(iter(of_systems.values())).references
        inputs = {system: texts.hypotheses for system, texts in of_systems.items()}
        return {name: (metric.scorer(columns), inputs)}
    if not isinstance(metric, RatioMetric):
        return {}
    statistics = {
        system: metric.statistics(**inputs_of(name, metric, texts))
        for system, texts in of_systems.items()
    }
    first = next(iter(statistics.values()))
    return {
        score: (
            _Ratio(score),
            {system: of_system[score] for system, of_system in statistics.items()},
        )
        for score in first
    }


def _paired_tests(
    scorer: Any, inputs: Mapping[str, Any], references: list[list[str]]
) -> tuple[dict[str, ComparedScores], str]:
    """The results of one score by system, and its signature.

    The resamples and the trials are those that sacreBLEU draws with its seed.
    """
    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()
    first_seed = None if seed == "none" else int(seed)
    lists = {
        system: scorer._extract_corpus_statistics(texts, references)
        for system, texts in inputs.items()
    }
    scores = {
        system: float(scorer._aggregate_and_compute(rows).score) for system, rows in lists.items()
    }
    statistics = {system: np.array(rows, dtype=float) for system, rows in lists.items()}
    baseline, *_ = statistics
    size = len(statistics[baseline])
    resamples = np.random.default_rng(first_seed).choice(size, size=(SAMPLES, size))
    exchanged = np.random.default_rng(first_seed).integers(2, size=(TRIALS, size), dtype=bool)

    def scores_of(sums: Iterable[np.ndarray]) -> np.ndarray:
        return np.array([scorer._compute_score_from_stats(each).score for each in sums])

    resampled = {
        system: scores_of(rows[sample].sum(axis=0) for sample in resamples)
        for system, rows in statistics.items()
    }
    results: dict[str, ComparedScores] = {}
    for system, rows in statistics.items():
        mean, interval = estimate_ci(resampled[system])
        results[system] = {
            "score": scores[system],
            "mean": float(mean),
            "interval": float(interval),
        }
        if system == baseline:
            continue
        difference = abs(scores[system] - scores[baseline])
        differences = np.abs(resampled[system] - resampled[baseline])
        first = scores_of(exchanged @ statistics[baseline] + ~exchanged @ rows)
        second = scores_of(~exchanged @ statistics[baseline] + exchanged @ rows)
        rounding = _ROUNDING * max(abs(scores[system]), abs(scores[baseline]))
        results[system]["p_bootstrap"] = _p_value(
            differences - differences.mean(), difference - rounding
        )
        results[system]["p_randomization"] = _p_value(np.abs(first - second), difference - rounding)
    signature = scorer.get_signature()
    signature.update("seed", seed)
    signature.update("bs", SAMPLES)
    name = scorer._aggregate_and_compute(lists[baseline]).name
    return results, f"{name}|{signature}"


def _p_value(drawn: np.ndarray, difference: float) -> float:
    """The share of the drawn differences that are at least that of the systems, which is drawn once more.

    sacreBLEU 2.6 counts only larger ones, and finds equal systems to differ significantly.
    """
    return (int(np.sum(drawn >= difference)) + 1) / (len(drawn) + 1)


def _lists_of_systems(
    n_best: Mapping[str, NBestLists] | None,
) -> dict[str, list[list[str]]]:
    """The n-best lists of each system, all of one length, so that all have the same scores."""
    length = max(map(longest, (n_best or {}).values()), default=0)
    return {system: of_equal_length(lists, length) for system, lists in (n_best or {}).items()}


def scores_by_group(
    systems: Mapping[str, Sequence[str]],
    references: References,
    labels: Sequence[str],
    *,
    metrics: Metrics = DEFAULT,
    tokenize: str | None = None,
    lowercase: bool = False,
    sources: Sequence[str] | None = None,
    n_best: Mapping[str, NBestLists] | None = None,
    normalize: Normalizer | None = None,
) -> dict[str, dict[str, Any]]:
    """Score the sentences of each label, in the order in which labels occur.

    Each label has its own tokenizer of BLEU, as a language needs it.

    Returns:
        By label `sentences`, `signatures` by metric, and `systems`: by system the scores.
    """
    columns = reference_lists(references)
    made = make_metrics(metrics, tokenize, lowercase)
    lists = _lists_of_systems(n_best)
    all_texts = {
        system: Texts(hypotheses, columns, sources, lists.get(system))
        for system, hypotheses in systems.items()
    }
    for texts in all_texts.values():
        texts.check_lengths(labels)
    groups: dict[str, dict[str, Any]] = {}
    for label, rows in Groups(labels, False).rows().items():
        signatures: dict[str, str] = {}
        of_systems: dict[str, dict[str, float]] = {}
        groups[label] = {
            "sentences": len(rows),
            "signatures": signatures,
            "systems": of_systems,
        }
        for system, texts in all_texts.items():
            compared, _ = texts.select(rows).normalized(normalize)
            of_systems[system], details = compute_metrics(made, compared)
            for name, value in details.items():
                if name.endswith("_signature"):
                    signatures[name.removesuffix("_signature")] = str(value)
    return groups


def length_labels(texts: Sequence[str]) -> list[str]:
    """Return the group of each text by its number of words, such as "11–20 words"."""
    starts = [1, *(end + 1 for end in LENGTHS)]
    names = [f"{start}–{end} words" for start, end in zip(starts, LENGTHS, strict=False)]
    names.append(f"over {LENGTHS[-1]} words")
    return [names[int(np.searchsorted(LENGTHS, len(words(text))))] for text in texts]


def _sentence_scores(
    hypotheses: Sequence[str], references: Sequence[list[str]], task: str
) -> list[float]:
    """chrF, or of a "sequence" 100 minus the character error rate."""
    if task == "language":
        chrf = CHRF()
        pairs = zip(hypotheses, references, strict=True)
        return [chrf.sentence_score(text, row).score for text, row in pairs]
    edits, characters = CharacterErrorRate().counts(hypotheses, references).T
    accuracies: list[float] = (100 - 100 * edits / np.maximum(characters, 1)).tolist()
    return accuracies


def largest_differences(
    systems: Mapping[str, Sequence[str]],
    references: References,
    sources: Sequence[str] | None = None,
    count: int = 5,
    task: str = "language",
) -> list[dict[str, str | float]]:
    """Return the sentences in which a system differs most from the baseline, the first system.

    Args:
        systems: hypotheses by the name of the system.
        references: one for each hypothesis, or several such lists.
        sources: to be returned with the rest.
        count: sentences of each kind.
        task: "language" compares by chrF, "sequence" by the character error rate.

    Returns:
        For each other system `count` sentences where it is better and `count` where it is worse: `system`, `line`,
        `source`, `reference`, `baseline`, `hypothesis` and `difference`.
    """
    columns = reference_lists(references)
    rows = [list(row) for row in zip(*columns, strict=True)]
    scores = {system: _sentence_scores(texts, rows, task) for system, texts in systems.items()}
    first, *others = systems
    results = []
    for system in others:
        differences: np.ndarray = np.subtract(scores[system], scores[first])
        order = np.argsort(-differences, kind="stable").tolist()
        best = order[:count]
        worst = order[max(0, len(order) - count) :]
        for row in dict.fromkeys([*best, *worst]):
            if not differences[row]:
                continue
            source = {"source": sources[row]} if sources else {}
            results.append(
                {
                    "system": system,
                    "line": row + 1,
                    **source,
                    "reference": columns[0][row],
                    "baseline": systems[first][row],
                    "hypothesis": systems[system][row],
                    "difference": float(differences[row]),
                }
            )
    return results
