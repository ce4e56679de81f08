"""The scores of a trainer's predictions, of this package's trainer and of any `Seq2SeqTrainer`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, Seq2SeqTrainer

from ..text.language_tokens import decode_targets, token_ids
from ..text.token_kinds import token_splitter, tokenizer_task
from ..utils.errors import UserError
from ..utils.normalization import Normalizer
from .metric_names import DEFAULT, ScoreOptions, title_of
from .metrics import Detail, Groups, Metrics, Scorer, Texts, example_translations

#: The `compute_metrics` of a `Seq2SeqTrainer`.
ComputeMetrics: TypeAlias = Callable[[EvalPrediction], dict[str, float]]


def translation_metrics(
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    groups: Groups | None = None,
    metrics: Metrics = DEFAULT,
    sources: Sequence[str] | None = None,
    normalize: Normalizer | None = None,
) -> ComputeMetrics:
    """Return a function for the `compute_metrics` argument of any `Seq2SeqTrainer`.

        args = Seq2SeqTrainingArguments(…, predict_with_generate=True)
        trainer = Seq2SeqTrainer(model, args, …, compute_metrics=translation_metrics(tokenizer))

    Args:
        tokenizer: the tokenizer of the target language. It gives the tokens of `token_error_rate`.
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
    scorer = Scorer.of(metrics, tokenize, lowercase, normalize, token_splitter(tokenizer))

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predicted = token_ids(prediction.predictions, pad_id)
        labels = token_ids(prediction.label_ids, pad_id)
        # `Seq2SeqTrainer` pads with the source's token, which may be a word of the target. The first token may be EOS.
        for ids, start in ((predicted, 1), (labels, 0)):
            ended = np.cumsum(ids[:, start:] == tokenizer.eos_token_id, axis=1)
            ids[:, start + 1 :][ended[:, :-1] > 0] = pad_id
        hypotheses = decode_targets(tokenizer, predicted)
        references = decode_targets(tokenizer, labels)
        whole = sources is not None and len(sources) == len(predicted)
        by_group = groups is not None and len(groups.names) == len(predicted)
        texts = Texts(hypotheses, [references], sources if whole else None)
        scores, _ = scorer.score(texts, groups if by_group else None)
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
    hypotheses = decode_targets(tokenizer, predicted.predictions)
    sources = list(pairs["source"])
    references = list(pairs["target"])
    values, details = Scorer.of(**options).score(Texts(hypotheses, [references], sources), groups)
    names = list(dict.fromkeys(groups.names)) if groups else []
    of_groups = {f"{key}_{name}" for key in values for name in names}
    of_all = {key: value for key, value in values.items() if key not in of_groups}
    report(f"{split}: {_shown(of_all, details)}", flush=True)
    for name in names:
        of_group = {key: values[f"{key}_{name}"] for key in of_all if f"{key}_{name}" in values}
        report(f"  {name}: {_shown(of_group, {})}", flush=True)
    # the trainer's scores have the groups of another split
    computed = tuple(f"{split}_{name}" for name in values)
    others = {
        name: value
        for name, value in predicted.metrics.items()
        if name.startswith(f"{split}_") and not name.startswith(computed)
    }
    scores = {f"{split}_{name}": value for name, value in (details | values).items()}
    return {
        **others,
        **scores,
        f"{split}_seconds": seconds,
        f"{split}_examples": example_translations(sources, references, hypotheses),
    }


def _shown(scores: Mapping[str, float], details: Mapping[str, Detail]) -> str:
    """Scores in one line, such as `BLEU 34.10 (BLEU|…), chrF 60.20`."""
    texts = []
    for name, score in scores.items():
        signature = details.get(f"{name}_signature") if name == "bleu" else None
        texts.append(f"{title_of(name)} {score:.2f}" + (f" ({signature})" if signature else ""))
    return ", ".join(texts)
