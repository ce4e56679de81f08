"""Validation pairs drawn from the training data, and the overlap of evaluation data with it.

`text_keys` says which texts count as the same.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
from datasets import Dataset

from ..data.text_keys import TextKey, text_key
from ..utils.errors import UserError

_ROWS_READ = 1000


def _keys(pairs: Dataset, column: str, key: TextKey) -> np.ndarray:
    batches = pairs.select_columns([column]).iter(_ROWS_READ)
    return np.fromiter(
        (key(text) for batch in batches for text in batch[column]), np.int64, len(pairs)
    )


def hold_out(
    pairs: Dataset,
    count: int,
    seed: int,
    distilled: np.ndarray,
    bidirectional: bool = False,
    task: str = "language",
) -> tuple[np.ndarray, np.ndarray]:
    """Draw validation pairs by distinct source, and leave out of training every pair that would give them away.

    These are all pairs with a held-out source, in a distilled input also those with a held-out target (of a
    back-translation), and for training in both directions all pairs with a held-out sentence on either side. Pairs
    of the N that are `distilled` (N,) are not drawn, and at most a tenth of the sources is. `task` decides which texts
    are the same. Return the row numbers of the training pairs and of the validation pairs.
    """
    sources, targets = (_keys(pairs, column, text_key(task)) for column in ("source", "target"))
    rows = np.flatnonzero(~distilled)
    first = np.sort(rows[np.unique(sources[rows], return_index=True)[1]])
    count = min(count, len(first) // 10)
    if count == 0:
        raise UserError(
            f"held_out_pairs: {len(first)} distinct sources that no model translated are too few; give validation data"
        )
    drawn = np.sort(np.random.default_rng(seed).choice(first, count, replace=False))
    known = np.isin(sources, sources[drawn]) | (distilled & np.isin(targets, targets[drawn]))
    if bidirectional:
        sentences = np.concatenate([sources[drawn], targets[drawn]])
        known |= np.isin(sources, sentences) | np.isin(targets, sentences)
    kept = np.flatnonzero(~known)
    if not len(kept):
        raise UserError(
            "held_out_pairs: every pair shares a side with the validation pairs; give validation data"
        )
    return kept, drawn


def overlap_warnings(
    train: Dataset, splits: Mapping[str, Dataset], task: str = "language"
) -> Iterator[str]:
    """Return a line for each evaluation split with pairs whose source is trained on."""
    key = text_key(task)
    keys = {split: _keys(pairs, "source", key).tolist() for split, pairs in splits.items()}
    known = set(chain.from_iterable(keys.values()))
    batches = train.select_columns(["source"]).iter(_ROWS_READ)
    trained = known.intersection(key(text) for batch in batches for text in batch["source"])
    for split, of_split in keys.items():
        if count := sum(map(trained.__contains__, of_split)):
            yield (
                f"warning: {count:,} of {len(of_split):,} {split} pairs have a source that is trained on, so that "
                "their scores are too high"
            )
