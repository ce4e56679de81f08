"""Word-level knowledge distillation (Kim & Rush 2016, arXiv 1606.07947, §3.1): learn from a teacher's distributions.

With t for the teacher's distribution of a target token (for an ensemble the mean, as in decoding) and p for the
student's, the loss of a position is

  (1 - λ) CE(p) + λ KL(t ‖ p)

The paper has the cross-entropy -Σ t log p instead of KL(t ‖ p). The two differ by the entropy of t and have the same
gradients. For sequence-level distillation (§3.2) train on the teacher's translations, written by `vanilla-transformer
distil`.

The teacher's distributions are computed in full for one update, or their most probable tokens are kept. Both have
`at`, the distributions t at some positions of a batch, and `rows` of these. Rows have `divergence` (n, 1),
KL(t ‖ p) = Σ t log t - Σ t z + lse z for the student's logits z (n, V), and `subtract_from`, to subtract weight · t
from a derivative (n, V) in place.

Shapes: B sentences, S source length, T target length, n positions in a chunk, D d_model, D' the teacher's d_model,
V target vocabulary, K tokens kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ....batches.batching import Batch, Collate, pair_lengths
from ....inference.loading import load_model
from ....loss_vanilla_transformer import (
    IGNORED,
    cache_sized_parts,
    cross_entropy_into,
    softmax_and_lse,
    weighted_sum,
)
from ....modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ....text.tokenizer_files import load_tokenizers, tokenizer_digest
from ....utils.errors import UserError
from . import Objective

PAIRS_AT_ONCE = 128
POSITIONS_AT_ONCE = 512  # of one call of the teacher, and of one `topk`


# In full


@dataclass
class FullRows:
    """Distributions t (n, V)."""

    t: Tensor

    def divergence(self, z: Tensor, lse: Tensor) -> Tensor:
        return lse + torch.xlogy(self.t, self.t).sub_(self.t * z).sum(dim=1, keepdim=True)

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

    teachers: Sequence[tuple[Tensor, nn.Linear]]

    def at(self, positions: Tensor | slice, dtype: torch.dtype) -> FullChunk:
        return FullChunk(
            [
                _logits(head, states.flatten(0, 1)[positions], dtype)
                for states, head in self.teachers
            ]
        )


def _logits(head: nn.Linear, states: Tensor, dtype: torch.dtype) -> Tensor:
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

    def at(self, positions: Tensor | slice, dtype: torch.dtype) -> "TopDistributions":
        return TopDistributions(self.tokens[positions], self.probabilities[positions])

    def rows(self, some: slice) -> "TopDistributions":
        return TopDistributions(self.tokens[some], self.probabilities[some])

    def divergence(self, z: Tensor, lse: Tensor) -> Tensor:
        t = self.probabilities
        return lse + torch.xlogy(t, t).sub(t * z.gather(1, self.tokens)).sum(dim=1, keepdim=True)

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
        pairs: Dataset,
        collator: Collate,
        distributions: Callable[[Batch], FullDistributions],
    ):
        self.start: dict[bytes, int] = {}  # of a pair: the number of its first position
        lengths = pair_lengths(pairs)
        order = np.lexsort(lengths)
        end = 0  # by target length, then source length
        # Allocated first: small tensors kept among the logits of all chunks would fragment the heap.
        self.tokens = torch.empty(int(lengths[1].sum()), count, dtype=torch.int32)
        self.probabilities = torch.empty(self.tokens.shape, dtype=torch.float16)
        for first in range(0, len(order), PAIRS_AT_ONCE):
            rows = [pairs[int(number)] for number in order[first : first + PAIRS_AT_ONCE]]
            for row in rows:
                labels = _without_padding(np.asarray(row["labels"]))
                self.start[_key(row["input_ids"], labels)] = end
                end += int((labels != IGNORED).sum())
            batch = collator(
                [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
            )
            positions = batch["labels"].flatten().ne(IGNORED).nonzero().squeeze(1)  # (n,)
            taught = distributions(batch)
            kept = slice(end - len(positions), end)
            parts = (
                each[kept].split(POSITIONS_AT_ONCE) for each in (self.tokens, self.probabilities)
            )
            for some, tokens, probabilities in zip(
                positions.split(POSITIONS_AT_ONCE), *parts, strict=True
            ):
                best = taught.at(some, torch.float32).rows(slice(None)).t.topk(count)  # (n, K)
                tokens.copy_(best.indices)
                probabilities.copy_(best.values)

    def of(self, batch: Batch) -> TopDistributions:
        """Get the distributions at the target positions of a batch of these pairs. Padding gets any distribution."""
        labels = batch["labels"].cpu().numpy()  # (B, T)
        # (B, S)
        sources, real = (batch[name].cpu().numpy() for name in ("input_ids", "attention_mask"))
        index = np.zeros(labels.shape, dtype=np.int64)
        for row, (source, mask, label) in enumerate(zip(sources, real, labels, strict=True)):
            counted = np.flatnonzero(label != IGNORED)
            if len(counted):
                first = self.start[_key(source[mask != 0], _without_padding(label))]
                index[row, counted] = first + np.arange(len(counted))
        chosen = torch.from_numpy(index.ravel())
        device = batch["labels"].device  # (B T,)
        probabilities = self.probabilities[chosen].to(device).float()  # (B T, K)
        return TopDistributions(
            self.tokens[chosen].to(device).long(), F.normalize(probabilities, p=1, dim=1)
        )


def _without_padding(labels: np.ndarray) -> np.ndarray:
    """Labels without -100 at their end. Those before it are a part of the target."""
    counted = np.flatnonzero(labels != IGNORED)
    return labels[: counted[-1] + 1] if len(counted) else labels[:0]


def _key(source: Sequence[int] | np.ndarray, target: Sequence[int] | np.ndarray) -> bytes:
    digest = blake2b(np.asarray(source, np.int64).tobytes(), digest_size=16)
    digest.update(len(source).to_bytes(8, "little") + np.asarray(target, np.int64).tobytes())
    return digest.digest()


CPU_CACHE = 2**18  # logits that are differentiated at once, so that they stay in a core's cache


# Fields of a batch that a teacher reads, those of packed rows included
TEACHER_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "cross_attention_mask",
    "segment_ids",
    "decoder_segment_ids",
)


class Teacher:
    """One translator, or an ensemble, that teaches a student its distributions with the weight λ.

    Source and target vocabularies must be the student's. Without `tokenizers` only their sizes are compared.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        weight: float,
        student: VanillaTransformerForConditionalGeneration,
        tokenizers: Sequence[PreTrainedTokenizerBase] | None = None,
    ):
        self.folders = list(folders)
        self.models = [_load_teacher(folder, student, tokenizers) for folder in folders]
        self.weight = weight
        self.top: TopOfCorpus | None = None

    def keep_top(self, count: int, pairs: Dataset, collator: Collate) -> None:
        """Compute the `count` most probable target tokens of all training pairs, so that updates need no teacher."""
        count = min(count, self.models[0].config.target_vocab_size)
        self.top = TopOfCorpus(count, pairs, collator, self._distributions)

    def inputs(self, batch: Batch) -> dict[str, object]:
        """Add to a batch the objective that compares the student's distributions with the teacher's."""
        taught = self._distributions(batch) if self.top is None else self.top.of(batch)
        return {**batch, "objective": DistillationObjective(taught, self.weight)}

    @torch.no_grad()
    def _distributions(self, batch: Batch) -> FullDistributions:
        device = self.models[0].device
        batch = {name: each.to(device) for name, each in batch.items() if isinstance(each, Tensor)}
        if batch.get("decoder_input_ids") is None:
            batch["decoder_input_ids"] = self.models[0].prepare_decoder_input_ids_from_labels(
                batch["labels"], batch.get("decoder_segment_ids")
            )
        arguments = {name: each for name, each in batch.items() if name in TEACHER_ARGUMENTS}
        return FullDistributions(
            [(each.model(**arguments).last_hidden_state, each.lm_head) for each in self.models]
        )


def _load_teacher(
    folder: str | Path,
    student: VanillaTransformerForConditionalGeneration,
    tokenizers: Sequence[PreTrainedTokenizerBase] | None,
) -> VanillaTransformerForConditionalGeneration:
    model = load_model(folder, student.device)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(
            f"teacher {folder} is a {type(model).__name__}: convert it, or use `distil` for its text"
        )
    names = (
        "vocab_size",
        "target_vocab_size",
        "decoder_start_token_id",
        "pad_token_id",
        "eos_token_id",
    )
    for name in (*names, "target_pad_token_id", "target_eos_token_id"):
        theirs = getattr(model.config, name)
        ours = getattr(student.config, name)
        if theirs != ours:
            raise UserError(
                f"teacher {folder} has {name}={theirs}, the student {ours}: give the student the teacher's "
                f"tokenizer (tokenizer_name: {folder}), or use `distil` for its text"
            )
    if tokenizers is not None and (Path(folder) / "tokenizer_config.json").is_file():
        for ours, theirs in zip(tokenizers, load_tokenizers(folder), strict=True):
            if tokenizer_digest([ours]) != tokenizer_digest([theirs]):
                raise UserError(
                    f"teacher {folder} has another tokenizer than the student, though of the same size: give the "
                    f"student the teacher's (tokenizer_name: {folder}), or use `distil` for its text"
                )
    return model.eval().requires_grad_(False)


@dataclass
class DistillationObjective(Objective):
    """The objective of word-level distillation of one batch, for the argument `objective` of a model's forward pass.

    Args:
        taught: the teacher's distributions at the batch's target positions.
        weight: λ.
    """

    taught: FullDistributions | TopDistributions
    weight: float

    def uniform(self, smoothing: float) -> tuple[float]:
        return ((1 - self.weight) * smoothing,)

    def from_logits(
        self, logits: Tensor, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        counted = labels.ne(IGNORED)  # (B, T)
        scores = logits[counted].float()
        targets = labels[counted]  # (N', V), (N',)
        positions = counted.flatten().nonzero().squeeze(1)  # (N',)
        taught = self.taught.at(positions, scores.dtype)
        smoothed, plain = (
            F.cross_entropy(each, targets, label_smoothing=epsilon, reduction="sum")
            for each, epsilon in ((scores, smoothing), (scores.detach(), 0.0))
        )
        divergence = (
            taught.rows(slice(None)).divergence(scores, scores.logsumexp(dim=1, keepdim=True)).sum()
        )
        return (1 - self.weight) * smoothed + self.weight * divergence, plain

    def differentiate(
        self,
        logits: Tensor,
        labels: Tensor,
        positions: Tensor | slice,
        weights: Tensor | None,
        smoothing: float,
    ) -> Tensor:
        """Overwrite logits (1, n, V) with (1 - λ) (p - (1 - ε) [label]) + λ (p - t). Return the summed loss without
        label smoothing's term of mean(z), and the unsmoothed cross-entropy."""
        taught = self.taught.at(positions, logits.dtype)  # the dtype of the student's products
        sums = torch.zeros(2, device=logits.device)
        share = 1 - self.weight
        for rows in cache_sized_parts(logits, CPU_CACHE):
            z = logits[0, rows]
            t = taught.rows(rows)
            some = None if weights is None else weights[rows]
            p, lse = softmax_and_lse(z)  # (rows, V), (rows, 1)
            derivative = t.subtract_from(p, self.weight)
            # (rows, 1)
            cross_entropy, plain = cross_entropy_into(
                derivative, share, z, lse, labels[rows], smoothing
            )
            loss = share * cross_entropy + self.weight * t.divergence(z, lse)
            sums = sums + torch.stack([weighted_sum(loss, some), weighted_sum(plain, some)])
            z.copy_(derivative if some is None else derivative * some)
        return sums
