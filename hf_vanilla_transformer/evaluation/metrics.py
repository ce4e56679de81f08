"""Scores of translations: built-in ones with the signatures of sacreBLEU, and every metric of `evaluate.load`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, Seq2SeqTrainer

from ..data.language_tokens import language_tokens
from ..data.side_tokens import AS_TEXT
from ..data.token_kinds import tokenizer_task
from ..loss_vanilla_transformer import IGNORED
from ..utils.errors import UserError, did_you_mean
from ..utils.normalization import (
    Normalizer,
    normalized_hypotheses,
    normalized_list,
    normalized_references,
)
from ..utils.untrusted import one_line
from ..utils.user_code import import_object
from .metric_names import DEFAULT, SIGNED, TITLES, TOP, ScoreOptions, title_of

if TYPE_CHECKING:
    from evaluate import EvaluationModule

#: Names (`metric_names.TITLES`, MODULE:FUNCTION, or whatever `evaluate.load` takes) or metrics of `evaluate`. A
#: mapping names the metrics.
Metrics: TypeAlias = "Sequence[str | EvaluationModule] | Mapping[str, EvaluationModule]"
#: Token ids (N, T), or a tuple of outputs that starts with them.
TokenIds: TypeAlias = "np.ndarray | Sequence[Sequence[int]] | tuple[np.ndarray, ...]"
#: What a metric tells besides its score: a signature, a count, the precisions of n-grams.
Detail: TypeAlias = str | float | list[float]


class Scores(NamedTuple):
    """The results of metrics."""

    scores: dict[str, float]
    details: dict[str, Detail]


def make_metrics(
    metrics: Metrics, tokenize: str | None = None, lowercase: bool = False
) -> "dict[str, EvaluationModule]":
    """Return metrics of `evaluate` by name.

    Args:
        metrics: names or metrics.
        tokenize, lowercase: as of `score_translations`.

    Raises:
        UserError: a name that is neither built in nor found by `evaluate.load`, or an unknown tokenizer.
    """
    if isinstance(metrics, Mapping):
        return dict(metrics)
    made: dict[str, EvaluationModule] = {}
    for metric in metrics:
        if isinstance(metric, str):
            made[metric] = _load_metric(metric, tokenize, lowercase)
        else:
            made[getattr(metric, "key", None) or metric.name] = metric
    return made


def _load_metric(name: str, tokenize: str | None, lowercase: bool) -> "EvaluationModule":
    from . import metric_classes

    if name == "bleu":
        return metric_classes.Bleu(tokenize, lowercase)
    if name in metric_classes.CLASSES:
        return metric_classes.CLASSES[name](lowercase)
    if ":" in name:
        try:
            return metric_classes.FunctionMetric(name, import_object(name))
        except Exception as error:  # the code of the user
            raise UserError(f"metrics: {name}: {one_line(error)}; give MODULE:FUNCTION") from error
    import evaluate

    try:
        return evaluate.load(name, keep_in_memory=True)
    # the code of a metric, which raises ImportError for a package that is missing, or the network
    except Exception as error:
        remedy = did_you_mean(name, TITLES) or f"built in are {', '.join(TITLES)}"
        raise UserError(
            f"metrics: {name!r}: evaluate.load cannot load it ({one_line(error)}); {remedy}"
        ) from error


def compute_metric(
    name: str,
    metric: "EvaluationModule",
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None = None,
    n_best: Sequence[Sequence[str]] | None = None,
) -> Scores:
    """Compute one metric.

    Returns:
        The scores by name, and further results. A metric of `evaluate.load` with one number has its own name. Several
        numbers have theirs, such as `rouge1`, after the name of the metric if they do not start with it.
    """
    features = metric.features if isinstance(metric.features, Mapping) else metric.features[0]
    rows = [list(row) for row in zip(*references, strict=True)]
    inputs: dict[str, Sequence[str | list[str]]] = {
        "predictions": list(hypotheses),
        "references": rows,
    }
    if name == "top_k":
        if n_best is None:
            raise UserError("top_k: it scores n-best lists: give n_best")
        inputs["predictions"] = [list(texts) for texts in n_best]
    if "sources" in features:
        own = type(metric).__name__ == "FunctionMetric"
        if sources is None and not own:
            raise UserError(f"metrics: {name} needs the sources: give them")
        inputs["sources"] = list(sources or [""] * len(rows))
    if name not in TITLES and ":" not in name and len(references) == 1:
        inputs["references"] = list(references[0])
    try:
        results = metric.compute(**inputs)
    except UserError:
        raise
    except ValueError as error:
        if name in TITLES:
            raise
        raise UserError(f"metrics: {name}: {one_line(error)}") from error
    return _scores_and_details(name, results)


def _scores_and_details(name: str, results: dict[str, Any] | float) -> Scores:
    short = Path(name).name.removesuffix(".py")
    results = dict(results) if isinstance(results, Mapping) else {short: results}
    if name == "top_k":
        return Scores(results, {})
    if name in TITLES or ":" in name:
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
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    metrics: Metrics = DEFAULT,
    sources: Sequence[str] | None = None,
    n_best: Sequence[Sequence[str]] | None = None,
    normalize: Normalizer | None = None,
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
        n_best: for `top_k`, the n-best list of each sentence. Texts that `normalize` makes equal are one.
        normalize: brings texts to one form before they are compared. Texts for which it raises or returns None are
            invalid.

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
    scores, details = _score(
        hypotheses,
        references,
        make_metrics(metrics, tokenize, lowercase),
        lowercase=lowercase,
        sources=sources,
        n_best=n_best,
        normalize=normalize,
    )
    return details | scores


def _score(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    metrics: "Mapping[str, EvaluationModule]",
    *,
    lowercase: bool = False,
    sources: Sequence[str] | None = None,
    n_best: Sequence[Sequence[str]] | None = None,
    normalize: Normalizer | None = None,
) -> Scores:
    """The scores of `score_translations`, and the rest of its results."""
    hypotheses = text_list(hypotheses, "hypotheses")
    columns = reference_lists(references)
    for column in columns:
        if len(hypotheses) != len(column):
            raise UserError(
                f"{len(hypotheses)} hypotheses, but {len(column)} references: each needs one"
            )
    if not hypotheses:
        raise UserError("hypotheses and references are empty: there is nothing to score")
    hypotheses, invalid = normalized_hypotheses(hypotheses, normalize)
    columns = normalized_references(columns, normalize)
    if n_best is not None:
        n_best = [normalized_list(texts, normalize) for texts in n_best]
    scores: dict[str, float] = {}
    details: dict[str, Detail] = {"sentences": len(hypotheses)}
    if "exact_match" not in metrics:
        metrics = {**metrics, **make_metrics(["exact_match"], lowercase=lowercase)}
    for name, metric in metrics.items():
        its_scores, its_details = compute_metric(name, metric, hypotheses, columns, sources, n_best)
        scores |= its_scores
        details |= its_details
    if normalize is not None:
        scores["invalid"] = 100 * invalid / len(hypotheses)
    return Scores(scores, details)


@dataclass(frozen=True)
class Groups:
    """Sentences that are scored apart, as well as together."""

    names: Sequence[str]  #: the group of each sentence
    mean: bool  #: whether the score of all is the mean of the groups, such as directions, and not that of one corpus

    def score(
        self,
        hypotheses: Sequence[str],
        references: Sequence[str] | Sequence[Sequence[str]],
        *,
        tokenize: str | None = None,
        lowercase: bool = False,
        metrics: Metrics = DEFAULT,
        sources: Sequence[str] | None = None,
        n_best: Sequence[Sequence[str]] | None = None,
        normalize: Normalizer | None = None,
    ) -> dict[str, Any]:
        """As `score_translations`, and each score of each group, such as `bleu_en-de`."""
        made = make_metrics(metrics, tokenize, lowercase)
        scores, details = self.scores_and_details(
            hypotheses,
            references,
            made,
            lowercase=lowercase,
            sources=sources,
            n_best=n_best,
            normalize=normalize,
        )
        return details | scores

    def scores_and_details(
        self,
        hypotheses: Sequence[str],
        references: Sequence[str] | Sequence[Sequence[str]],
        metrics: "Mapping[str, EvaluationModule]",
        *,
        lowercase: bool = False,
        sources: Sequence[str] | None = None,
        n_best: Sequence[Sequence[str]] | None = None,
        normalize: Normalizer | None = None,
    ) -> Scores:
        """The scores, of all and of each group, and the rest of the results of `score`."""
        columns = reference_lists(references)
        apart: dict[str, Scores] = {}
        for name, rows in self.rows().items():
            apart[name] = _score(
                [hypotheses[row] for row in rows],
                [[column[row] for row in rows] for column in columns],
                metrics,
                lowercase=lowercase,
                sources=None if sources is None else [sources[row] for row in rows],
                n_best=None if n_best is None else [n_best[row] for row in rows],
                normalize=normalize,
            )
        if self.mean:
            scores, details = _mean_of_groups(apart)
            details["sentences"] = len(hypotheses)
        else:
            scores, details = _score(
                hypotheses,
                columns,
                metrics,
                lowercase=lowercase,
                sources=sources,
                n_best=n_best,
                normalize=normalize,
            )
        for name, (its_scores, _) in apart.items():
            scores |= {f"{metric}_{name}": value for metric, value in its_scores.items()}
        return Scores(scores, details)

    def rows(self) -> dict[str, list[int]]:
        """The sentences of each group, in the order of the first of each."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            rows.setdefault(name, []).append(row)
        return rows


def _mean_of_groups(
    apart: Mapping[str, Scores],
) -> Scores:
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
        elif name in TITLES or ":" in name:
            names.append(name)
        else:
            trial = ["a trial of five words"]
            names += compute_metric(name, metric, trial, [trial], trial)[0]
    return list(dict.fromkeys([*names, "exact_match"]))


def signatures_of(
    references: Sequence[str],
    options: ScoreOptions,
    groups: Groups | None = None,
) -> dict[str, str]:
    """The signatures of sacreBLEU that scores with these references have, such as `bleu_signature`."""
    score = groups.score if groups else score_translations
    results = score(
        [""] * len(references),
        references,
        metrics=[name for name in options.get("metrics", DEFAULT) if name in SIGNED],
        tokenize=options.get("tokenize"),
        lowercase=options.get("lowercase", False),
    )
    return {name: value for name, value in results.items() if name.endswith("_signature")}


def example_translations(
    sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str], count: int = 5
) -> list[list[str]]:
    """Return [source, reference, hypothesis] of `count` sentences at even distances, so that nobody chooses them."""
    indices = (
        dict.fromkeys(number * len(hypotheses) // count for number in range(count))
        if hypotheses
        else ()
    )
    return [[sources[index], references[index], hypotheses[index]] for index in indices]


def translation_metrics(
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    groups: Groups | None = None,
    metrics: Metrics = DEFAULT,
    sources: Sequence[str] | None = None,
    normalize: Normalizer | None = None,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function for the `compute_metrics` argument of any `Seq2SeqTrainer`.

        args = Seq2SeqTrainingArguments(…, predict_with_generate=True)
        trainer = Seq2SeqTrainer(model, args, …, compute_metrics=translation_metrics(tokenizer))

    Args:
        tokenizer: the tokenizer of the target language.
        tokenize, lowercase, metrics, normalize: see `score_translations`.
        groups: of predictions of as many sentences. Others are scored without groups.
        sources: of predictions of as many sentences, for metrics that need them.

    Returns:
        A function from predicted ids (N, T) and label ids (N, T'), padded with -100, to the scores, such as `bleu`,
        `chrf` and `exact_match` (percent), and `gen_len` (mean number of tokens without padding, as in Hugging Face's
        `run_translation.py`).

    Raises:
        UserError: the tokenizer has no pad token, or sacreBLEU does not know `tokenize`.
    """
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        raise UserError(
            "tokenizer: it has no pad token, so predictions cannot be distinguished from padding; set one"
        )
    made = make_metrics(metrics, tokenize, lowercase)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predicted = _token_ids(prediction.predictions, pad_id)
        labels = _token_ids(prediction.label_ids, pad_id)
        # `Seq2SeqTrainer` pads with the source's token, which may be a word of the target. The first token may be EOS.
        for ids, start in ((predicted, 1), (labels, 0)):
            ended = np.cumsum(ids[:, start:] == tokenizer.eos_token_id, axis=1)
            ids[:, start + 1 :][ended[:, :-1] > 0] = pad_id
        hypotheses = decode_ids(tokenizer, predicted)
        references = decode_ids(tokenizer, labels)
        is_whole = sources is not None and len(sources) == len(predicted)
        by_group = groups is not None and len(groups.names) == len(predicted)
        score = groups.scores_and_details if groups and by_group else _score
        scores, _ = score(
            hypotheses,
            references,
            made,
            lowercase=lowercase,
            sources=sources if is_whole else None,
            normalize=normalize,
        )
        gen_len = np.count_nonzero(predicted != pad_id, axis=1).mean()
        return {name: float(value) for name, value in scores.items()} | {"gen_len": float(gen_len)}

    return compute_metrics


def score_test_split(
    trainer: Seq2SeqTrainer,
    dataset: Dataset,
    pairs: Dataset | Mapping[str, Sequence[str]],
    split: str,
    options: ScoreOptions,
    groups: Groups | None = None,
) -> dict[str, object]:
    """Translate a test split with the model's generation config, and score it against the raw references.

    Args:
        dataset: the encoded pairs.
        pairs: their text, with the columns "source" and "target".
        split: the name that the metrics start with, such as "test" for `test_bleu`.
        options: arguments of `score_translations`.
        groups: of the sentences.

    Returns:
        The scores, `seconds`, and `examples` of `example_translations`, by name.
    """
    start = time.monotonic()
    tokenizer = getattr(trainer, "target_tokenizer", None) or trainer.processing_class
    beams = trainer.model.generation_config.num_beams or 1
    report = print if trainer.is_world_process_zero() else lambda *_, **__: None
    count = f"{len(dataset):,}"
    work = (
        f"translating {count} sentences"
        if tokenizer_task(tokenizer) == "language"
        else f"{count} predictions"
    )
    report(f"{split}: {work}, {beams} beam{'s' if beams > 1 else ''}", flush=True)
    # The saved model translates without this limit of evaluations while training.
    limit = trainer.args.generation_max_length
    trainer.args.generation_max_length = None
    try:
        predicted = trainer.predict(dataset, metric_key_prefix=split, num_beams=beams)
    finally:
        trainer.args.generation_max_length = limit
    seconds = time.monotonic() - start
    hypotheses = decode_ids(tokenizer, predicted.predictions)
    sources = pairs["source"]
    references = pairs["target"]
    lowercase = options.get("lowercase", False)
    made = make_metrics(options.get("metrics", DEFAULT), options.get("tokenize"), lowercase)
    score = groups.scores_and_details if groups else _score
    values, details = score(
        hypotheses,
        references,
        made,
        lowercase=lowercase,
        sources=list(sources),
        normalize=options.get("normalize"),
    )
    scores = details | values
    report(f"{split}: {_shown(values, details)}", flush=True)
    for name in dict.fromkeys(groups.names) if groups else ():
        of_group = {
            key.removesuffix(f"_{name}"): value
            for key, value in values.items()
            if key.endswith(f"_{name}")
        }
        report(f"  {name}: {_shown(of_group, {})}", flush=True)
    computed = tuple(f"{split}_{name}" for name in values)  # with the groups of another split
    metrics = {
        name: value for name, value in predicted.metrics.items() if name.startswith(f"{split}_")
    }
    metrics = {name: value for name, value in metrics.items() if not name.startswith(computed)}
    named = {f"{split}_{name}": value for name, value in scores.items()}
    return {
        **metrics,
        **named,
        f"{split}_seconds": seconds,
        f"{split}_examples": example_translations(sources, references, hypotheses),
    }


def _shown(scores: Mapping[str, float], details: Mapping[str, Detail]) -> str:
    """Scores of all in one line, such as `BLEU 34.10 (BLEU|…), chrF 60.20`."""
    plain = [
        name
        for name in scores
        if name in TITLES or not any(name.startswith(f"{each}_") for each in TITLES)
    ]
    texts = []
    for name in plain:
        signature = details.get(f"{name}_signature") if name == "bleu" else None
        texts.append(
            f"{title_of(name)} {scores[name]:.2f}" + (f" ({signature})" if signature else "")
        )
    return ", ".join(texts)


def reference_lists(references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the lists of references. One list may stand alone."""
    if bool(references) and all(isinstance(item, list | tuple) for item in references):
        return [text_list(column, "references") for column in references]
    return [text_list(references, "references")]


def text_list(texts: Sequence[object], name: str) -> list[str]:
    if isinstance(texts, str):
        raise UserError(f"{name}: a list of strings is needed, not one string")
    checked = []
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError(f"{name}: line {number} is {text!r}, not a string")
        checked.append(text)
    return checked


def _token_ids(ids: TokenIds, pad_id: int) -> np.ndarray:
    """The ids (N, T) with -100 replaced by `pad_id`, as a copy, because the trainer keeps using its arrays."""
    array = np.asarray(ids[0] if isinstance(ids, tuple) else ids)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"compute_metrics: token ids (N, T) are needed, not {array.dtype} of shape {array.shape}; "
            "set predict_with_generate=True"
        )
    return np.where(array == IGNORED, pad_id, array)


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: TokenIds) -> list[str]:
    """The texts of predictions or labels (N, T), without the tokens of languages, which M2M-100 decodes as text."""
    ids = _token_ids(ids, tokenizer.pad_token_id)
    languages = language_tokens(tokenizer, "target")
    marks = list(languages.ids.values()) if languages and languages.target_mark else []
    return tokenizer.batch_decode(
        np.where(np.isin(ids, marks), tokenizer.pad_token_id, ids), **AS_TEXT
    )
