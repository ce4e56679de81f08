"""BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267) with random numbers that can be seeded per sentence.

The BPE-dropout of `tokenizers` draws from a generator that cannot be seeded.
"""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase


class BpeDropout:
    """Tokenizes text with a random part of a tokenizer's merges.

    Args:
        tokenizer: a byte-pair encoding, not modified. Its normalizer and pre-tokenizer split text into words.

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
