"""The splits of a run as token ids, within the limits of lengths and positions."""

from typing import Any

import numpy as np
from datasets import Dataset

from ..data import EncodingReport, PairReport, encode_pairs, with_augmentation
from ..data.augmentation import parse_augment
from ..data.batching import pair_lengths
from ..data.corpora import REPORTED_LINES, describe_dropped
from ..data.perturbations import Languages
from ..data.rewriting import with_rewriting
from ..utils.errors import UserError
from ..utils.user_code import import_function
from .arguments import DataArguments, run_task
from .corpus import Corpus, first_rows
from .corpus_tokenizers import Tokenizers
from .distributed import print_main
from .run_state import Run


def encode_corpus(
    corpus: Corpus, tokenizers: Tokenizers, data_args: DataArguments, seed: int = 0
) -> tuple[dict[str, Any], dict[str, EncodingReport]]:
    """Tokenize all splits. Training pairs over the length limits are dropped and counted, evaluation pairs kept."""
    encoded: dict[str, Any] = {}
    reports = {}
    for split, pairs in corpus.pairs.items():
        training = split == "train"
        data, report = encode_pairs(
            pairs,
            *tokenizers,
            max_source_length=data_args.max_source_length,
            max_target_length=data_args.max_target_length,
            drop_too_long=training,
            directions=corpus.directions.get(split, ()),
        )
        if report.too_long:
            print_main(f"{split}: {report.summary()}")
        if not training:
            data = _leave_out_long(corpus, split, data, data_args.max_eval_length)
        if report.unknown:
            print_main(f"{split}: {report.describe_unknown()}")
        if training:
            data = _changed_in_each_epoch(corpus, data, tokenizers, data_args, seed)
        encoded[split], reports[split] = data, report
    if "validation" in encoded and data_args.max_eval_samples:
        rows = first_rows(encoded["validation"], data_args.max_eval_samples)
        for splits in (encoded, corpus.pairs):
            splits["validation"] = splits["validation"].select(rows)
    return encoded, reports


def _changed_in_each_epoch(
    corpus: Corpus, data: Any, tokenizers: Tokenizers, data_args: DataArguments, seed: int
) -> Any:
    """The training pairs with the changes of `rewrite` and `augment`."""
    limits = data_args.max_source_length, data_args.max_target_length
    if data_args.rewrite:
        rewrite = import_function(data_args.rewrite, "rewrite")
        data = with_rewriting(data, *tokenizers, rewrite=rewrite, seed=seed, limits=limits)
    if not data_args.augment:
        return data
    if run_task(data_args) == "sequence":
        raise UserError(
            f"augment: {' '.join(data_args.augment)}: it perturbs text in a language; rewrite changes other "
            "sequences"
        )
    languages: list[Languages] = [(data_args.source_lang, data_args.target_lang)]
    if corpus.directions:
        languages = list(corpus.directions["train"])
    augment = parse_augment(data_args.augment)
    return with_augmentation(
        data, *tokenizers, augment=augment, seed=seed, limits=limits, languages=languages
    )


def _leave_out_long(corpus: Corpus, split: str, encoded: Dataset, limit: int | None) -> Dataset:
    """Leave out evaluation pairs over a limit, also from the corpus, because its references are scored.

    A single sentence of 8,000 tokens makes its whole batch that long, in memory that training never needs.
    """
    lengths = encoded.with_format("numpy")["length"][:]
    short = np.flatnonzero(lengths <= (limit or np.inf))
    if len(short) == len(encoded):
        return encoded
    lines = [encoded[int(row)]["line"] for row in np.flatnonzero(lengths > limit)]
    reason = f"longer than max_eval_length={limit} tokens"
    left_out = describe_dropped(reason, len(lines), lines[:REPORTED_LINES])
    if not len(short):
        raise UserError(
            f"{split}: all {len(lines):,} pairs are {left_out}; raise it, or split them"
        )
    print_main(f"{split}: left out {len(lines):,} of {len(encoded):,} pairs: {left_out}")
    report = corpus.reports.get(split)
    if isinstance(report, PairReport):  # for the model card
        report.kept -= len(lines)
        report.dropped[reason], report.first_lines[reason] = len(lines), lines[:REPORTED_LINES]
    corpus.select(split, corpus.pairs[split], short)
    return encoded.select(short)


def check_positions(run: Run) -> None:
    """Refuse sentences that learned positions cannot represent. Sinusoids have no end."""
    config = run.model.config
    data_args = run.data_args
    encoded = run.encoded
    limit = config.max_position_embeddings
    if config.position_encoding_type != "learned":
        return
    remedy = f"the learned positions end at max_position_embeddings={limit}"
    for name in ("max_source_length", "max_target_length"):
        value = getattr(data_args, name)
        if value is None or value > limit:
            raise UserError(
                f"{name}: {value}: {remedy}; set it to at most {limit}, or more positions"
            )
    if "validation" in encoded:
        data = encoded["validation"]
        longest = np.maximum(*pair_lengths(data))
        lines = [data[int(row)]["line"] for row in np.flatnonzero(longest > limit)[:5]]
        if lines:
            raise UserError(
                f"validation data: the lines {', '.join(map(str, lines))} have up to {longest.max()} tokens: {remedy}"
            )
