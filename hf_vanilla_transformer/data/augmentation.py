"""Augmentation of training text with `perturbations`, drawn again in every epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError
from .batching import Row
from .mixtures import PART
from .perturbations import PERTURBATIONS, Languages
from .redrawing import RedrawnDataset, TextChange, unchanged_rows


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
    encoded: Dataset | RedrawnDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    augment: Mapping[str, float],
    seed: int = 0,
    limits: tuple[int | None, int | None] = (None, None),
    languages: Sequence[Languages] = ((None, None),),
) -> RedrawnDataset:
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
        The rows as a `torch` dataset with the attribute `encoded`.

    Raises:
        UserError: tokenizers whose ids do not decode to the text.
    """
    change = _Augment(
        tokenizers=(tokenizer, target_tokenizer or tokenizer),
        limits=limits,
        seed=seed,
        table=unchanged_rows(encoded),
        augment=augment,
        languages=languages,
    )
    change.restored_rows(encoded)
    return change.applied(encoded)


@dataclass
class _Augment(TextChange):
    table: Dataset
    augment: Mapping[str, float]
    languages: Sequence[Languages]

    name = "augment"

    def new_texts(self, pair: Row, draw: Random) -> tuple[str, str] | None:
        shares = [1 - sum(self.augment.values()), *self.augment.values()]
        (name,) = draw.choices([None, *self.augment], shares)
        if name is None:
            return None
        other = self._other(pair, draw) if name == "merge" else ("", "")
        texts = self.texts(pair)
        part = pair.get(PART, 0) if len(self.languages) > 1 else 0
        perturbed = PERTURBATIONS[name](texts, other, draw, self.languages[part])
        return None if perturbed == texts else perturbed

    def _other(self, pair: Row, draw: Random) -> tuple[str, str]:
        """The text of a random pair of the same input or direction."""
        while True:
            other = self.table[draw.randrange(len(self.table))]
            if other.get(PART) == pair.get(PART):
                return self.texts(other)
