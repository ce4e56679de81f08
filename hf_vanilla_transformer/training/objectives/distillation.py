"""Word-level knowledge distillation (Kim & Rush 2016, arXiv 1606.07947, §3.1): learn from a teacher's distributions.

With t for the teacher's distribution of a target token (for an ensemble the mean, as in decoding) and p for the
student's, the loss of a position is

  (1 - λ) CE(p) + λ KL(t ‖ p)

The paper has the cross-entropy -Σ t log p instead of KL(t ‖ p). The two differ by the entropy of t and have the same
gradients. For sequence-level distillation (§3.2) train on the teacher's translations, written by `vanilla-transformer
distil`.

Shapes: B sentences, S source length, T target length, n positions in a chunk, D d_model, V target vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ...data.tokenizer_training import load_tokenizers, tokenizer_digest
from ...errors import UserError
from ...inference.loading import load_model
from ...loss_vanilla_transformer import IGNORED, cross_entropy_into, softmax_and_lse
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from . import Objective
from .teacher_distributions import FullDistributions, TopDistributions, TopOfCorpus

CPU_CACHE = 2**18  # logits that are differentiated at once, so that they stay in a core's cache


class Teacher:
    """One translator, or an ensemble, that teaches a student its distributions.

    Args:
        folders: model folders. Their source and target vocabularies must be the student's.
        tokenizers: the student's, of source and target, compared with those in the folders. None compares sizes only.
        weight: λ, from 0 to 1.
        student: the model that is trained.

    Attributes:
        top: the most probable tokens at each target position of the training data, after `keep_top`.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        weight: float,
        student: VanillaTransformerForConditionalGeneration,
        tokenizers: Sequence[PreTrainedTokenizerBase] | None = None,
    ):
        self.models, self.weight = [_load_teacher(folder, student, tokenizers) for folder in folders], weight
        self.top: TopOfCorpus | None = None

    def keep_top(self, count: int, pairs: Any, collator: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Compute the most probable target tokens of all training pairs, so that updates need no teacher.

        Args:
            count: K, the number of tokens at each target position.
            pairs: rows with `input_ids` and `labels`, by number.
            collator: makes a batch of rows.
        """
        count = min(count, self.models[0].config.target_vocab_size)
        self.top = TopOfCorpus(count, pairs, collator, self._distributions)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Add to a batch the objective that compares the student's distributions with the teacher's."""
        taught = self._distributions(batch) if self.top is None else self.top.of(batch)
        return {**batch, "objective": DistillationObjective(taught, self.weight)}

    @torch.no_grad()
    def _distributions(self, batch: Mapping[str, Any]) -> FullDistributions:
        device = self.models[0].device
        batch = {name: each.to(device) for name, each in batch.items() if isinstance(each, Tensor)}
        target = batch.get("decoder_input_ids")
        if target is None:
            target = self.models[0].prepare_decoder_input_ids_from_labels(batch["labels"])
        return FullDistributions(
            [
                (each.model(batch["input_ids"], batch.get("attention_mask"), target).last_hidden_state, each.lm_head)
                for each in self.models
            ]
        )


def _load_teacher(
    folder: str | Path,
    student: VanillaTransformerForConditionalGeneration,
    tokenizers: Sequence[PreTrainedTokenizerBase] | None,
) -> VanillaTransformerForConditionalGeneration:
    model = load_model(folder, student.device)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(f"teacher {folder} is a {type(model).__name__}: convert it, or use `distil` for its text")
    names = ("vocab_size", "target_vocab_size", "decoder_start_token_id", "pad_token_id", "eos_token_id")
    for name in (*names, "target_pad_token_id", "target_eos_token_id"):
        theirs, ours = getattr(model.config, name), getattr(student.config, name)
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

    def from_logits(self, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        counted = labels.ne(IGNORED)  # (B, T)
        scores, targets = logits[counted].float(), labels[counted]  # (N', V), (N',)
        positions = counted.flatten().nonzero().squeeze(1)  # (N',)
        taught = self.taught.at(positions, scores.dtype)
        smoothed, plain = (
            F.cross_entropy(each, targets, label_smoothing=epsilon, reduction="sum")
            for each, epsilon in ((scores, smoothing), (scores.detach(), 0.0))
        )
        divergence = taught.rows(slice(None)).divergence(scores, scores.logsumexp(dim=1))
        return (1 - self.weight) * smoothed + self.weight * divergence, plain

    def differentiate(self, logits: Tensor, labels: Tensor, positions: Tensor, smoothing: float) -> Tensor:
        """Overwrite logits (1, n, V) with (1 - λ) (p - (1 - ε) [label]) + λ (p - t). Return the summed loss without
        label smoothing's term of mean(z), and the unsmoothed cross-entropy."""
        taught = self.taught.at(positions, logits.dtype)  # the dtype of the student's products
        sums = torch.zeros(2, device=logits.device)
        rows = max(1, CPU_CACHE // logits.shape[2]) if logits.device.type == "cpu" else logits.shape[1]
        share = 1 - self.weight
        for start in range(0, len(positions), rows):
            chunk = slice(start, start + rows)
            z, label, t = logits[0, chunk], labels[chunk], taught.rows(chunk)  # (rows, V), (rows, 1)
            p, lse = softmax_and_lse(z)  # (rows, V), (rows, 1)
            derivative = t.subtract_from(p, self.weight)
            cross_entropy, plain = cross_entropy_into(derivative, share, z, lse, label, smoothing)
            sums += torch.stack([share * cross_entropy + self.weight * t.divergence(z, lse), plain])
            z.copy_(derivative)
        return sums
