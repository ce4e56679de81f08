"""A teacher's distributions of target tokens: in full for one update, or their most probable tokens, kept.

Both have `at`, the distributions t at some positions of a batch, and `rows` of these. Rows have `divergence`,
KL(t ‖ p) = Σ t log t - Σ t z + lse z for the student's logits z (n, V), and `subtract_from`, to subtract weight · t
from a derivative (n, V) in place.

Shapes: B sentences, T target length, n positions in a chunk, D' the teacher's d_model, V target vocabulary, K tokens
kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.batching import pair_lengths
from ...loss_vanilla_transformer import IGNORED

PAIRS_AT_ONCE, POSITIONS_AT_ONCE = 128, 512  # of one call of the teacher, and of one `topk`


# In full


@dataclass
class FullRows:
    """Distributions t (n, V)."""

    t: Tensor

    def divergence(self, z: Tensor, lse: Tensor) -> Tensor:
        return lse.sum() + torch.xlogy(self.t, self.t).sub_(self.t * z).sum()

    def subtract_from(self, derivative: Tensor, weight: float) -> Tensor:
        return derivative.sub_(self.t, alpha=weight)


@dataclass
class FullChunk:
    """For each teacher its logits (n, V)."""

    logits: list[Tensor]

    def rows(self, some: slice) -> FullRows:
        return FullRows(_mean_softmax([each[some] for each in self.logits]))


@dataclass
class FullDistributions:
    """The mean distribution of an ensemble: for each teacher its decoder output (B, T, D') and its output layer."""

    teachers: Sequence[tuple[Tensor, nn.Module]]

    def at(self, positions: Tensor, dtype: torch.dtype) -> FullChunk:
        return FullChunk([_logits(head, states.flatten(0, 1)[positions], dtype) for states, head in self.teachers])


def _logits(head: Any, states: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (n, V) of decoder outputs (n, D')."""
    bias = None if head.bias is None else head.bias.to(dtype)
    return F.linear(states.to(dtype), head.weight.to(dtype), bias)


def _mean_softmax(logits: Sequence[Tensor]) -> Tensor:
    """The mean of the distributions of several logits (n, V), in float32."""
    first, *others = (each.softmax(dim=1, dtype=torch.float32) for each in logits)
    return sum(others, first) / len(logits)


# The most probable tokens, kept


@dataclass
class TopDistributions:
    """Distributions over K tokens, (B T, K) or (n, K) of some positions. All other tokens have the probability 0."""

    tokens: Tensor
    probabilities: Tensor

    def at(self, positions: Tensor, dtype: torch.dtype) -> "TopDistributions":
        return TopDistributions(self.tokens[positions], self.probabilities[positions])

    def rows(self, some: slice) -> "TopDistributions":
        return TopDistributions(self.tokens[some], self.probabilities[some])

    def divergence(self, z: Tensor, lse: Tensor) -> Tensor:
        t = self.probabilities
        return lse.sum() + torch.xlogy(t, t).sub(t * z.gather(1, self.tokens)).sum()

    def subtract_from(self, derivative: Tensor, weight: float) -> Tensor:
        return derivative.scatter_add_(1, self.tokens, -weight * self.probabilities)


class TopOfCorpus:
    """The K most probable tokens at each target position of a corpus, found by source and target.

    They are computed in order of length, so that a resumed run and all processes get the same. A position takes 6 K
    bytes. `distributions` are the teacher's, at all target positions of a batch.
    """

    @torch.no_grad()
    def __init__(
        self,
        count: int,
        pairs: Any,
        collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
        distributions: Callable[[Mapping[str, Any]], FullDistributions],
    ):
        self.start: dict[bytes, int] = {}  # of a pair: the number of its first position
        lengths = pair_lengths(pairs)
        order, end = np.lexsort(lengths), 0  # by target length, then source length
        # Allocated first: small tensors kept among the logits of all chunks would fragment the heap.
        self.tokens = torch.empty(int(lengths[1].sum()), count, dtype=torch.int32)
        self.probabilities = torch.empty(self.tokens.shape, dtype=torch.float16)
        for first in range(0, len(order), PAIRS_AT_ONCE):
            rows = [pairs[int(number)] for number in order[first : first + PAIRS_AT_ONCE]]
            for row in rows:
                self.start[_key(row["input_ids"], row["labels"])] = end
                end += len(row["labels"])
            batch = collator([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
            positions = batch["labels"].flatten().ne(IGNORED).nonzero().squeeze(1)  # (n,)
            taught, kept = distributions(batch), slice(end - len(positions), end)
            parts = (each[kept].split(POSITIONS_AT_ONCE) for each in (self.tokens, self.probabilities))
            for some, tokens, probabilities in zip(positions.split(POSITIONS_AT_ONCE), *parts, strict=True):
                best = taught.at(some, torch.float32).rows(slice(None)).t.topk(count)  # (n, K)
                tokens.copy_(best.indices)
                probabilities.copy_(best.values)

    def of(self, batch: Mapping[str, Any]) -> TopDistributions:
        """Get the distributions at the target positions of a batch of these pairs. Padding gets any distribution."""
        labels = batch["labels"].cpu().numpy()  # (B, T)
        sources, real = (batch[name].cpu().numpy() for name in ("input_ids", "attention_mask"))  # (B, S)
        index = np.zeros(labels.shape, dtype=np.int64)
        for row, (source, mask, label) in enumerate(zip(sources, real, labels, strict=True)):
            target = label[label != IGNORED]
            if len(target):
                index[row, : len(target)] = self.start[_key(source[mask != 0], target)] + np.arange(len(target))
        chosen, device = torch.from_numpy(index.ravel()), batch["labels"].device  # (B T,)
        probabilities = self.probabilities[chosen].to(device).float()  # (B T, K)
        return TopDistributions(self.tokens[chosen].to(device).long(), F.normalize(probabilities, p=1, dim=1))


def _key(source: Any, target: Any) -> bytes:
    digest = blake2b(np.asarray(source, np.int64).tobytes(), digest_size=16)
    digest.update(len(source).to_bytes(8, "little") + np.asarray(target, np.int64).tobytes())
    return digest.digest()
