"""Rows of encoded pairs that are changed again in every epoch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 1000

#: Changes a row of `encode_pairs` for an epoch. It depends on nothing else, so that the rows are the same in every
#: process and after resuming.
Change: TypeAlias = Callable[[dict[str, Any], int], dict[str, Any]]


def redrawn(encoded: Any, change: Change) -> Any:
    """Apply `change` to the rows of a table or a stream, after the changes that it already has."""
    if isinstance(encoded, RedrawnDataset | RedrawnStream):
        return type(encoded)(encoded.encoded, *encoded.changes, change)
    return (RedrawnStream if isinstance(encoded, IterableDataset) else RedrawnDataset)(encoded, change)


class _Redrawn:
    def __init__(self, encoded: Any, *changes: Change):
        self.encoded, self.changes = encoded, changes
        # In shared memory, so that running worker processes see the epoch too.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def grows(self) -> bool:
        """Whether a change can make a pair several times as long."""
        return any(getattr(change, "grows", False) for change in self.changes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the changes are drawn for, and of a stream's shuffling."""
        self.epoch.fill_(epoch)
        if isinstance(self.encoded, IterableDataset):
            self.encoded.set_epoch(epoch)

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        for change in self.changes:
            row = change(row, int(self.epoch))
        return row


class RedrawnDataset(_Redrawn, torch.utils.data.Dataset):
    """Rows of a dataset. `encoded` are the rows without changes."""

    def __len__(self) -> int:
        return len(self.encoded)

    def select(self, rows: Sequence[int] | np.ndarray) -> "RedrawnDataset":
        """These rows, with the same changes."""
        return RedrawnDataset(self.encoded.select(rows), *self.changes)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self.change(row) for row in self.encoded.__getitems__(rows)]


class RedrawnStream(_Redrawn, torch.utils.data.IterableDataset):
    """Rows of a stream."""

    def state_dict(self) -> dict[str, Any]:
        return self.encoded.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.encoded.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.change, self.encoded)


def split_special_tokens(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Split ids into special tokens and tags at the start, text, and such tokens at the end."""
    special = set(tokenizer.added_tokens_decoder)
    start = next((index for index, each in enumerate(ids) if each not in special), 0)
    end = len(ids) - next((index for index, each in enumerate(reversed(ids)) if each not in special), 0)
    return ids[:start], ids[start:end], ids[end:]
