"""The splits of a run as token ids, within the limits of lengths and positions."""

from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset

from ..corpora.corpus import Corpus
from ..corpora.data_arguments import DataArguments, run_task
from ..corpora.pairs import REPORTED_LINES, PairReport, describe_dropped
from ..text.language_tokens import Direction
from ..text.perturbations import parse_augment
from ..utils.errors import UserError
from ..utils.user_code import import_function
from .augmentation import with_augmentation
from .corpus_tokenizers import Tokenizers
from .encoding import EncodingReport, encode_pairs
from .rewriting import with_rewriting


def encode_corpus(
    corpus: Corpus,
    tokenizers: Tokenizers,
    data_args: DataArguments,
    say: Callable[[str], None] = print,
    shard: tuple[int, int] | None = None,
) -> tuple[dict[str, Dataset], dict[str, EncodingReport]]:
    """Tokenize all splits. Training pairs over the length limits are dropped and counted, evaluation pairs kept.

    `say` gets a line about pairs that are too long, about unknown symbols, and about the progress.
    A `shard` of `encode_blocks` has a part of the training pairs, and nothing else.
    """
    encoded: dict[str, Dataset] = {}
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
            workers=data_args.workers,
            say=say,
            shard=shard if training else None,
        )
        if report.too_long:
            say(f"{split}: {report.summary()}")
        if not training:
            data = _leave_out_long(corpus, split, data, data_args.max_eval_length, say)
        if report.unknown:
            say(f"{split}: {report.describe_unknown()}")
        encoded[split], reports[split] = data, report
    return encoded, reports


def changed_in_each_epoch(
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
    languages: list[Direction] = [(data_args.source_lang, data_args.target_lang)]
    if corpus.directions:
        languages = list(corpus.directions["train"])
    augment = parse_augment(data_args.augment)
    return with_augmentation(
        data, *tokenizers, augment=augment, seed=seed, limits=limits, languages=languages
    )


def _leave_out_long(
    corpus: Corpus, split: str, encoded: Dataset, limit: int | None, say: Callable[[str], None]
) -> Dataset:
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
    say(f"{split}: left out {len(lines):,} of {len(encoded):,} pairs: {left_out}")
    report = corpus.reports.get(split)
    if isinstance(report, PairReport):  # for the model card
        report.kept -= len(lines)
        report.dropped[reason], report.first_lines[reason] = len(lines), lines[:REPORTED_LINES]
    corpus.select(split, corpus.pairs[split], short)
    return encoded.select(short)
