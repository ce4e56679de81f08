"""Augmentation of training text with `perturbations`, drawn again in every epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError
from .mixtures import PART
from .perturbations import PERTURBATIONS, Languages
from .redrawing import CHECKED_ROWS, TextChange, redrawn


def parse_augment(items: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=PROBABILITY` for names of `PERTURBATIONS`."""
    shares = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            shares[name] = float(text)
        except ValueError:
            raise UserError(
                f"augment: {item}: NAME=PROBABILITY is needed, such as typos=0.03"
            ) from None
        if name not in PERTURBATIONS or not 0 <= shares[name] <= 1:
            raise UserError(
                f"augment: {item}: give a probability to one of {', '.join(PERTURBATIONS)}"
            )
    if sum(shares.values()) > 1:
        raise UserError(
            f"augment: the probabilities add up to {sum(shares.values()):g}: each pair has one at most"
        )
    return shares


def with_augmentation(
    encoded: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    augment: Mapping[str, float],
    seed: int = 0,
    limits: tuple[int | None, int | None] = (None, None),
    languages: Sequence[Languages] = (),
) -> Dataset:
    """Perturb random training pairs, chosen anew in every epoch.

    The choice depends only on `seed`, the epoch (the trainer calls `set_epoch`) and the pair's `line`. `length`
    remains the length without augmentation. The trainer splits token batches that become too long.

    Args:
        encoded: from `encode_pairs`.
        tokenizer, target_tokenizer: the tokenizers that encoded it.
        augment: the probability of each of `PERTURBATIONS`. A pair has one at most.
        seed: of the random numbers.
        limits: tokens of source and target. A pair that would become longer stays as it is.
        languages: codes of source and target, for capitals, of all pairs or of each part.

    Returns:
        The rows as a `torch` dataset with the attribute `encoded`, or as an iterable dataset for a stream.

    Raises:
        UserError: `merge` for a stream, which has no other pairs, or tokenizers whose ids do not decode to the text.
    """
    table = encoded if isinstance(encoded, Dataset) else None
    if table is None and augment.get("merge"):
        raise UserError(
            "augment: merge joins a pair with another, and a stream has none at hand: leave it out"
        )
    change = _Augment(
        (tokenizer, target_tokenizer or tokenizer), limits, table, augment, seed, languages
    )
    if table is not None:
        rows = table.with_format(None).take(min(CHECKED_ROWS, len(table))).to_list()
        change.require_round_trip(rows, "augment")
    return redrawn(encoded, change)


@dataclass
class _Augment(TextChange):
    table: Dataset | None
    augment: Mapping[str, float]
    seed: int
    languages: Sequence[Languages]

    grows = True  # two pairs in one, and capitals in single letters

    def __call__(self, pair: dict[str, Any], epoch: int) -> dict[str, Any]:
        draw = Random(f"augment {self.seed} {epoch} {pair['line']}")
        (name,) = draw.choices(
            [None, *self.augment], [1 - sum(self.augment.values()), *self.augment.values()]
        )
        if name is None:
            return pair
        other = self._other(pair, draw) if name == "merge" else ("", "")
        texts = self.texts(pair)
        perturbed = PERTURBATIONS[name](texts, other, draw, self._languages(pair))
        return pair if perturbed == texts else self.changed(pair, perturbed)

    def _languages(self, pair: dict[str, Any]) -> Languages:
        if not self.languages:
            return None, None
        return self.languages[pair.get(PART, 0) if len(self.languages) > 1 else 0]

    def _other(self, pair: dict[str, object], draw: Random) -> tuple[str, str]:
        """The text of a random pair of the same input or direction."""
        while True:
            other = self.table[draw.randrange(len(self.table))] if self.table else pair
            if other.get(PART) == pair.get(PART):
                return self.texts(other)
