"""Augmentation by equivalent spellings: a function of the user rewrites training pairs, again in every epoch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError
from ..utils.untrusted import one_line
from .batching import Example
from .redrawing import RedrawnDataset, TextChange

#: A function from source, target and random numbers to a source and a target of the same meaning.
Rewrite: TypeAlias = Callable[[str, str, Random], tuple[str, str]]

_FAILED = 0.5  # of the checked pairs may fail
_LOGGER = logging.getLogger(__name__)


def with_rewriting(
    encoded: Dataset | RedrawnDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    rewrite: Rewrite,
    seed: int = 0,
    limits: tuple[int | None, int | None] = (None, None),
) -> RedrawnDataset:
    """Rewrite every training pair, anew in every epoch.

    The random numbers depend only on `seed`, the epoch and the pair's `line`. A pair stays as it is if `rewrite`
    raises an exception, or returns text that is longer than the limits or has symbols that a tokenizer lacks.

    Args:
        encoded: from `encode_pairs`.
        tokenizer, target_tokenizer: the tokenizers that encoded it.
        rewrite: called with source, target and a `random.Random`. It returns both, such as another order of the atoms
            of a molecule, and may change one side or both together.
        seed: of the random numbers.
        limits: tokens of source and target.

    Returns:
        The rows as `with_augmentation` returns them.

    Raises:
        UserError: `rewrite` fails for more than half of the first 1,000 pairs, or does not return two texts, or the
            ids of the tokenizers do not decode to the text.
    """
    change = _Rewriting(
        tokenizers=(tokenizer, target_tokenizer or tokenizer),
        limits=limits,
        seed=seed,
        rewrite=rewrite,
    )
    change.require_results(change.restored_rows(encoded))
    return change.applied(encoded)


@dataclass
class _Rewriting(TextChange):
    rewrite: Rewrite

    name = "rewrite"

    def new_texts(self, pair: Example, draw: Random) -> Sequence[str]:
        source, target = self.rewrite(*self.texts(pair), draw)
        for text in (source, target):
            if not isinstance(text, str) or not text:
                raise TypeError(f"returned {text!r}, not a text")
        return source, target

    def __call__(self, pair: Example, epoch: int) -> Example:
        try:
            return super().__call__(pair, epoch)
        except Exception as error:  # the code of the user
            _LOGGER.debug("rewrite: line %s stays as it is: %s", pair["line"], one_line(error))
            return pair

    def require_results(self, rows: list[Example]) -> None:
        """Log the number of pairs that stay as they are. Refuse a function that fails for most of them."""
        failed = 0
        first: tuple[int, str] | None = None
        same = 0
        for row in rows:
            try:
                same += super().__call__(row, 0) is row
            except Exception as error:  # the code of the user
                failed += 1
                first = first or (row["line"], f"{type(error).__name__}: {one_line(error)}")
        if first is None and not same:
            return
        reason = f"; line {first[0]}: {first[1]}" if first else ""
        counts = f"{failed} of the first {len(rows)} pairs cannot be rewritten{reason}"
        if failed > _FAILED * len(rows):
            raise UserError(f"rewrite: {counts}")
        _LOGGER.warning(
            "rewrite: %s; %d become too long or have unknown symbols; they stay as they are",
            counts,
            same,
        )
