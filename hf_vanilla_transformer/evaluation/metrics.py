"""Scores of translations: built-in ones with the signatures of sacreBLEU, and every metric of `evaluate.load`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..text.cells import check_items
from ..utils.errors import UserError, did_you_mean
from ..utils.normalization import (
    INVALID,
    Normalizer,
    n_best_places,
    normalized_hypotheses,
    normalized_references,
)
from ..utils.untrusted import one_line
from ..utils.user_code import import_function
from .metric_names import DEFAULT, SIGNED, TITLES, TOP, ScoreOptions, Splitter

if TYPE_CHECKING:
    from evaluate import EvaluationModule

#: Names (`metric_names.TITLES`, MODULE:FUNCTION, or whatever `evaluate.load` takes) or metrics of `evaluate`. A
#: mapping names the metrics.
Metrics: TypeAlias = "Sequence[str | EvaluationModule] | Mapping[str, EvaluationModule]"
#: One reference for each hypothesis, or several such lists.
References: TypeAlias = Sequence[str] | Sequence[Sequence[str]]
#: The texts of each sentence, best first.
NBestLists: TypeAlias = Sequence[Sequence[str]]
#: What a metric tells besides its score: a signature, a count, the precisions of n-grams.
Detail: TypeAlias = str | float | list[float]


class Scores(NamedTuple):
    """The results of metrics."""

    scores: dict[str, float]
    details: dict[str, Detail]


def make_metrics(
    metrics: Metrics,
    tokenize: str | None = None,
    lowercase: bool = False,
    split: Splitter | None = None,
) -> "dict[str, EvaluationModule]":
    """Return metrics of `evaluate` by name.

    Args:
        metrics: names or metrics.
        tokenize, lowercase, split: as of `score_translations`.

    Raises:
        UserError: a name that is neither built in nor found by `evaluate.load`, or an unknown tokenizer.
    """
    if isinstance(metrics, Mapping):
        return dict(metrics)
    made: dict[str, EvaluationModule] = {}
    for metric in metrics:
        if isinstance(metric, str):
            made[metric] = _load_metric(metric, tokenize, lowercase, split)
        else:
            made[getattr(metric, "key", None) or metric.name] = metric
    return made


def _load_metric(
    name: str, tokenize: str | None, lowercase: bool, split: Splitter | None
) -> "EvaluationModule":
    from . import metric_classes

    if name == "bleu":
        return metric_classes.Bleu(tokenize, lowercase)
    if name == "token_error_rate":
        return metric_classes.TokenErrorRate(lowercase, split)
    if name in metric_classes.CLASSES:
        return metric_classes.CLASSES[name](lowercase)
    if ":" in name:
        return metric_classes.FunctionMetric(name, import_function(name, "metrics"))
    import evaluate

    try:
        return evaluate.load(name, keep_in_memory=True)
    # the code of a metric, which raises ImportError for a package that is missing, or the network
    except Exception as error:
        remedy = did_you_mean(name, TITLES) or f"built in are {', '.join(TITLES)}"
        raise UserError(
            f"metrics: {name!r}: evaluate.load cannot load it ({one_line(error)}); {remedy}"
        ) from error


@dataclass(frozen=True)
class Texts:
    """Translations of N sentences, and what they are compared with."""

    hypotheses: Sequence[str]
    references: Sequence[Sequence[str]]  #: one list of N, or several
    sources: Sequence[str] | None = None
    n_best: NBestLists | None = None  #: for `top_k`, the n-best list of each sentence

    def select(self, rows: Sequence[int]) -> "Texts":
        """The texts of some sentences."""
        return Texts(
            [self.hypotheses[row] for row in rows],
            [[column[row] for row in rows] for column in self.references],
            None if self.sources is None else [self.sources[row] for row in rows],
            None if self.n_best is None else [self.n_best[row] for row in rows],
        )

    def normalized(self, normalize: Normalizer | None) -> tuple["Texts", int]:
        """The texts in the forms of `normalize`, and the number of invalid hypotheses."""
        hypotheses, invalid = normalized_hypotheses(self.hypotheses, normalize)
        references = normalized_references(self.references, normalize)
        n_best = self.n_best
        if n_best is not None:
            n_best = [_ranked_forms(texts, normalize) for texts in n_best]
        return Texts(hypotheses, references, self.sources, n_best), invalid

    def check_lengths(self, labels: Sequence[str] | None = None) -> None:
        """Raise a UserError if there is no sentence, or if a list does not have one item for each of them."""
        count = len(self.hypotheses)
        if not count:
            raise UserError("hypotheses and references are empty: there is nothing to score")
        lists: list[tuple[str, Sequence[object] | None]] = [
            *(("references", column) for column in self.references),
            ("sources", self.sources),
            ("n_best", self.n_best),
            ("labels", labels),
        ]
        for name, texts in lists:
            if texts is not None and len(texts) != count:
                raise UserError(f"{count} hypotheses, but {len(texts)} {name}: each needs one")


def _ranked_forms(texts: Sequence[str], normalize: Normalizer | None) -> list[str]:
    """The places of an n-best list, filled up to its length, so that a list of 10 has a top 10."""
    places = n_best_places(texts, normalize)
    forms = [INVALID if valid is False else text for text, valid in places]
    return [*forms, *[INVALID] * (len(texts) - len(forms))]


def of_equal_length(lists: NBestLists, length: int) -> list[list[str]]:
    """n-best lists of `length` texts. Texts that equal no reference fill up a shorter one."""
    return [[*text_list(texts, "n_best"), *[INVALID] * (length - len(texts))] for texts in lists]


def longest(lists: Iterable[Sequence[str]]) -> int:
    """The length of the longest n-best list."""
    return max(map(len, lists), default=0)


def compute_metrics(metrics: "Mapping[str, EvaluationModule]", texts: Texts) -> Scores:
    """Compute metrics. The scores and the further results are those of `compute_metric`."""
    scores: dict[str, float] = {}
    details: dict[str, Detail] = {}
    for name, metric in metrics.items():
        its_scores, its_details = compute_metric(name, metric, texts)
        scores |= its_scores
        details |= its_details
    return Scores(scores, details)


def compute_metric(name: str, metric: "EvaluationModule", texts: Texts) -> Scores:
    """Compute one metric.

    Returns:
        The scores by name, and further results. A metric of `evaluate.load` with one number has its own name. Several
        numbers have theirs, such as `rouge1`, after the name of the metric if they do not start with it.
    """
    inputs = inputs_of(name, metric, texts)
    if not _is_own(name) and len(texts.references) == 1:
        inputs["references"] = list(texts.references[0])
    # `compute` gives the same numbers. It copies the texts to a table and back, which takes longer than most scores.
    compute = metric._compute if _is_built_in(metric) else metric.compute
    try:
        results = compute(**inputs)
    except UserError:
        raise
    except ValueError as error:
        if name in TITLES:
            raise
        raise UserError(f"metrics: {name}: {one_line(error)}") from error
    return _scores_and_details(name, results)


def inputs_of(name: str, metric: "EvaluationModule", texts: Texts) -> dict[str, list[Any]]:
    """The arguments of a metric's `compute`, with a list of references for each sentence."""
    features = metric.features if isinstance(metric.features, Mapping) else metric.features[0]
    rows = [list(row) for row in zip(*texts.references, strict=True)]
    inputs: dict[str, list[Any]] = {"predictions": list(texts.hypotheses), "references": rows}
    if name == "top_k":
        if texts.n_best is None:
            raise UserError("top_k: it scores n-best lists: give n_best")
        inputs["predictions"] = [list(each) for each in texts.n_best]
    if "sources" in features:
        if texts.sources is None and not hasattr(metric, "statistics"):
            raise UserError(f"metrics: {name} needs the sources: give them")
        inputs["sources"] = list(texts.sources or [""] * len(rows))
    return inputs


def _is_built_in(metric: "EvaluationModule") -> bool:
    from .metric_classes import CLASSES

    return type(metric) in CLASSES.values()


def _is_own(name: str) -> bool:
    """Return whether a metric is built in or a function, and not one of `evaluate.load`."""
    return name in TITLES or ":" in name


def _scores_and_details(name: str, results: dict[str, Any] | float) -> Scores:
    short = Path(name).name.removesuffix(".py")
    results = dict(results) if isinstance(results, Mapping) else {short: results}
    if name == "top_k":
        return Scores(results, {})
    if _is_own(name):
        return Scores({name: results.pop(name)}, results)
    numbers = {
        key: float(value)
        for key, value in results.items()
        if isinstance(value, int | float | np.number)
    }
    if len(numbers) == 1:
        return Scores({short: next(iter(numbers.values()))}, {})
    named = {
        key if key.startswith(short) else f"{short}_{key}": value for key, value in numbers.items()
    }
    return Scores(named, {})


def score_translations(
    hypotheses: Sequence[str],
    references: References,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    metrics: Metrics = DEFAULT,
    sources: Sequence[str] | None = None,
    n_best: NBestLists | None = None,
    normalize: Normalizer | None = None,
    groups: "Groups | None" = None,
    split: Splitter | None = None,
) -> dict[str, Any]:
    """Score translations.

    Args:
        hypotheses: the translations, detokenised unless `tokenize` is "none".
        references: one reference per hypothesis, or several such lists.
        tokenize: sacreBLEU's tokenizer for BLEU. None is the one that fits the references' script, such as zh for
            Chinese, and char for a mixture of scripts. The other metrics have none.
        lowercase: ignore case.
        metrics: names, or metrics of `evaluate`. A name is built in (`metric_names.TITLES`), MODULE:FUNCTION, or one
            that `evaluate.load` finds: a folder, or a metric on the Hub.
        sources: for metrics that need them, such as COMET.
        n_best: for `top_k`, the n-best list of each sentence, best first. Equal texts are one, also after
            `normalize`.
        normalize: brings texts to one form before they are compared. Texts for which it raises or returns None are
            invalid.
        groups: sentences that are scored apart, too, such as `bleu_en-de`.
        split: returns the tokens of a text for `token_error_rate`. None separates them at white space.

    Returns:
        Each score, such as `bleu`, and the signature of those of sacreBLEU, `bleu_signature`. With BLEU
        `brevity_penalty`, `precisions` (percent, n = 1 … 4), `hypothesis_length` and `reference_length` (tokens).
        `exact_match`, the percentage that equals a reference, and `sentences`. With `normalize` the percentage
        `invalid` of the hypotheses.

    Raises:
        UserError: empty lists, lists of different lengths, an item that is no string, or an unknown metric or
            tokenizer.

    Source: BLEU, Papineni et al. 2002. chrF, Popović 2015. TER, Snover et al. 2006. sacreBLEU, Post 2018, computes
    them.
    """
    scorer = Scorer.of(metrics, tokenize, lowercase, normalize, split)
    columns = reference_lists(references)
    if n_best is not None:
        n_best = of_equal_length(n_best, longest(n_best))
    texts = Texts(text_list(hypotheses, "hypotheses"), columns, sources, n_best)
    scores, details = scorer.score(texts, groups)
    return details | scores


@dataclass(frozen=True)
class Groups:
    """Sentences that are scored apart, as well as together."""

    names: Sequence[str]  #: the group of each sentence
    mean: bool  #: whether the score of all is the mean of the groups, such as directions, and not that of one corpus

    def rows(self) -> dict[str, list[int]]:
        """The sentences of each group, in the order of the first of each."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            rows.setdefault(name, []).append(row)
        return rows


@dataclass(frozen=True)
class Scorer:
    """Metrics, and how texts are compared. The fields are arguments of `score_translations`."""

    metrics: "Mapping[str, EvaluationModule]"
    normalize: Normalizer | None = None

    @classmethod
    def of(
        cls,
        metrics: Metrics = DEFAULT,
        tokenize: str | None = None,
        lowercase: bool = False,
        normalize: Normalizer | None = None,
        split: Splitter | None = None,
    ) -> "Scorer":
        """Make the metrics, with exact match."""
        made = make_metrics(metrics, tokenize, lowercase, split)
        if "exact_match" not in made:
            made |= make_metrics(["exact_match"], lowercase=lowercase)
        return cls(made, normalize)

    def score(self, texts: Texts, groups: Groups | None = None) -> Scores:
        """The scores, of all and of each group, such as `bleu_en-de`, and the rest of the results."""
        texts.check_lengths(groups.names if groups else None)
        if groups is None:
            return self._score_all(texts)
        apart = {name: self._score_all(texts.select(rows)) for name, rows in groups.rows().items()}
        if groups.mean:
            scores, details = _mean_of_groups(apart)
            details["sentences"] = len(texts.hypotheses)
        else:
            scores, details = self._score_all(texts)
        for name, (its_scores, _) in apart.items():
            scores |= {f"{metric}_{name}": value for metric, value in its_scores.items()}
        return Scores(scores, details)

    def _score_all(self, texts: Texts) -> Scores:
        count = len(texts.hypotheses)
        compared, invalid = texts.normalized(self.normalize)
        scores, details = compute_metrics(self.metrics, compared)
        if self.normalize is not None:
            scores["invalid"] = 100 * invalid / count
        return Scores(scores, {"sentences": count, **details})


def _mean_of_groups(apart: Mapping[str, Scores]) -> Scores:
    """The mean of each score that all groups have, and the signatures of all groups."""
    all_scores = [scores for scores, _ in apart.values()]
    common = [name for name in all_scores[0] if all(name in scores for scores in all_scores)]
    means = {name: fmean(scores[name] for scores in all_scores) for name in common}
    signatures: dict[str, Detail] = {}
    for name in SIGNED:
        key = f"{name}_signature"
        of_groups = [str(details[key]) for _, details in apart.values() if key in details]
        if of_groups:
            signatures[key] = "; ".join(dict.fromkeys(of_groups))
    return Scores(means, signatures)


def score_names(metrics: "Mapping[str, EvaluationModule]") -> list[str]:
    """The names of the scores of metrics. Those of `evaluate.load` compute a sentence to tell theirs."""
    names = []
    for name, metric in metrics.items():
        if name == "top_k":
            names += [f"top_{k}" for k in TOP]
        elif _is_own(name):
            names.append(name)
        else:
            trial = ["a trial of five words"]
            names += compute_metric(name, metric, Texts(trial, [trial], trial)).scores
    return list(dict.fromkeys([*names, "exact_match"]))


def signatures_of(
    references: Sequence[str],
    options: ScoreOptions,
    groups: Groups | None = None,
) -> dict[str, str]:
    """The signatures of sacreBLEU that scores with these references have, such as `bleu_signature`."""
    results = score_translations(
        [""] * len(references),
        references,
        metrics=[name for name in options.get("metrics", DEFAULT) if name in SIGNED],
        tokenize=options.get("tokenize"),
        lowercase=options.get("lowercase", False),
        groups=groups,
    )
    return {name: value for name, value in results.items() if name.endswith("_signature")}


def example_translations(
    sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str], count: int = 5
) -> list[list[str]]:
    """Return [source, reference, hypothesis] of `count` sentences at even distances, so that nobody chooses them."""
    if not hypotheses:
        return []
    indices = dict.fromkeys(number * len(hypotheses) // count for number in range(count))
    return [[sources[index], references[index], hypotheses[index]] for index in indices]


def reference_lists(references: References) -> list[list[str]]:
    """Return the lists of references. One list may stand alone."""
    check_items("references", references)
    items = list(references)
    if items and all(isinstance(item, Iterable) and not isinstance(item, str) for item in items):
        return [text_list(column, "references") for column in items]
    return [text_list(items, "references")]


def text_list(texts: Sequence[object], name: str) -> list[str]:
    """The texts as a list. Raises a UserError if one is no string."""
    check_items(name, texts)
    checked = []
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError(f"{name}: line {number} is {text!r}, not a string")
        checked.append(text)
    return checked
