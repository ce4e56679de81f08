"""Sentence pairs as ids, with the length of each pair beside it, and BPE-dropout for training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .corpora import describe_dropped
from .tokenizer_training import copy_with_bpe_dropout

_LINES_TOLD = 5
_ROWS_COMPARED = 1000


@dataclass
class EncodingReport:
    """What the limits of length did.

    Attributes:
        seen, too_long: numbers of pairs; the too long ones are dropped for training and kept for evaluation.
        dropped: whether they were dropped.
        first_lines: the first few line (or row) numbers of the too long ones, from 1.

    Of a streamed data set it tells what has been read so far, in the process that read it.
    """

    dropped: bool
    seen: int = 0
    too_long: int = 0
    first_lines: list[int] = field(default_factory=list)

    def count(self, lines: Iterable[int], too_long: Iterable[bool]) -> None:
        """Count a batch of pairs: their line numbers, and which of them are over a limit."""
        rows = list(zip(lines, too_long, strict=True))
        self.seen += len(rows)
        over = [int(line) for line, long in rows if long]
        self.too_long += len(over)
        self.first_lines += over[: _LINES_TOLD - len(self.first_lines)]

    def summary(self) -> str:
        """Say it in one line: `encoded 998 of 1,000 pairs; dropped 2: too long (lines 7, 31)`."""
        kept = self.seen - self.too_long if self.dropped else self.seen
        text = f"encoded {kept:,} of {self.seen:,} pairs"
        if not self.too_long:
            return text
        said = describe_dropped("too long", self.too_long, self.first_lines)
        return f"{text}; {'dropped' if self.dropped else 'kept all the same'} {self.too_long:,}: {said}"


def encode_pairs(
    pairs: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    drop_too_long: bool,
) -> tuple[Dataset | IterableDataset, EncodingReport]:
    """Turn sentence pairs into ids. Nothing is ever cut: a sentence is whole or left out.

    Args:
        pairs: columns `source` and `target`, and `line` if the report is to give the input's own numbers.
        tokenizer: of the source.
        target_tokenizer: of the target; None for a joint vocabulary.
        max_source_length, max_target_length: limits in tokens, `</s>` included; None for no limit.
        drop_too_long: leave out pairs over a limit (training). An evaluation keeps all pairs, else its score
            would be of another test set.

    Returns:
        Columns `input_ids`, `labels` and `length` (tokens of the longer side), from the cache of `datasets`
        where it knows them; and the report.

    Raises:
        UserError: every pair is too long.
    """
    encode = _Encode(tokenizer, target_tokenizer or tokenizer)
    report = EncodingReport(dropped=drop_too_long)

    def over(source_lengths: Any, labels_lengths: Any) -> np.ndarray:
        long = np.asarray(source_lengths) > (max_source_length or np.inf)
        return long | (np.asarray(labels_lengths) > (max_target_length or np.inf))

    if isinstance(pairs, IterableDataset):
        return _encode_stream(pairs, encode, over, report), report
    encoded = pairs.map(encode, batched=True, with_indices=True, remove_columns=pairs.column_names, desc="Encoding")
    lengths = encoded.select_columns(["source_length", "target_length", "line"]).with_format("numpy")[:]
    too_long = over(lengths["source_length"], lengths["target_length"])
    report.count(lengths["line"], too_long)
    if drop_too_long and too_long.any():
        if too_long.all():
            raise UserError(f"every pair is longer than the limits: {report.summary()}")
        encoded = encoded.select(np.flatnonzero(~too_long))
    return encoded.select_columns(["input_ids", "labels", "length"]), report


class _Encode:
    """Encodes a batch of pairs; a class, and not a closure, so that `datasets` hashes no more than it needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        ids = _ids(self.tokenizer, batch["source"])
        labels = _ids(self.target_tokenizer, batch["target"], target=True)
        return {
            "input_ids": ids,
            "labels": labels,
            "length": [max(len(a), len(b)) for a, b in zip(ids, labels, strict=True)],
            "source_length": [len(row) for row in ids],
            "target_length": [len(row) for row in labels],
            "line": batch.get("line") or [index + 1 for index in indices],
        }


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], target: bool = False) -> list[list[int]]:
    # `text_target` lets Marian's and other tokenizers with two languages switch to the second
    texts_by_side = {"text_target": texts} if target else {"text": texts}
    # `verbose`: no warning about the model's maximal length, the limits above are the caller's
    return tokenizer(**texts_by_side, return_attention_mask=False, verbose=False)["input_ids"]


def _encode_stream(
    pairs: IterableDataset, encode: _Encode, over: Callable[[Any, Any], np.ndarray], report: EncodingReport
) -> IterableDataset:
    def read(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        if indices[0] == 0:  # read again from the start
            report.seen, report.too_long, report.first_lines = 0, 0, []
        encoded = encode(batch, indices)
        too_long = over(encoded["source_length"], encoded["target_length"])
        report.count(encoded["line"], too_long)
        keep = np.flatnonzero(~too_long) if report.dropped else range(len(too_long))
        return {name: [encoded[name][i] for i in keep] for name in ("input_ids", "labels", "length")}

    return pairs.map(read, batched=True, with_indices=True, remove_columns=pairs.column_names)


def with_bpe_dropout(
    encoded: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    dropout: float = 0.1,
) -> Dataset | IterableDataset:
    """Segment the text anew at each access (BPE-dropout, Provilkov et al. 2020, arXiv 1910.13267).

    The text is what the ids decode to, so only `input_ids` and `labels` are needed: the `Trainer` may remove
    the other columns. `length` stays the length without dropout, with which batches are made; what comes
    out is longer (1.14 times at 0.1 and 1.6 times at 0.3 on Multi30k with 10,000 tokens). To read `length`
    alone, read it from the data set that went in: here each access segments the row as well.

    The random numbers are drawn inside `tokenizers`, which takes no seed: two runs with the same seed see
    different segmentations. With worker processes set TOKENIZERS_PARALLELISM=false, or `tokenizers` warns that
    it was forked.

    Args:
        encoded: from `encode_pairs`.
        tokenizer, target_tokenizer: the ones that encoded it; they stay without dropout.
        dropout: probability of leaving out a merge; 0.1 in the paper. 0 gives `encoded` back.

    Returns:
        The same rows, freshly segmented each time. For training only.

    Raises:
        UserError: `dropout` is not in [0, 1), a tokenizer is no BPE, or its ids do not decode to the text.
    """
    if dropout == 0:
        return encoded
    sides = {"input_ids": tokenizer, "labels": target_tokenizer or tokenizer}
    if isinstance(encoded, Dataset):
        _require_round_trip(encoded, sides)
    segment = _Segment({side: copy_with_bpe_dropout(each, dropout) for side, each in sides.items()})
    if isinstance(encoded, IterableDataset):
        return encoded.map(segment, batched=True, batch_size=100)
    return encoded.with_transform(segment)


class _Segment:
    """Takes a batch of ids back to text and encodes it again, with tokenizers that drop merges."""

    def __init__(self, sides: dict[str, PreTrainedTokenizerBase]) -> None:
        self.sides = sides

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        fresh = dict(batch)
        for side in self.sides.keys() & batch.keys():
            fresh[side] = _segment(self.sides[side], batch[side], target=side == "labels")
        return fresh


def _segment(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], target: bool) -> list[list[int]]:
    return _ids(tokenizer, tokenizer.batch_decode(rows, skip_special_tokens=True), target)


def _require_round_trip(encoded: Dataset, sides: dict[str, PreTrainedTokenizerBase]) -> None:
    """A foreign tokenizer may not give its text back (unknown words, cleaned spaces): look before training."""
    head = encoded.with_format(None)[:_ROWS_COMPARED]
    for side, tokenizer in sides.items():
        if _segment(copy_with_bpe_dropout(tokenizer, None), head[side], target=side == "labels") != head[side]:
            raise UserError(
                f"BPE-dropout is not possible with this {type(tokenizer).__name__}: {side} decoded and encoded "
                "again differ; train one with scripts/train_tokenizer.py or set bpe_dropout to 0"
            )
