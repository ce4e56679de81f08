"""BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267) whose random numbers belong to the sentence.

`tokenizers` has it too, but draws from a generator that no seed reaches.
"""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase


class BpeDropout:
    """Segments text with a tokenizer's own merges, leaving out some.

    Args:
        tokenizer: a byte-pair encoding; left as it is. Its normalizer and pre-tokenizer make the words.

    Raises:
        ValueError: it has no merges.
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
        """The ids of a text, without special tokens.

        Args:
            text: a sentence.
            dropout: the probability of leaving out a merge: 0 gives the tokenizer's segmentation, 1 single characters.
            draw: gives a random number in [0, 1) at each call.
        """
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words: Iterable[tuple[str, Any]] = [(text, None)]
        if backend.pre_tokenizer is not None:
            words = backend.pre_tokenizer.pre_tokenize_str(text)
        pieces = (piece for word, _ in words for piece in self.segment(word, dropout, draw))
        ids = (self.vocabulary.get(piece, self.unknown) for piece in pieces)
        return [each for each in ids if each is not None]

    def segment(self, word: str, dropout: float, draw: Callable[[], float]) -> list[str]:
        """Algorithm 1 of the paper: at every step each possible merge is left out with some probability, and the best
        of the others is done; where all are left out, the word stays as it is."""
        pieces = list(word)
        ranks = [self.rank.get(pair) for pair in zip(pieces, pieces[1:], strict=False)]
        while True:
            best, place = None, -1
            for here, rank in enumerate(ranks):
                if rank is None or (best is not None and rank >= best and dropout == 0):
                    continue
                if dropout and draw() < dropout:
                    continue
                if best is None or rank < best:
                    best, place = rank, here
            if best is None:
                return pieces
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
            del ranks[place]
            for here in (place - 1, place):
                if 0 <= here < len(ranks):
                    ranks[here] = self.rank.get((pieces[here], pieces[here + 1]))


def dice(*numbers: int) -> Callable[[], float]:
    """A source of random numbers that depends on nothing but `numbers` (a seed, an epoch, a line …)."""
    return random.Random(" ".join(map(str, numbers))).random
