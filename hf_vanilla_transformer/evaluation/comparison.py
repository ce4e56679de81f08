"""Comparison of systems on one test set: significance, groups of sentences, and the largest differences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import numpy as np
from sacrebleu.metrics import CHRF
from sacrebleu.significance import PairedTest, estimate_ci

from ..data.words import words
from ..utils.normalization import Normalizer, normalized_references
from .metric_classes import CharacterErrorRate
from .metric_names import DEFAULT, SIGNED
from .metrics import (
    Groups,
    Metrics,
    Texts,
    compute_metric,
    compute_metrics,
    longest,
    make_metrics,
    of_equal_length,
    reference_lists,
    text_list,
)

if TYPE_CHECKING:
    from evaluate import EvaluationModule
    from sacrebleu.metrics.base import Metric

SAMPLES = 1000
TRIALS = 10000
SEED = 12345  # sacreBLEU's
LENGTHS = 10, 20, 30, 50  # words, the ends of the groups
_BLOCK = 10_000_000  # random numbers in memory

#: `score`, `mean`, `interval` and the p-values of a metric.
Result: TypeAlias = dict[str, float]
#: Results by system and metric.
Results: TypeAlias = dict[str, dict[str, Result]]


class Comparison(TypedDict):
    """Systems and their baseline."""

    signatures: dict[str, str]  #: by metric
    systems: Results


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None = None,
    metrics: Metrics = DEFAULT,
    tokenize: str | None = None,
    lowercase: bool = False,
    normalize: Normalizer | None = None,
    n_best: Mapping[str, Sequence[Sequence[str]]] | None = None,
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

    Source: sacreBLEU's paired bootstrap (Koehn 2004) and approximate randomization (Riezler and Maxwell 2005).
    """
    columns = reference_lists(references)
    lists = _lists_of_systems(n_best)
    of_systems = {
        system: Texts(text_list(texts, "systems"), columns, sources, lists.get(system))
        for system, texts in systems.items()
    }
    for texts in of_systems.values():
        texts.check_lengths()
    columns = normalized_references(columns, normalize)
    of_systems = {
        system: replace(texts.normalized_outputs(normalize)[0], references=columns)
        for system, texts in of_systems.items()
    }
    named = {system: texts.hypotheses for system, texts in of_systems.items()}
    results: Results = {system: {} for system in systems}
    signatures: dict[str, str] = {}
    made = make_metrics(metrics, tokenize, lowercase)
    signed = {name: metric for name, metric in made.items() if name in SIGNED}
    if signed:
        scorers = {name: metric.scorer(columns) for name, metric in signed.items()}
        outcomes, signatures = _paired_tests(named, columns, scorers)
        for system, by_metric in outcomes.items():
            results[system] |= by_metric
    sampled = f"bs:{SAMPLES}|ar:{TRIALS}|seed:{SEED}"
    for name, metric in made.items():
        if name in signed:
            continue
        statistics = [_statistics(name, metric, texts) for texts in of_systems.values()]
        for system, by_score in zip(systems, statistics, strict=True):
            for score, values in by_score.items():
                results[system][score] = _compare_means(statistics[0][score], values)
                signatures[score] = f"{score}|mean of {len(columns[0])} pairs|{sampled}"
            if by_score:
                continue
            scores, _ = compute_metric(name, metric, of_systems[system])
            for score, value in scores.items():
                results[system][score] = {"score": value}
                signatures[score] = name
    return {"signatures": signatures, "systems": results}


def _paired_tests(
    systems: Mapping[str, Sequence[str]],
    references: list[list[str]],
    scorers: "Mapping[str, Metric]",
) -> tuple[Results, dict[str, str]]:
    """sacreBLEU's results by system and metric, and its signatures by metric."""
    named = list(systems.items())
    test_bootstrap = PairedTest(named, scorers, references, test_type="bs", n_samples=SAMPLES)
    test_trials = PairedTest(named, scorers, references, test_type="ar", n_samples=TRIALS)
    bootstrap, by_metric = test_bootstrap()
    _, trials = test_trials()
    results: Results = {system: {} for system in systems}
    signatures = {}
    names = [name for name in by_metric if name != "System"]  # sacreBLEU's
    for metric, name in zip(scorers, names, strict=True):
        signatures[metric] = f"{name}|{bootstrap[name]}"
        # sacreBLEU's annotation allows names of systems
        resampled = cast(list[Any], by_metric[name])
        exchanged = cast(list[Any], trials[name])
        for system, outcome, trial in zip(systems, resampled, exchanged, strict=True):
            results[system][metric] = _result(
                outcome.score, outcome.mean, outcome.ci, outcome.p_value, trial.p_value
            )
    return results, signatures


def _statistics(name: str, metric: "EvaluationModule", texts: Texts) -> dict[str, np.ndarray]:
    """Counts and units of each sentence, (N, 2), by score, which is the ratio of their sums. Empty if it has none."""
    rows = [list(row) for row in zip(*texts.references, strict=True)]
    if name == "top_k":
        by_score = metric.statistics(texts.n_best, rows)
        return {score: counts * (100, 1) for score, counts in by_score.items()}
    if hasattr(metric, "statistics"):
        return {name: metric.statistics(texts.hypotheses, rows) * (100, 1)}
    if hasattr(metric, "values"):
        values = metric.values(texts.sources or [""] * len(rows), texts.hypotheses, rows)
        return {name: np.stack([values, np.ones(len(values))], axis=1)}
    return {}


def _lists_of_systems(
    n_best: Mapping[str, Sequence[Sequence[str]]] | None,
) -> dict[str, list[list[str]]]:
    """The n-best lists of each system, all of one length, so that all have the same scores."""
    length = max(map(longest, (n_best or {}).values()), default=0)
    return {system: of_equal_length(lists, length) for system, lists in (n_best or {}).items()}


def _result(
    score: float, mean: float, interval: float, bootstrap: float | None, trials: float | None
) -> Result:
    result = {"score": float(score), "mean": float(mean), "interval": float(interval)}
    if bootstrap is not None and trials is not None:
        result["p_bootstrap"] = bootstrap
        result["p_randomization"] = trials
    return result


def _compare_means(baseline: np.ndarray, values: np.ndarray) -> Result:
    """sacreBLEU's two tests, for counts and units (N, 2) of sentences."""
    draw = np.random.default_rng(SEED)
    means = np.empty(SAMPLES)
    spread = np.empty(SAMPLES)
    for block in _blocks(SAMPLES, len(values)):
        sample = draw.integers(len(values), size=(block.stop - block.start, len(values)))
        means[block] = _ratio(values[sample].sum(axis=1))
        spread[block] = np.abs(means[block] - _ratio(baseline[sample].sum(axis=1)))
    score = float(_ratio(values.sum(axis=0)))
    mean, interval = estimate_ci(means)
    if values is baseline:
        return _result(score, mean, interval, None, None)
    totals = values.sum(axis=0), baseline.sum(axis=0)
    difference = abs(score - _ratio(totals[1]))
    shuffled = np.empty(TRIALS)
    for block in _blocks(TRIALS, len(values)):
        exchanged = draw.random((block.stop - block.start, len(values))) < 0.5
        change = exchanged @ (values - baseline)
        shuffled[block] = np.abs(_ratio(totals[0] - change) - _ratio(totals[1] + change))
    bootstrap = (np.sum(spread - spread.mean() > difference) + 1) / (SAMPLES + 1)
    trials = (np.sum(shuffled > difference) + 1) / (TRIALS + 1)
    return _result(score, mean, interval, float(bootstrap), float(trials))


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of random rows that fit into memory together."""
    size = max(1, _BLOCK // columns)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _ratio(sums: np.ndarray) -> np.ndarray:
    """The scores of sums (…, 2) of counts and units. Without units it is the counts, as in `RateMetric`."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def scores_by_group(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    labels: Sequence[str],
    *,
    metrics: Metrics = DEFAULT,
    tokenize: str | None = None,
    lowercase: bool = False,
    sources: Sequence[str] | None = None,
    n_best: Mapping[str, Sequence[Sequence[str]]] | None = None,
    normalize: Normalizer | None = None,
) -> dict[str, dict[str, Any]]:
    """Score the sentences of each label, in the order in which labels occur.

    Each label has its own tokenizer of BLEU, as a language needs it.

    Returns:
        By label `sentences`, `signatures` by metric, and by system the scores.
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
        groups[label] = {"sentences": len(rows), "signatures": signatures}
        for system, texts in all_texts.items():
            compared, _ = texts.select(rows).normalized(normalize)
            groups[label][system], details = compute_metrics(made, compared)
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
    edits, characters = CharacterErrorRate().statistics(hypotheses, references).T
    accuracies: list[float] = (100 - 100 * edits / np.maximum(characters, 1)).tolist()
    return accuracies


def largest_differences(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
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
