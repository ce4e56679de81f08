"""SimCut (Gao et al. 2022, arXiv 2206.02368): a penalty on the difference between the predictions of two passes.

In the second pass some token embeddings are zeroed. With p and q for the distributions of the two passes, the loss of
a target position is, its Eq. 7,

  CE(p) + α KL(p ‖ q)

Gradients flow through both distributions, as in the published code (github.com/gpengzhi/Bi-SimCut at the time of
writing): nothing is detached.

Shapes: B sentences, S source length, T target length, N' target positions with a label, D d_model, V target
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...data.batching import Batch
from ...loss_vanilla_transformer import (
    IGNORED,
    cache_sized_parts,
    cross_entropy_into,
    softmax_and_lse,
    weighted_sum,
)
from . import Objective

# Logits of each pass that are differentiated at once, so that they stay in a core's cache.
CPU_CACHE = 2**17


@dataclass(frozen=True)
class SimCut(Objective):
    """The objective of SimCut, for the argument `objective` of a model's forward pass. The defaults are the paper's.

    Args:
        alpha: α, the weight of the divergence.
        probability: with which the second pass zeroes a token's embedding.
    """

    alpha: float = 3.0
    probability: float = 0.05
    passes: ClassVar[int] = 2

    def inputs(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Make the arguments of one forward pass over both versions of a batch, the unchanged one first.

        The batch has `input_ids` (B, S), `labels` (B, T), and perhaps `attention_mask` (B, S) and `decoder_input_ids`
        (B, T).
        """
        source = batch["input_ids"]
        target = batch.get("decoder_input_ids")
        if target is None:
            target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        mask = model.source_mask(source, batch.get("attention_mask"))
        twice = {
            name: torch.cat([each, each])
            for name, each in {**batch, "attention_mask": mask}.items()
            if isinstance(each, Tensor)
        }
        if "decoder_position_ids" in batch:  # several pairs in a row
            start = batch["decoder_position_ids"] == 0  # (B, T)
        else:
            start = torch.zeros_like(target, dtype=torch.bool)
            start[:, 0] = True
        # Compared with numbers of Python: a tensor of them would be copied to a GPU in each batch.
        ids = model.config.eos_token_id
        ids = ids if isinstance(ids, list) else [ids]
        end = torch.stack([source == each for each in ids]).any(dim=0)  # (B, S)
        source_table = model.get_encoder().embed_tokens
        target_table = model.get_decoder().embed_tokens
        return {
            **batch,
            **twice,
            "input_ids": None,
            "decoder_input_ids": None,
            # The ends of sources and the starts of targets are kept.
            "inputs_embeds": self._embed(source_table, source, keep=end),
            "decoder_inputs_embeds": self._embed(target_table, target, keep=start),
            "objective": self,
        }

    def _embed(self, embed_tokens: nn.Module, ids: Tensor, keep: Tensor) -> Tensor:
        """Embeddings of tokens (B, T), before scale and position, followed by the same with some zeroed."""
        embeddings = embed_tokens(ids)  # (B, T, D)
        kept = keep | random_mask(ids, self.probability)  # (B, T)
        # (2 B, T, D)
        return torch.cat([embeddings, embeddings * kept[..., None].to(embeddings.dtype)])

    def uniform(self, smoothing: float) -> tuple[float, float]:
        return smoothing, 0.0

    def from_logits(
        self, logits: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Sum the loss of logits (2 B, T, V) and labels (B, T), and the unsmoothed cross-entropy of the first half."""
        counted = labels.ne(IGNORED)  # (B, T)
        first, second = (half[counted].float() for half in logits.chunk(2))  # (N', V)
        targets = labels[counted]  # (N',)

        log_p = first.log_softmax(dim=1)
        log_q = second.log_softmax(dim=1)  # (N', V)
        divergence = F.kl_div(log_q, log_p, reduction="sum", log_target=True)  # KL(p ‖ q)
        smoothed, plain = (
            F.cross_entropy(each, targets, label_smoothing=epsilon, reduction="sum")
            for each, epsilon in ((first, label_smoothing), (first.detach(), 0.0))
        )
        return smoothed + self.alpha * divergence, plain

    def differentiate(
        self,
        logits: Tensor,
        labels: Tensor,
        positions: Tensor | slice,
        weights: Tensor | None,
        smoothing: float,
    ) -> Tensor:
        """Overwrite the logits z and z' of both passes (2, n, V) with the derivatives of the loss. Return its sum and
        the unsmoothed cross-entropy of the first pass, all without label smoothing's terms of mean(z).

        With d = z - z' and E for means under p, KL(p ‖ q) = E d - (lse z - lse z'), and without smoothing the
        derivatives are

          by z:   p (1 + α (d - E d)) - [label]
          by z':  α (q - p)
        """
        sums = torch.zeros(2, device=logits.device)
        for rows in cache_sized_parts(logits, CPU_CACHE):
            z = logits[0, rows]
            other = logits[1, rows]  # z'
            some = None if weights is None else weights[rows]
            p, lse = softmax_and_lse(z)  # (rows, V), (rows, 1)
            q, other_lse = softmax_and_lse(other)
            weighted = p * (z.float() - other)  # p d (rows, V)
            mean = weighted.sum(dim=1, keepdim=True)  # E d (rows, 1)
            by_z = weighted.mul_(self.alpha).addcmul_(p, 1 - self.alpha * mean)
            by_other = q.mul_(self.alpha).sub_(p, alpha=self.alpha)
            # (rows, 1)
            cross_entropy, plain = cross_entropy_into(by_z, 1.0, z, lse, labels[rows], smoothing)
            loss = self.alpha * (mean - (lse - other_lse)) + cross_entropy
            z.copy_(by_z if some is None else by_z * some)
            other.copy_(by_other if some is None else by_other * some)
            sums = sums + torch.stack([weighted_sum(loss, some), weighted_sum(plain, some)])
        return sums


def halves(batch: Batch) -> list[Batch]:
    """Split a batch in two parts with half of its pairs each, unless it has one pair.

    Two passes over a part need the activations of one pass over the batch, so that SimCut needs no more memory than
    the plain loss. The gradients of the parts add up to the gradients of the batch.
    """
    pairs = len(batch["labels"])
    if pairs == 1:
        return [batch]
    middle = (pairs + 1) // 2
    return [
        {name: each[part] if isinstance(each, Tensor) else each for name, each in batch.items()}
        for part in (slice(middle), slice(middle, None))
    ]


def random_mask(ids: Tensor, probability: float) -> Tensor:
    """False with a probability, for each of the tokens (B, T)."""
    return torch.rand(ids.shape, device=ids.device) >= probability
