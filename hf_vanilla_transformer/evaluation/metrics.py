"""BLEU, chrF, TER and exact match, with the signatures of sacreBLEU."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np
from datasets import Dataset
from sacrebleu.metrics import BLEU, CHRF, TER
from transformers import EvalPrediction, PreTrainedTokenizerBase, Seq2SeqTrainer

from ..data.language_tokens import language_tokens
from ..data.side_tokens import AS_TEXT
from ..inference.loading import import_object
from ..loss_vanilla_transformer import IGNORED
from ..utils.errors import UserError
from ..utils.untrusted import one_line

#: sacreBLEU's tokenizers for scripts in which its default, 13a, finds no words. Thai, Lao, Tibetan, Burmese and Khmer
#: have none that works without a download.
_SCRIPTS = {
    "ja-mecab": re.compile("[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f]"),  # kana
    "ko-mecab": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "zh": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "char": re.compile("[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff]"),
}
_LETTER = re.compile(r"[^\W\d_]")


def fitting_tokenizer(references: Sequence[str]) -> str:
    """Return sacreBLEU's tokenizer for the script of the references: 13a, zh, ja-mecab, ko-mecab or char.

    If the package of a tokenizer is missing, a warning names it, and the tokenizer is char.
    """
    name = _of_script(references)
    try:
        check_tokenizer(name)
    except UserError as error:
        _warn_once(f"{error}; BLEU is of characters until then")
        return "char"
    return name


def _of_script(references: Sequence[str]) -> str:
    text = "".join(references[:1000])
    counts = {name: len(script.findall(text)) for name, script in _SCRIPTS.items()}
    # A fifth is enough: one such letter stands for several Latin ones, and 13a is right for the rest in each of them.
    if 5 * sum(counts.values()) <= len(_LETTER.findall(text)):
        return "13a"
    # Japanese text has Chinese characters too, but no other text has kana.
    return "ja-mecab" if counts["ja-mecab"] > 0.1 * counts["zh"] else max(counts, key=lambda each: counts[each])


#: sacreBLEU's metrics, made from a tokenizer for BLEU and whether case is ignored. `force`: no warning that the text
#: looks tokenised, as "none" expects.
METRICS: dict[str, Callable[[str | None, bool], Any]] = {
    "bleu": lambda tokenize, lowercase: BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none"),
    "chrf": lambda _, lowercase: CHRF(lowercase=lowercase),
    "chrf++": lambda _, lowercase: CHRF(lowercase=lowercase, word_order=2),
    "ter": lambda _, lowercase: TER(case_sensitive=not lowercase),
}


def make_metrics(
    names: Sequence[str], references: Sequence[Sequence[str]], tokenize: str | None = None, lowercase: bool = False
) -> dict[str, Any]:
    """Return sacreBLEU's metrics by name.

    Args:
        names: of `METRICS`.
        references, tokenize, lowercase: as of `score_translations`. The references choose the tokenizer.

    Raises:
        UserError: a name or a tokenizer that sacreBLEU does not know or cannot load.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise UserError(f"metrics: {unknown[0]!r} is unknown; choose from {', '.join(METRICS)}, or MODULE:FUNCTION")
    if "bleu" in names:
        tokenize, chosen = tokenize or fitting_tokenizer(references[0]), tokenize
        fitting = _of_script(references[0])
        if chosen in ("13a", "intl") and fitting not in ("13a", "ko-mecab"):
            _warn_once(f"tokenize={chosen!r} counts whole sentences of this script as words; take {fitting!r}")
        elif chosen in _SCRIPTS and chosen not in ("char", fitting):
            _warn_once(f"tokenize={chosen!r} is for a different script than that of the references; take {fitting!r}")
        check_tokenizer(tokenize)
    return {name: METRICS[name](tokenize, lowercase) for name in names}


def import_metrics(names: Sequence[str]) -> tuple[list[str], dict[str, Callable]]:
    """Split the names of metrics into those of `METRICS` and functions, which are imported as MODULE:FUNCTION."""
    functions = {}
    for name in (name for name in names if ":" in name):
        try:
            functions[name] = import_object(name)
        except Exception as error:  # the code of the user
            raise UserError(f"metrics: {name}: {one_line(error)}; give MODULE:FUNCTION") from error
    metrics = [name for name in names if name not in functions]
    make_metrics(metrics, [[""]])  # refuses an unknown name
    return metrics, functions


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    metrics: Sequence[str] = ("bleu", "chrf"),
) -> dict[str, Any]:
    """Score translations.

    Args:
        hypotheses: the translations, detokenised unless `tokenize` is "none".
        references: one reference per hypothesis, or several such lists.
        tokenize: sacreBLEU's tokenizer for BLEU. None is the one that fits the references' script, such as zh for
            Chinese. The other metrics have none.
        lowercase: ignore case.
        metrics: names of `METRICS`.

    Returns:
        Each metric, such as `bleu`, and its signature, `bleu_signature`. With BLEU `brevity_penalty`, `precisions`
        (percent, n = 1 … 4), `hypothesis_length` and `reference_length` (tokens). `exact_match`, the percentage that
        equals a reference, and `sentences`.

    Raises:
        UserError: empty lists, lists of different lengths, an item that is no string, or an unknown metric or
            tokenizer.

    Source: BLEU, Papineni et al. 2002. chrF, Popović 2015. TER, Snover et al. 2006. sacreBLEU, Post 2018, computes
    them.
    """
    hypotheses, references = _text_list(hypotheses, "hypotheses"), reference_lists(references)
    for column in references:
        if len(hypotheses) != len(column):
            raise UserError(f"{len(hypotheses)} hypotheses, but {len(column)} references: each needs one")
    if not hypotheses:
        raise UserError("hypotheses and references are empty: there is nothing to score")
    results: dict[str, Any] = {}
    for name, metric in make_metrics(metrics, references, tokenize, lowercase).items():
        score = metric.corpus_score(hypotheses, references)
        results |= {name: score.score, f"{name}_signature": f"{score.name}|{metric.get_signature()}"}
        if name == "bleu":
            results |= {"brevity_penalty": score.bp, "precisions": list(score.precisions)}
            results |= {"hypothesis_length": score.sys_len, "reference_length": score.ref_len}
    # spaces at the ends do not count, as in sacreBLEU
    normalise = (lambda text: text.strip().lower()) if lowercase else str.strip
    rows = zip(hypotheses, *references, strict=True)
    equal = sum(normalise(hypothesis) in map(normalise, alternatives) for hypothesis, *alternatives in rows)
    exact_match = 100 * equal / len(hypotheses)
    if results.get("bleu") == 0 and exact_match > 0:
        _warn_once(
            "BLEU is 0 although some lines equal their references: with this tokenizer no matching line has a 4-gram; "
            "use tokenize='char' or chrF for such text"
        )
    return results | {"exact_match": exact_match, "sentences": len(hypotheses)}


_BY_GROUP = "bleu", "chrf", "exact_match"


@dataclass(frozen=True)
class Groups:
    """Sentences that are scored apart, as well as together."""

    names: Sequence[str]  #: the group of each sentence
    mean: bool  #: whether the score of all is the mean of the groups, such as directions, and not that of one corpus

    def score(self, hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> dict[str, Any]:
        """As `score_translations`, and each metric of each group, such as `bleu_en-de`."""
        apart = {}
        for name in dict.fromkeys(self.names):
            rows = [row for row, other in enumerate(self.names) if other == name]
            sides = ([side[row] for row in rows] for side in (hypotheses, references))
            apart[name] = score_translations(*sides, **options)
        if self.mean:
            together: dict[str, Any] = {
                metric: fmean(scores[metric] for scores in apart.values()) for metric in _BY_GROUP
            }
            for metric in ("bleu_signature", "chrf_signature"):
                together[metric] = "; ".join(dict.fromkeys(scores[metric] for scores in apart.values()))
            together["sentences"] = len(hypotheses)
        else:
            together = score_translations(hypotheses, references, **options)
        return together | {f"{metric}_{name}": each[metric] for name, each in apart.items() for metric in _BY_GROUP}


def example_translations(
    sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str], count: int = 5
) -> list[list[str]]:
    """Return [source, reference, hypothesis] of `count` sentences at even distances, so that nobody chooses them."""
    indices = dict.fromkeys(number * len(hypotheses) // count for number in range(count)) if hypotheses else ()
    return [[sources[index], references[index], hypotheses[index]] for index in indices]


def translation_metrics(
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    groups: Groups | None = None,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function for the `compute_metrics` argument of any `Seq2SeqTrainer`.

        args = Seq2SeqTrainingArguments(…, predict_with_generate=True)
        trainer = Seq2SeqTrainer(model, args, …, compute_metrics=translation_metrics(tokenizer))

    Args:
        tokenizer: the tokenizer of the target language.
        tokenize, lowercase: see `score_translations`.
        groups: of predictions of as many sentences. Others are scored without groups.

    Returns:
        A function from predicted ids (N, T) and label ids (N, T'), padded with -100, to `bleu`, `chrf`, `exact_match`
        (percent) and `gen_len` (mean number of tokens without padding, as in Hugging Face's `run_translation.py`).

    Raises:
        UserError: the tokenizer has no pad token, or sacreBLEU does not know `tokenize`.
    """
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        raise UserError("tokenizer: it has no pad token, so predictions cannot be distinguished from padding; set one")
    if tokenize:
        check_tokenizer(tokenize)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predicted, labels = _token_ids(prediction.predictions, pad_id), _token_ids(prediction.label_ids, pad_id)
        # `Seq2SeqTrainer` pads with the source's token, which may be a word of the target. The first token may be EOS.
        for ids, start in ((predicted, 1), (labels, 0)):
            ended = np.cumsum(ids[:, start:] == tokenizer.eos_token_id, axis=1)
            ids[:, start + 1 :][ended[:, :-1] > 0] = pad_id
        score = groups.score if groups and len(groups.names) == len(predicted) else score_translations
        texts = decode_ids(tokenizer, predicted), decode_ids(tokenizer, labels)
        scores = score(*texts, tokenize=tokenize, lowercase=lowercase)
        gen_len = np.count_nonzero(predicted != pad_id, axis=1).mean()
        names = [name for name in scores if name.startswith(_BY_GROUP) and "signature" not in name]
        return {name: float(scores[name]) for name in names} | {"gen_len": float(gen_len)}

    return compute_metrics


def score_test_split(
    trainer: Seq2SeqTrainer,
    dataset: Dataset,
    pairs: Any,
    split: str,
    options: dict[str, Any],
    groups: Groups | None = None,
) -> dict[str, Any]:
    """Translate a test split with the model's generation config, and score it against the raw references.

    Args:
        dataset: the encoded pairs.
        pairs: their text, with the columns "source" and "target".
        split: the name that the metrics start with, such as "test" for `test_bleu`.
        options: keyword arguments of `score_translations`.
        groups: of the sentences.

    Returns:
        The scores, `seconds`, and `examples` of `example_translations`, by name.
    """
    start = time.monotonic()
    tokenizer = getattr(trainer, "target_tokenizer", None) or trainer.processing_class
    beams = trainer.model.generation_config.num_beams or 1
    report = print if trainer.is_world_process_zero() else lambda *_, **__: None
    report(f"{split}: translating {len(dataset):,} sentences, {beams} beam{'s' if beams > 1 else ''}", flush=True)
    # The saved model translates without this limit of evaluations while training.
    limit, trainer.args.generation_max_length = trainer.args.generation_max_length, None
    try:
        predicted = trainer.predict(dataset, metric_key_prefix=split, num_beams=beams)
    finally:
        trainer.args.generation_max_length = limit
    seconds = time.monotonic() - start
    hypotheses = decode_ids(tokenizer, predicted.predictions)
    sources, references = pairs["source"], pairs["target"]
    scores = (groups.score if groups else score_translations)(hypotheses, references, **options)
    report(f"{split}: BLEU {scores['bleu']:.2f} ({scores['bleu_signature']}), chrF {scores['chrf']:.2f}", flush=True)
    for name in dict.fromkeys(groups.names) if groups else ():
        report(f"  {name}: BLEU {scores[f'bleu_{name}']:.2f}, chrF {scores[f'chrf_{name}']:.2f}", flush=True)
    computed = tuple(f"{split}_{name}" for name in _BY_GROUP)  # with the groups of another split
    metrics = {name: value for name, value in predicted.metrics.items() if name.startswith(f"{split}_")}
    metrics = {name: value for name, value in metrics.items() if not name.startswith(computed)}
    scores |= {"seconds": seconds, "examples": example_translations(sources, references, hypotheses)}
    return metrics | {f"{split}_{name}": value for name, value in scores.items()}


@lru_cache
def check_tokenizer(name: str) -> None:
    """Check that sacreBLEU can load a tokenizer, before hours of decoding."""
    if name not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize: sacreBLEU has no tokenizer {name!r}; choose one of {', '.join(BLEU.TOKENIZERS)}")
    try:
        BLEU(tokenize=name)
    # if a tokenizer needs a package or a download, sacreBLEU raises exceptions of many types
    except Exception as error:
        reason = one_line(error)
        raise UserError(
            f"tokenize: sacreBLEU cannot use {name!r} here ({reason}); install it or take 'char'"
        ) from error


@lru_cache  # not at every evaluation of a training run
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning("%s", message)


def reference_lists(references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the lists of references. One list may stand alone."""
    several = bool(references) and all(isinstance(item, list | tuple) for item in references)
    columns: Any = references if several else [references]
    return [_text_list(column, "references") for column in columns]


def _text_list(texts: Sequence[str], name: str) -> list[str]:
    if isinstance(texts, str):
        raise UserError(f"{name}: a list of strings is needed, not one string")
    texts = list(texts)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError(f"{name}: line {number} is {text!r}, not a string")
    return texts


def _token_ids(ids: Any, pad_id: int) -> np.ndarray:
    """The ids (N, T) with -100 replaced by `pad_id`, as a copy, because the trainer keeps using its arrays."""
    array = np.asarray(ids[0] if isinstance(ids, tuple) else ids)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"compute_metrics: token ids (N, T) are needed, not {array.dtype} of shape {array.shape}; "
            "set predict_with_generate=True"
        )
    return np.where(array == IGNORED, pad_id, array)


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Any) -> list[str]:
    """The texts of predictions or labels (N, T), without the tokens of languages, which M2M-100 decodes as text."""
    ids, languages = _token_ids(ids, tokenizer.pad_token_id), language_tokens(tokenizer, "target")
    marks = list(languages.ids.values()) if languages and languages.target_mark else []
    return tokenizer.batch_decode(np.where(np.isin(ids, marks), tokenizer.pad_token_id, ids), **AS_TEXT)
