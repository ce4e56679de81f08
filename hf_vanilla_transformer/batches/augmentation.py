"""Augmentation of training text with `perturbations`, drawn again in every epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..corpora.mixtures import PART
from ..text.language_tokens import Direction
from ..text.perturbations import PERTURBATIONS, Context
from .batching import Example
from .redrawing import RedrawnDataset, TextChange, unchanged_rows


def with_augmentation(
    encoded: Dataset | RedrawnDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    augment: Mapping[str, float],
    seed: int = 0,
    limits: tuple[int | None, int | None] = (None, None),
    languages: Sequence[Direction] = ((None, None),),
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
    languages: Sequence[Direction]

    name = "augment"

    def new_texts(self, pair: Example, draw: Random) -> tuple[str, str] | None:
        shares = [1 - sum(self.augment.values()), *self.augment.values()]
        (name,) = draw.choices([None, *self.augment], shares)
        if name is None:
            return None
        other = self._other(pair, draw) if name == "merge" else ("", "")
        texts = self.texts(pair)
        part = pair.get(PART, 0) if len(self.languages) > 1 else 0
        context = Context(texts, other, draw, self.languages[part])
        perturbed = PERTURBATIONS[name](context)
        return None if perturbed == texts else perturbed

    def _other(self, pair: Example, draw: Random) -> tuple[str, str]:
        """The text of a random pair of the same input or direction."""
        while True:
            other = self.table[draw.randrange(len(self.table))]
            if other.get(PART) == pair.get(PART):
                return self.texts(other)
