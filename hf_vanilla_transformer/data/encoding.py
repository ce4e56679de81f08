"""Sentence pairs as token ids, with BPE-dropout for training."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .corpora import REPORTED_LINES, describe_dropped
from .source_text import source_text

_CHECKED_ROWS = 1000
_COLUMNS = ["input_ids", "labels", "length", "line"]


@dataclass
class EncodingReport:
    """Counts of the pairs that exceed a length limit. A stream counts the pairs that this process has read."""

    dropped: bool  #: whether pairs over a limit were dropped (training) or kept (evaluation)
    seen: int = 0  #: numbers of pairs
    too_long: int = 0
    longest_source: int | None = None  #: tokens of the longest source that is not dropped. None for a stream
    #: the first few line (or row) numbers of pairs over a limit, from 1
    first_lines: list[int] = field(default_factory=list)

    def count(self, lines: Any, too_long: np.ndarray) -> None:
        """Count pairs, given their line numbers and whether they exceed a limit, each (number of pairs,)."""
        over = np.asarray(lines)[too_long]
        self.seen += len(too_long)
        self.too_long += len(over)
        self.first_lines += over[: REPORTED_LINES - len(self.first_lines)].tolist()

    def summary(self) -> str:
        """One line, such as `encoded 998 of 1,000 pairs; dropped 2: too long (lines 7, 31)`."""
        kept = self.seen - self.too_long if self.dropped else self.seen
        text = f"encoded {kept:,} of {self.seen:,} pairs"
        if not self.too_long:
            return text
        lines = describe_dropped("too long", self.too_long, self.first_lines)
        return f"{text}; {'dropped' if self.dropped else 'kept all the same'} {self.too_long:,}: {lines}"


def encode_pairs(
    pairs: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    drop_too_long: bool,
) -> tuple[Dataset | IterableDataset, EncodingReport]:
    """Tokenize sentence pairs, without truncation.

    Args:
        pairs: columns `source` and `target`, and optionally `line`, the line numbers for the report.
        tokenizer: of the source.
        target_tokenizer: of the target, or None for a joint vocabulary.
        max_source_length, max_target_length: limits in tokens, `</s>` included, or None for no limit.
        drop_too_long: drop pairs over a limit (training). Evaluation keeps all pairs, because scores on a subset of
            the test set are not comparable.

    Returns:
        Columns `input_ids`, `labels`, `length` (tokens of the longer side) and `line`, cached by `datasets`, and the
        report.

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
    kept = lengths["source_length"][~too_long] if drop_too_long else lengths["source_length"]
    report.longest_source = int(kept.max()) if len(kept) else None
    if drop_too_long and too_long.any():
        if too_long.all():
            raise UserError(f"every pair is longer than the limits: {report.summary()}")
        encoded = encoded.select(np.flatnonzero(~too_long))
    return encoded.select_columns(_COLUMNS), report


class _Encode:
    """Tokenizes a batch of pairs. It is a class, because `datasets` would hash everything that a closure captures."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        # not verbose: `model_max_length` does not apply, the caller sets limits
        options = {"return_attention_mask": False, "verbose": False}
        sources = [source_text(text, self.tokenizer) for text in batch["source"]]
        ids = self.tokenizer(sources, **options)["input_ids"]
        # `text_target` switches Marian's and other bilingual tokenizers to the target language
        labels = self.target_tokenizer(text_target=batch["target"], **options)["input_ids"]
        return {
            "input_ids": ids,
            "labels": labels,
            "length": [max(len(a), len(b)) for a, b in zip(ids, labels, strict=True)],
            "source_length": [len(row) for row in ids],
            "target_length": [len(row) for row in labels],
            "line": batch.get("line") or [index + 1 for index in indices],
        }


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
    """Tokenize training text again in every epoch, with BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267).

    The text is decoded from the ids. Its segmentation depends only on `seed`, the epoch (the trainer calls
    `set_epoch`) and the pair's `line`, not on the process or worker, nor on pairs read before. `length` remains the
    length without dropout. The new ids are longer: on Multi30k with 10,000 tokens 1.29 times at 0.1 and 1.97 times at
    0.3. `tokenizers`, whose BPE-dropout retries left-out merges, has 1.16 and 1.67 times.

    Args:
        encoded: from `encode_pairs`.
        tokenizer, target_tokenizer: the tokenizers that encoded it.
        dropout: probability of leaving out a merge, 0.1 in the paper. 0 returns `encoded`.
        seed: of the random numbers.

    Returns:
        The rows as a `torch` dataset with the attribute `encoded`, or as an iterable dataset for a stream.

    Raises:
        UserError: `dropout` is not in [0, 1), a tokenizer is no BPE, or its ids do not decode to the text.
    """
    if not 0 <= dropout < 1:
        raise UserError(f"bpe_dropout is {dropout}; it must be at least 0 and below 1")
    if dropout == 0:
        return encoded
    segment = _Resegment(tokenizer, target_tokenizer or tokenizer, dropout, seed)
    if isinstance(encoded, IterableDataset):
        return BpeDropoutStream(encoded, segment)
    segment.require_round_trip(encoded.with_format(None)[:_CHECKED_ROWS])
    return BpeDropoutDataset(encoded, segment)


class BpeDropoutDataset(torch.utils.data.Dataset):
    """Rows of a dataset, tokenized again in every epoch by `with_bpe_dropout`."""

    def __init__(self, encoded: Dataset, segment: "_Resegment"):
        self.encoded, self.segment = encoded, segment

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the segmentation is drawn for, also in running worker processes (shared memory)."""
        self.segment.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self.segment(row) for row in self.encoded.__getitems__(rows)]


class BpeDropoutStream(torch.utils.data.IterableDataset):
    """Rows of a stream, tokenized again in every epoch by `with_bpe_dropout`."""

    def __init__(self, stream: IterableDataset, segment: "_Resegment"):
        self.stream, self.segment = stream, segment
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the segmentation, and of the stream's shuffling."""
        self.segment.epoch.fill_(epoch)
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.segment, self.stream)


class _Resegment:
    """Decodes the ids of a pair and tokenizes the text again with BPE-dropout."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int
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
        return {**pair, **{side: self.resegment(side, pair[side], self.dropout, draw) for side in self.sides}}

    def resegment(self, side: str, ids: list[int], dropout: float, draw: Any = None) -> list[int]:
        """New ids of one side. Special tokens at its ends are kept."""
        tokenizer = self.sides[side]
        special = set(tokenizer.all_special_ids)
        start = next((index for index, each in enumerate(ids) if each not in special), 0)
        end = len(ids) - next((index for index, each in enumerate(reversed(ids)) if each not in special), 0)
        text = tokenizer.decode(ids[start:end])
        return [*ids[:start], *self.encoders[side](text, dropout, draw), *ids[end:]]

    def require_round_trip(self, head: dict[str, list[list[int]]]) -> None:
        """Refuse tokenizers that do not restore the text, or that `BpeDropout` does not reproduce."""
        for side, tokenizer in self.sides.items():
            if any(self.resegment(side, ids, 0.0) != ids for ids in head[side]):
                raise UserError(
                    f"BPE-dropout is not possible with this {type(tokenizer).__name__}: {side} decoded and encoded "
                    "again differ; train one with `vanilla-transformer tokenizer` or set bpe_dropout to 0"
                )


class BpeDropout:
    """Tokenizes text with a random part of a byte-pair encoding's merges (Provilkov et al. 2020, arXiv 1910.13267).

    The BPE-dropout of `tokenizers` draws from a generator that cannot be seeded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        model = json.loads(self.backend.to_str())["model"] if self.backend is not None else {}
        if model.get("type") != "BPE":
            raise ValueError(f"no byte-pair encoding: {type(tokenizer).__name__}")
        self.vocabulary: dict[str, int] = model["vocab"]
        merges = (tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"])
        self.rank: dict[tuple[str, ...], int] = {pair: rank for rank, pair in enumerate(merges)}
        self.unknown = self.vocabulary.get(model.get("unk_token") or "")

    def __call__(self, text: str, dropout: float, draw: Callable[[], float]) -> list[int]:
        """The token ids of a text, without special tokens.

        `dropout` is the probability of leaving out a merge: 0 gives the tokenizer's segmentation, 1 single characters.
        `draw` returns a random number in [0, 1) per call.
        """
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words: Iterable[tuple[str, Any]] = [(text, None)]
        if backend.pre_tokenizer is not None:
            words = backend.pre_tokenizer.pre_tokenize_str(text)
        tokens = (token for word, _ in words for token in self.segment(word, dropout, draw))
        ids = (self.vocabulary.get(token, self.unknown) for token in tokens)
        return [each for each in ids if each is not None]

    def segment(self, word: str, dropout: float, draw: Callable[[], float]) -> list[str]:
        """Split a word into tokens by Algorithm 1 of the paper.

        Each step leaves out every possible merge with probability `dropout` and applies the best remaining one. If
        none remains, the segmentation is final.
        """
        tokens = list(word)
        ranks = [self.rank.get(pair) for pair in zip(tokens, tokens[1:], strict=False)]
        while True:
            best, position = None, -1
            for index, rank in enumerate(ranks):
                if rank is None or (best is not None and rank >= best and dropout == 0):
                    continue
                if dropout and draw() < dropout:
                    continue
                if best is None or rank < best:
                    best, position = rank, index
            if best is None:
                return tokens
            tokens[position : position + 2] = [tokens[position] + tokens[position + 1]]
            del ranks[position]
            for index in (position - 1, position):
                if 0 <= index < len(ranks):
                    ranks[index] = self.rank.get((tokens[index], tokens[index + 1]))


def seeded_random(*seeds: int) -> Callable[[], float]:
    """A source of random numbers in [0, 1) that depends only on `seeds` (a seed, an epoch, a line number …)."""
    return random.Random(" ".join(map(str, seeds))).random
