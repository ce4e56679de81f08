"""Sentence pairs as token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..corpora.columns import SIDES
from ..corpora.mixtures import PART
from ..corpora.pairs import REPORTED_LINES, describe_dropped
from ..text.cells import text_of
from ..text.language_tokens import Direction, encode_targets, language_tokens
from ..text.source_text import source_text
from ..text.token_kinds import has_closed_vocabulary, unknown_symbols
from ..text.tokenizer_files import recognising_added_tokens
from ..text.word_encoding import WordEncoder, encodes_by_words
from ..utils.dataset_cache import number_columns, selected
from ..utils.errors import UserError
from .encoded_blocks import encode_blocks

_COLUMNS = ["input_ids", "labels", "length", "line"]
_FACTS = ["source_length", "target_length", "line", "unknown"]
_TYPES = {
    "input_ids": pa.list_(pa.int32()),
    "labels": pa.list_(pa.int32()),
    "length": pa.int32(),
    "line": pa.int64(),
    "source_length": pa.int32(),
    "target_length": pa.int32(),
    "unknown": pa.bool_(),
}


@dataclass
class EncodingReport:
    """Counts of the pairs that exceed a length limit."""

    dropped: bool  #: whether pairs over a limit were dropped (training) or kept (evaluation)
    seen: int = 0  #: numbers of pairs
    too_long: int = 0
    #: tokens of the longest source that is not dropped
    longest_source: int | None = None
    #: by how many tokens a target that is not dropped is longer than its source, at most
    most_over_source: int | None = None
    #: the same for 99 % of the pairs
    usual_over_source: int | None = None
    #: the first few line (or row) numbers of pairs over a limit, from 1
    first_lines: list[int] = field(default_factory=list)
    unknown: int = 0  #: pairs with symbols that a tokenizer lacks. In training they are an error
    first_unknown: list[int] = field(default_factory=list)  #: their first few line numbers

    def describe_unknown(self) -> str:
        """One line on the pairs with unknown symbols."""
        lines = describe_dropped(
            "symbols that the training text lacks", self.unknown, self.first_unknown
        )
        return f"{self.unknown:,} of {self.seen:,} pairs have {lines}; they are read as <unk>"

    def summary(self) -> str:
        """One line, such as `encoded 998 of 1,000 pairs; dropped 2: too long (lines 7, 31)`."""
        kept = self.seen - self.too_long if self.dropped else self.seen
        text = f"encoded {kept:,} of {self.seen:,} pairs"
        if not self.too_long:
            return text
        lines = describe_dropped("too long", self.too_long, self.first_lines)
        return f"{text}; {'dropped' if self.dropped else 'kept all the same'} {self.too_long:,}: {lines}"


# The empty text has the tokens of every sentence alone. The others show that these are at its end.
_PROBES = ("", "a", "b c", "1 2 3")


def check_end_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer whose `eos_token` does not end every target sentence: a model learns to end with it.

    Args:
        tokenizer: of the target, or of both languages.
        name: the name of the tokenizer, for the message.
    """
    encoded = encode_targets(tokenizer, list(_PROBES), return_attention_mask=False, verbose=False)
    eos = tokenizer.eos_token_id
    # Not at the start alone, as OPT's. Tokens of languages may follow it.
    if eos is None or not all(eos in ids[1:] or ids == [eos] for ids in encoded):
        raise UserError(
            f"tokenizer_name: {name} puts no eos_token at the end of a sentence, so that a model could not end its "
            "translations: let it append its eos_token (tokenizers.processors.TemplateProcessing), or name the token "
            'that it appends (tokenizer.eos_token = "[SEP]"), and save it again'
        )
    if any(ids[0] == eos for ids in encoded if len(ids) > 1):
        raise UserError(
            f"tokenizer_name: {name} starts a sentence with the token that ends it, so that all translations would be "
            "empty: give it a bos_token of its own, and save it again"
        )


def encode_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    drop_too_long: bool,
    directions: Sequence[Direction] = (),
    workers: int = 1,
    say: Callable[[str], None] = print,
    shard: tuple[int, int] | None = None,
) -> tuple[Dataset, EncodingReport]:
    """Tokenize sentence pairs, without truncation.

    Args:
        pairs: columns `source` and `target`, and optionally `line`, the line numbers for the report. The sources have
            the form that the tokenizer names (`text.source_form`), if it names one.
        tokenizer: of the source.
        target_tokenizer: of the target, or None for a joint vocabulary.
        max_source_length, max_target_length: limits in tokens, `</s>` included, or None for no limit.
        drop_too_long: drop pairs over a limit, and refuse unknown symbols (training). Evaluation keeps all pairs,
            because scores on a subset of the test set are not comparable.
        directions: the direction of each number in the column `part`. The tokenizers have their language tokens.
        workers: processes for a corpus of several blocks. A single one leaves the cores to the tokenizers.
        say: gets lines about the progress.
        shard: as of `encode_blocks`.

    Returns:
        Columns `input_ids`, `labels`, `length` (tokens of the longer side) and `line`, and `part` if the pairs have
        it, cached by `datasets`, and the report.

    Raises:
        UserError: every pair is too long, one has no text, or a training pair has a symbol that its tokenizer lacks.
    """
    source, target = map(recognising_added_tokens, (tokenizer, target_tokenizer or tokenizer))
    encode = _Encode(source, target, directions, refuse_unknown=drop_too_long)
    if "line" not in pairs.column_names:
        pairs = pairs.add_column("line", np.arange(1, len(pairs) + 1))
    parts = {PART: pa.int32()} if PART in pairs.column_names else {}
    encoded = encode_blocks(pairs, encode, pa.schema(_TYPES | parts), workers, say, shard)
    lengths = number_columns(encoded, _FACTS)
    long_source = lengths["source_length"] > (max_source_length or np.inf)
    long_target = lengths["target_length"] > (max_target_length or np.inf)
    too_long = long_source | long_target
    lines = lengths["line"]
    unknown = lengths["unknown"]
    kept = ~too_long if drop_too_long else np.ones_like(too_long)
    source_lengths = lengths["source_length"][kept]
    over_source = lengths["target_length"][kept] - source_lengths
    report = EncodingReport(
        dropped=drop_too_long,
        seen=len(lines),
        too_long=int(too_long.sum()),
        first_lines=lines[too_long][:REPORTED_LINES].tolist(),
        unknown=int(unknown.sum()),
        first_unknown=lines[unknown][:REPORTED_LINES].tolist(),
    )
    if kept.any():
        report.longest_source = int(source_lengths.max())
        report.most_over_source = int(over_source.max())
        report.usual_over_source = int(np.quantile(over_source, 0.99, method="inverted_cdf"))
    if drop_too_long and too_long.any():
        if too_long.all():
            raise UserError(f"every pair is longer than the limits: {report.summary()}")
        encoded = selected(encoded, np.flatnonzero(~too_long))
    return encoded.select_columns([*_COLUMNS, *parts]), report


def _require_text(batch: dict[str, list[Any]]) -> None:
    """Raise a UserError for a pair with a side that is missing or no text."""
    for side in SIDES:
        if {*map(type, batch[side])} <= {str}:
            continue
        for cell, line in zip(batch[side], batch["line"], strict=True):
            if text_of(cell, f"line {line}: the {side}") is None:
                raise UserError(f"line {line}: the {side} has no text: leave the pair out")


@dataclass
class _Encode:
    """Tokenizes a batch of pairs. It is a class, because a closure is not pickled for processes."""

    tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase
    directions: Sequence[Direction]
    refuse_unknown: bool

    def __post_init__(self) -> None:
        self._encoders = {
            side: WordEncoder(tokenizer) if encodes_by_words(tokenizer) else None
            for side, tokenizer in zip(SIDES, (self.tokenizer, self.target_tokenizer), strict=True)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # The words that the encoders remember belong neither to the hash nor to another process.
        return type(self), (
            self.tokenizer,
            self.target_tokenizer,
            self.directions,
            self.refuse_unknown,
        )

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        _require_text(batch)
        sources = [source_text(text, self.tokenizer) for text in batch["source"]]
        ids = self._ids("source", sources)
        labels = self._ids("target", batch["target"])
        source = language_tokens(self.tokenizer)
        target = language_tokens(self.target_tokenizer)
        if self.directions and source and target:
            chosen = [self.directions[part] for part in batch[PART]]
            ids = list(map(source.source, ids, chosen))
            labels = list(map(target.translation, labels, chosen))
        parts = {PART: batch[PART]} if PART in batch else {}
        lines = batch["line"]
        return parts | {
            "unknown": self._unknown(batch, (ids, labels), lines),
            "input_ids": ids,
            "labels": labels,
            "length": [max(len(a), len(b)) for a, b in zip(ids, labels, strict=True)],
            "source_length": [len(row) for row in ids],
            "target_length": [len(row) for row in labels],
            "line": lines,
        }

    def _ids(self, side: str, texts: list[str]) -> list[list[int]]:
        if encoder := self._encoders[side]:
            return encoder(texts)
        # not verbose: `model_max_length` does not apply, the caller sets limits
        options = {"return_attention_mask": False, "verbose": False}
        if side == "source":
            return self.tokenizer(texts, **options)["input_ids"]
        # `text_target` switches Marian's and other bilingual tokenizers to the target language
        return encode_targets(self.target_tokenizer, texts, **options)

    def _unknown(
        self,
        batch: dict[str, list[Any]],
        sides: tuple[list[list[int]], list[list[int]]],
        lines: list[int],
    ) -> list[bool]:
        """Return whether each pair has a symbol that its tokenizer lacks."""
        unknown = [False] * len(lines)
        tokenizers = (self.tokenizer, self.target_tokenizer)
        for name, rows, tokenizer in zip(SIDES, sides, tokenizers, strict=True):
            if not has_closed_vocabulary(tokenizer):
                continue
            for number, row in enumerate(rows):
                if tokenizer.unk_token_id not in row:
                    continue
                if self.refuse_unknown:
                    symbol = unknown_symbols(tokenizer, batch[name][number])[0]
                    raise UserError(
                        f"line {lines[number]}: the {name} has {symbol!r}, which the tokenizer does not know: "
                        "train a tokenizer on this text, or leave the pair out"
                    )
                unknown[number] = True
        return unknown
