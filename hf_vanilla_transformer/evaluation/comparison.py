"""Comparison of systems on one test set: significance, groups of sentences, and the largest differences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import CHRF
from sacrebleu.significance import PairedTest, estimate_ci

from ..data.words import words
from ..utils.errors import UserError
from .metrics import make_metrics, reference_lists

#: A metric of one's own: sources, hypotheses and references (the first of each) to one number for each sentence.
SentenceMetric = Callable[[list[str], list[str], list[str]], Sequence[float]]

SAMPLES, TRIALS, SEED = 1000, 10000, 12345  # sacreBLEU's
LENGTHS = 10, 20, 30, 50  # words, the ends of the groups


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None = None,
    metrics: Sequence[str] = ("bleu", "chrf"),
    functions: Mapping[str, SentenceMetric] | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Compare systems with the first of them, the baseline.

    Args:
        systems: hypotheses by the name of the system.
        references: one for each hypothesis, or several such lists.
        sources: for `functions`.
        metrics, tokenize, lowercase: as of `score_translations`.
        functions: further metrics by name. Their score is the mean over the sentences.

    Returns:
        `signatures` by metric, and `systems`: by system and metric `score`, `mean` and `interval` (half of the 95 %
        confidence interval) over bootstrap resamples, and but for the baseline `p_bootstrap` and `p_randomization`.

    Source: sacreBLEU's paired bootstrap (Koehn 2004) and approximate randomization (Riezler and Maxwell 2005).
    """
    references = reference_lists(references)
    results: dict[str, dict[str, Any]] = {system: {} for system in systems}
    named: list[tuple[str, Sequence[str]]] = [(system, list(hypotheses)) for system, hypotheses in systems.items()]
    signatures = {}
    if metrics:
        bootstrap, by_metric = _paired_test(named, references, "bs", metrics, tokenize, lowercase)
        _, trials = _paired_test(named, references, "ar", metrics, tokenize, lowercase)
        for metric, (name, outcomes) in zip(metrics, by_metric.items(), strict=True):
            signatures[metric] = f"{name}|{bootstrap[name]}"
            for system, outcome, trial in zip(systems, outcomes, trials[name], strict=True):
                results[system][metric] = _result(
                    outcome.score, outcome.mean, outcome.ci, outcome.p_value, trial.p_value
                )
    for name, function in (functions or {}).items():
        signatures[name] = f"{name}|mean of {len(references[0])} sentences|bs:{SAMPLES}|ar:{TRIALS}|seed:{SEED}"
        scores = [_sentence_scores(name, function, sources, list(texts), references[0]) for _, texts in named]
        for system, values in zip(systems, scores, strict=True):
            results[system][name] = _compare_means(scores[0], values)
    return {"signatures": signatures, "systems": results}


def _paired_test(
    systems: list[tuple[str, Sequence[str]]],
    references: list[list[str]],
    kind: str,
    metrics: Sequence[str],
    tokenize: str | None,
    lowercase: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """sacreBLEU's signatures and outcomes, by its name of the metric."""
    made = make_metrics(metrics, references, tokenize, lowercase)
    samples = SAMPLES if kind == "bs" else TRIALS
    signatures, scores = PairedTest(systems, made, references, test_type=kind, n_samples=samples)()
    return signatures, {name: outcomes for name, outcomes in scores.items() if name != "System"}


def _result(
    score: float, mean: float, interval: float, bootstrap: float | None, trials: float | None
) -> dict[str, Any]:
    result = {"score": score, "mean": float(mean), "interval": float(interval)}
    return result if bootstrap is None else result | {"p_bootstrap": bootstrap, "p_randomization": trials}


def _sentence_scores(
    name: str, function: SentenceMetric, sources: Sequence[str] | None, hypotheses: list[str], references: list[str]
) -> np.ndarray:
    """The scores (N,) of a metric of one's own."""
    scores = np.asarray(function(list(sources or [""] * len(hypotheses)), hypotheses, references), dtype=np.float64)
    if scores.shape != (len(hypotheses),):
        raise UserError(
            f"{name}: it returned shape {scores.shape}; one number for each of {len(hypotheses)} is needed"
        )
    return scores


def _compare_means(baseline: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """sacreBLEU's two tests, for scores (N,) of sentences."""
    draw, difference = np.random.default_rng(SEED), abs(values.mean() - baseline.mean())
    samples = draw.integers(len(values), size=(SAMPLES, len(values)))
    means = values[samples].mean(axis=1)
    mean, interval = estimate_ci(means)
    if values is baseline:
        return _result(float(values.mean()), mean, interval, None, None)
    spread = np.abs(means - baseline[samples].mean(axis=1))
    signs = draw.choice((-1.0, 1.0), size=(TRIALS, len(values)))
    shuffled = np.abs(signs @ (values - baseline)) / len(values)
    bootstrap = (np.sum(spread - spread.mean() > difference) + 1) / (SAMPLES + 1)
    trials = (np.sum(shuffled > difference) + 1) / (TRIALS + 1)
    return _result(float(values.mean()), mean, interval, float(bootstrap), float(trials))


def scores_by_group(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    labels: Sequence[str],
    *,
    metrics: Sequence[str] = ("bleu", "chrf"),
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score the sentences of each label, in the order in which labels occur.

    Returns:
        By label `sentences`, and by system the score of each metric.
    """
    references = reference_lists(references)
    made = make_metrics(metrics, references, tokenize, lowercase)
    groups: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(labels):
        rows = [row for row, each in enumerate(labels) if each == label]
        columns = [[column[row] for row in rows] for column in references]
        groups[label] = {"sentences": len(rows)}
        for system, texts in systems.items():
            hypotheses = [texts[row] for row in rows]
            scores = {name: metric.corpus_score(hypotheses, columns).score for name, metric in made.items()}
            groups[label][system] = scores
    return groups


def length_labels(texts: Sequence[str]) -> list[str]:
    """Return the group of each text by its number of words, such as "11–20 words"."""
    starts = [1, *(end + 1 for end in LENGTHS)]
    names = [f"{start}–{end} words" for start, end in zip(starts, LENGTHS, strict=False)]
    names.append(f"over {LENGTHS[-1]} words")
    return [names[int(np.searchsorted(LENGTHS, len(words(text))))] for text in texts]


def largest_differences(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    sources: Sequence[str] | None = None,
    count: int = 5,
) -> list[dict[str, Any]]:
    """Return the sentences in which a system differs most from the baseline, the first system, by chrF.

    Returns:
        For each other system `count` sentences where it is better and `count` where it is worse: `system`, `line`,
        `source`, `reference`, `baseline`, `hypothesis` and `difference`.
    """
    columns, metric = reference_lists(references), CHRF()
    scores = {
        system: [metric.sentence_score(text, list(row)).score for text, *row in zip(texts, *columns, strict=True)]
        for system, texts in systems.items()
    }
    first, *others = systems
    results = []
    for system in others:
        differences = np.subtract(scores[system], scores[first])
        order = np.argsort(-differences, kind="stable")
        chosen = dict.fromkeys([*order[:count].tolist(), *order[::-1][:count][::-1].tolist()])
        for row in (row for row in chosen if differences[row]):
            texts = {"source": sources[row]} if sources else {}
            texts |= {"reference": columns[0][row], "baseline": systems[first][row]}
            texts["hypothesis"] = systems[system][row]
            results.append({"system": system, "line": row + 1, **texts, "difference": float(differences[row])})
    return results
