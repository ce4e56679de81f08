"""Rows of encoded pairs that are changed again in every epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..text.source_text import source_text
from ..text.token_kinds import has_closed_vocabulary
from ..utils.errors import UserError
from .batching import Example

_CHECKED_ROWS = 1000
_DIFFERENT = 0.01  # of the rows may encode differently after decoding
_IDS = ("input_ids", "labels")

#: Changes a row of `encode_pairs` for an epoch. It depends on nothing else, so that the rows are the same in every
#: process and after resuming.
Change: TypeAlias = Callable[[Example, int], Example]


class RedrawnDataset(torch.utils.data.Dataset):
    """Rows of a dataset that change in each epoch. `encoded` are the rows without changes."""

    def __init__(self, encoded: Dataset, *changes: Change):
        self.encoded = encoded
        self.changes = changes
        # In shared memory, so that running worker processes see the epoch too.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def grows(self) -> bool:
        """Return whether a change can make a pair several times as long."""
        return any(getattr(change, "grows", False) for change in self.changes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the changes are drawn for."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.encoded)

    def select(self, rows: Sequence[int] | np.ndarray) -> "RedrawnDataset":
        """These rows, with the same changes."""
        return RedrawnDataset(self.encoded.select(rows), *self.changes)

    def __getitem__(self, row: int) -> Example:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[Example]:
        return list(map(self._changed, self.encoded.__getitems__(rows)))

    def _changed(self, row: Example) -> Example:
        for change in self.changes:
            row = change(row, int(self.epoch))
        return row


def split_special_tokens(
    ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int], list[int]]:
    """Split ids into special tokens and tags at the start, text, and such tokens at the end."""
    special = set(tokenizer.added_tokens_decoder)
    text = [place for place, each in enumerate(ids) if each not in special]
    if not text:
        return [], ids, []
    start = text[0]
    end = text[-1] + 1
    return ids[:start], ids[start:end], ids[end:]


def unchanged_rows(encoded: Dataset | RedrawnDataset) -> Dataset:
    """The rows of `encode_pairs`, without changes."""
    return encoded.encoded if isinstance(encoded, RedrawnDataset) else encoded


@dataclass
class TextChange:
    """A change of the text of pairs: their ids are decoded, and the changed text is encoded.

    The random numbers depend only on `name`, `seed`, the epoch and the pair's `line`.
    """

    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  #: of source and target
    limits: tuple[int | None, int | None]  #: tokens of source and target
    seed: int

    name = ""  #: the argument that asks for the change
    grows = True

    def new_texts(self, pair: Example, draw: Random) -> Sequence[str] | None:
        """Return another source and target for a pair, or None if it stays as it is."""
        raise NotImplementedError

    def __call__(self, pair: Example, epoch: int) -> Example:
        draw = Random(f"{self.name} {self.seed} {epoch} {pair['line']}")
        texts = self.new_texts(pair, draw)
        return pair if texts is None else self._encoded(pair, texts)

    def applied(self, encoded: Dataset | RedrawnDataset) -> RedrawnDataset:
        """Apply the change to rows, after the changes that they already have."""
        changes = encoded.changes if isinstance(encoded, RedrawnDataset) else ()
        return RedrawnDataset(unchanged_rows(encoded), *changes, self)

    def texts(self, pair: Example) -> tuple[str, str]:
        """The source and the target of a pair."""
        source = self._text(pair, 0)
        target = self._text(pair, 1)
        return source, target

    def _text(self, pair: Example, side: int) -> str:
        tokenizer = self.tokenizers[side]
        _, ids, _ = split_special_tokens(pair[_IDS[side]], tokenizer)
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _encoded(self, pair: Example, texts: Sequence[str]) -> Example:
        """The pair with other texts, or as it is if they are too long or have symbols that a tokenizer lacks."""
        ids = [self._ids(pair, side, text) for side, text in enumerate(texts)]
        for own, limit, tokenizer in zip(ids, self.limits, self.tokenizers, strict=True):
            if limit and len(own) > limit:
                return pair
            if has_closed_vocabulary(tokenizer) and tokenizer.unk_token_id in own:
                return pair
        return {**pair, "input_ids": ids[0], "labels": ids[1]}

    def _ids(self, pair: Example, side: int, text: str) -> list[int]:
        """The ids of a text, between the special tokens of the pair's."""
        tokenizer = self.tokenizers[side]
        start, _, end = split_special_tokens(pair[_IDS[side]], tokenizer)
        texts = {"text_target": text} if side else {"text": source_text(text, tokenizer)}
        ids = tokenizer(**texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [*start, *ids, *end]

    def restored_rows(self, encoded: Dataset | RedrawnDataset) -> list[Example]:
        """Return the first 1,000 rows. Refuse tokenizers that do not restore their text."""
        table = unchanged_rows(encoded)
        count = min(_CHECKED_ROWS, len(table))
        rows = table.with_format(None).take(count).to_list()
        for side, name in enumerate(_IDS):
            different = sum(
                self._ids(row, side, self._text(row, side)) != row[name] for row in rows
            )
            if different > _DIFFERENT * len(rows):
                raise UserError(
                    f"{self.name}: {different} of {len(rows)} {name} decoded and encoded again differ with this "
                    f"{type(self.tokenizers[side]).__name__}: train a tokenizer, or leave {self.name} out"
                )
        return rows
