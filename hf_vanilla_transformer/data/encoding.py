"""Sentence pairs as ids, with the length of each pair beside it, and BPE-dropout for training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .bpe_dropout import BpeDropout, seeded_random
from .corpora import describe_dropped

_LINES_TOLD = 5
_ROWS_COMPARED = 1000
_COLUMNS = ["input_ids", "labels", "length", "line"]


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

    def count(self, lines: Any, too_long: np.ndarray) -> None:
        """Count pairs: their line numbers, and which of them are over a limit, each (number of pairs,)."""
        over = np.asarray(lines)[too_long]
        self.seen += len(too_long)
        self.too_long += len(over)
        self.first_lines += over[: _LINES_TOLD - len(self.first_lines)].tolist()

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
        Columns `input_ids`, `labels`, `length` (tokens of the longer side) and `line`, from the cache of `datasets`
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
    return encoded.select_columns(_COLUMNS), report


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
        return {name: [encoded[name][i] for i in keep] for name in _COLUMNS}

    return pairs.map(read, batched=True, with_indices=True, remove_columns=pairs.column_names)


def with_bpe_dropout(
    encoded: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    dropout: float = 0.1,
    seed: int = 0,
) -> Any:
    """Segment the text anew in each epoch (BPE-dropout, Provilkov et al. 2020, arXiv 1910.13267).

    The text is what the ids decode to. How a pair is segmented depends on nothing but `seed`, the epoch
    (`set_epoch`, which `VanillaTransformerTrainer` calls) and the pair's `line`: not on the process or worker that
    reads it, nor on what was read before. `length` stays the length without dropout, with which batches are made;
    what comes out is longer (1.29 times at 0.1 and 1.97 times at 0.3 on Multi30k with 10,000 tokens; the dropout of
    `tokenizers`, which tries left-out merges again, gives 1.16 and 1.67 times).

    Args:
        encoded: from `encode_pairs`.
        tokenizer, target_tokenizer: the ones that encoded it.
        dropout: probability of leaving out a merge; 0.1 in the paper. 0 gives `encoded` back.
        seed: of the random numbers.

    Returns:
        The same rows, freshly segmented in each epoch: a `torch` data set with `encoded` as an attribute, or an
        iterable one where that is a stream. For training only.

    Raises:
        UserError: `dropout` is not in [0, 1), a tokenizer is no BPE, or its ids do not decode to the text.
    """
    if not 0 <= dropout < 1:
        raise UserError(f"bpe_dropout is {dropout}; it must be at least 0 and below 1")
    if dropout == 0:
        return encoded
    segment = _Segment(tokenizer, target_tokenizer or tokenizer, dropout, seed)
    if isinstance(encoded, IterableDataset):
        return FreshStream(encoded, segment)
    segment.require_round_trip(encoded.with_format(None)[:_ROWS_COMPARED])
    return FreshPairs(encoded, segment)


class FreshPairs(torch.utils.data.Dataset):
    """Rows of a data set, segmented anew in each epoch; see `with_bpe_dropout`."""

    def __init__(self, encoded: Dataset, segment: "_Segment"):
        self.encoded, self.segment = encoded, segment

    def set_epoch(self, epoch: int) -> None:
        """Choose the segmentation; worker processes that already run hear of it, too."""
        self.segment.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self.segment(row) for row in self.encoded.__getitems__(rows)]


class FreshStream(torch.utils.data.IterableDataset):
    """Rows of a stream, segmented anew in each epoch; see `with_bpe_dropout`."""

    def __init__(self, stream: IterableDataset, segment: "_Segment"):
        self.stream, self.segment = stream, segment

    def set_epoch(self, epoch: int) -> None:
        """Choose the segmentation, and the order if the stream shuffles."""
        self.segment.epoch.fill_(epoch)
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there when it is read next."""
        self.stream.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.segment, self.stream)


class _Segment:
    """Takes the ids of a pair back to text and segments that again, with some merges left out."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        dropout: float,
        seed: int,
    ) -> None:
        self.sides = {"input_ids": tokenizer, "labels": target_tokenizer}
        self.dropout, self.seed = dropout, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        try:
            self.encoders = {side: BpeDropout(each) for side, each in self.sides.items()}
        except ValueError as error:
            raise UserError(f"BPE-dropout needs a byte-pair encoding; the tokenizer has {error}") from None

    def __call__(self, pair: dict[str, Any]) -> dict[str, Any]:
        draw = seeded_random(self.seed, int(self.epoch), pair["line"])
        return {**pair, **{side: self.fresh(side, pair[side], self.dropout, draw) for side in self.sides}}

    def fresh(self, side: str, ids: list[int], dropout: float, draw: Any = None) -> list[int]:
        """The ids of one side, segmented again between the special tokens at its ends."""
        tokenizer = self.sides[side]
        special = set(tokenizer.all_special_ids)
        start = next((place for place, each in enumerate(ids) if each not in special), 0)
        end = len(ids) - next((place for place, each in enumerate(reversed(ids)) if each not in special), 0)
        text = tokenizer.decode(ids[start:end])
        return [*ids[:start], *self.encoders[side](text, dropout, draw), *ids[end:]]

    def require_round_trip(self, head: dict[str, list[list[int]]]) -> None:
        """A foreign tokenizer may not give its text back (unknown words, cleaned spaces), or segment in ways that
        `BpeDropout` does not know: look before training."""
        for side, tokenizer in self.sides.items():
            if any(self.fresh(side, ids, 0.0) != ids for ids in head[side]):
                raise UserError(
                    f"BPE-dropout is not possible with this {type(tokenizer).__name__}: {side} decoded and encoded "
                    "again differ; train one with scripts/train_tokenizer.py or set bpe_dropout to 0"
                )
