"""Consistency training: two passes over a batch, and a penalty on the difference of their predictions.

  R-Drop (Liang et al. 2021, arXiv 2106.14448): two passes with different dropout masks.
  SimCut (Gao et al. 2022, arXiv 2206.02368): in the second pass some token embeddings are zeroed.
  CrossConST (Gao et al. 2023, arXiv 2305.07310): in the second pass the target is the source, for many languages.

With p and q for the distributions of the two passes, the loss of a target position is

  CE(p) + c CE(q) + α (f KL(p ‖ q) + r KL(q ‖ p))

SimCut, its Eq. 7, and CrossConST:  c = 0, f = 1, r = 0
R-Drop, its Eq. 2-4:                c = 1, f = r = 1/2

Gradients flow through both distributions, as in the published code of the first two (github.com/gpengzhi/Bi-SimCut and
github.com/dropreg/R-Drop at the time of writing): nothing is detached.

Shapes: B sentences, S source length, T target length, N' target positions with a label, D d_model, V target
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainingArguments

from ....batches.batching import Batch
from ....batches.packing import is_packed
from ....loss_vanilla_transformer import (
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
class ConsistencyObjective(Objective):
    """The objective of consistency training, for the argument `objective` of a model's forward pass.

    `alpha` is α, the weight of the divergence. `second_cross_entropy`, `forward` and `reverse` are c, f and r.
    `cutoff` is the probability with which the second pass zeroes a token's embedding. With `language_mark` the second
    pass reads the target: "source" keeps the first token of the source before it, the mark of the target language, and
    "target" leaves out the first token of the target, which is that mark.
    """

    alpha: float
    second_cross_entropy: float
    forward: float
    reverse: float
    cutoff: float = 0.0
    language_mark: str | None = None
    passes: ClassVar[int] = 2

    def inputs(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Make the arguments of one forward pass over both versions of a batch, the unchanged one first.

        The batch has `input_ids` (B, S), `labels` (B, T), and perhaps `attention_mask` (B, S) and `decoder_input_ids`
        (B, T).
        """
        batch = dict(batch)
        if not is_packed(batch):
            batch["attention_mask"] = model.source_mask(
                batch["input_ids"], batch.get("attention_mask")
            )
        if batch.get("decoder_input_ids") is None:
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(
                batch["labels"], batch.get("decoder_segment_ids")
            )
        twice = {
            name: torch.cat([each, each])
            for name, each in batch.items()
            if isinstance(each, Tensor)
        }
        if self.cutoff:
            del twice["input_ids"], twice["decoder_input_ids"]
            twice |= self._with_zeroed_embeddings(model, batch)
        if self.language_mark:
            twice |= self._with_target_as_source(batch, model.config.pad_token_id)
        return {**batch, "input_ids": None, "decoder_input_ids": None, **twice, "objective": self}

    def _with_zeroed_embeddings(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Embeddings of both versions of source and target. The ends of sources and the starts of targets are kept."""
        source = batch["input_ids"]
        target = batch["decoder_input_ids"]
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
            "inputs_embeds": self._embed(source_table, source, keep=end),
            "decoder_inputs_embeds": self._embed(target_table, target, keep=start),
        }

    def _with_target_as_source(self, batch: Mapping[str, Tensor], pad: int) -> dict[str, Tensor]:
        """Ids and mask of the source (2 B, S), in the second half of the target."""
        source = batch["input_ids"]
        target = batch["labels"].masked_fill(batch["labels"] == IGNORED, pad)  # (B, T)
        with_mark = torch.cat([source[:, :1], target], dim=1)
        other = with_mark if self.language_mark == "source" else target[:, 1:]
        width = max(source.shape[1], other.shape[1])

        def joined(first: Tensor, second: Tensor, value: int) -> Tensor:
            sides = [
                F.pad(side.long(), (0, width - side.shape[1]), value=value)
                for side in (first, second)
            ]
            return torch.cat(sides)

        return {
            "input_ids": joined(source, other, pad),
            "attention_mask": joined(batch["attention_mask"], other.ne(pad), 0),
        }

    def _embed(self, embed_tokens: nn.Module, ids: Tensor, keep: Tensor) -> Tensor:
        """Embeddings of tokens (B, T), before scale and position, followed by the same with some zeroed."""
        embeddings = embed_tokens(ids)  # (B, T, D)
        kept = keep | random_mask(ids, self.cutoff)  # (B, T)
        # (2 B, T, D)
        return torch.cat([embeddings, embeddings * kept[..., None].to(embeddings.dtype)])

    def uniform(self, smoothing: float) -> tuple[float, float]:
        return smoothing, smoothing * self.second_cross_entropy

    def from_logits(
        self, logits: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Sum the loss of logits (2 B, T, V) and labels (B, T), and the unsmoothed cross-entropy of the first half."""
        counted = labels.ne(IGNORED)  # (B, T)
        first, second = (half[counted].float() for half in logits.chunk(2))  # (N', V)
        targets = labels[counted]  # (N',)

        def cross_entropy(scores: Tensor, smoothing: float) -> Tensor:
            return F.cross_entropy(scores, targets, label_smoothing=smoothing, reduction="sum")

        log_p = first.log_softmax(dim=1)
        log_q = second.log_softmax(dim=1)  # (N', V)
        forward = F.kl_div(log_q, log_p, reduction="sum", log_target=True)  # KL(p ‖ q)
        reverse = F.kl_div(log_p, log_q, reduction="sum", log_target=True)  # KL(q ‖ p)
        loss = cross_entropy(first, label_smoothing)
        if self.second_cross_entropy:
            loss = loss + self.second_cross_entropy * cross_entropy(second, label_smoothing)
        loss = loss + self.alpha * (self.forward * forward + self.reverse * reverse)
        return loss, cross_entropy(first.detach(), 0.0)

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

        With d = z - z' and E for means under p and q, KL(p ‖ q) = E_p d - (lse z - lse z'), and without smoothing the
        derivatives are

          by z:   p (1 + α r + α f (d - E_p d)) - α r q - [label]
          by z':  q (c + α f - α r (d - E_q d)) - α f p - c [label]
        """
        sums = torch.zeros(2, device=logits.device)
        f = self.alpha * self.forward
        r = self.alpha * self.reverse
        c = self.second_cross_entropy
        for rows in cache_sized_parts(logits, CPU_CACHE):
            z = logits[0, rows]
            other = logits[1, rows]  # z'
            label = labels[rows]
            some = None if weights is None else weights[rows]
            p, lse = softmax_and_lse(z)  # (rows, V), (rows, 1)
            q, other_lse = softmax_and_lse(other)
            difference = z.float() - other  # d (rows, V)
            weighted = p * difference
            mean = weighted.sum(dim=1, keepdim=True)  # E_p d (rows, 1)
            gap = lse - other_lse
            loss = f * (mean - gap)  # (rows, 1)
            by_z = weighted.mul_(f).addcmul_(p, 1 + r - f * mean)
            if r:
                by_z.sub_(q, alpha=r)
                difference.mul_(q)
                mean = difference.sum(dim=1, keepdim=True)  # E_q d
                loss = loss + r * (gap - mean)
                by_other = difference.mul_(-r).addcmul_(q, c + f + r * mean).sub_(p, alpha=f)
            else:
                by_other = q.mul_(c + f).sub_(p, alpha=f)
            # (rows, 1)
            cross_entropy, plain = cross_entropy_into(by_z, 1.0, z, lse, label, smoothing)
            loss = loss + cross_entropy
            if c:
                loss = (
                    loss
                    + c * cross_entropy_into(by_other, c, other, other_lse, label, smoothing)[0]
                )
            z.copy_(by_z if some is None else by_z * some)
            other.copy_(by_other if some is None else by_other * some)
            sums = sums + torch.stack([weighted_sum(loss, some), weighted_sum(plain, some)])
        return sums


def halves(batch: Batch) -> list[Batch]:
    """Split a batch in two parts with half of its pairs each, unless it has one pair.

    Two passes over a part need the activations of one pass over the batch, so that consistency training needs no more
    memory than the plain loss. The gradients of the parts add up to the gradients of the batch.
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


def simcut(alpha: float = 3.0, probability: float = 0.05) -> ConsistencyObjective:
    """SimCut, with the paper's defaults."""
    return ConsistencyObjective(
        alpha, second_cross_entropy=0.0, forward=1.0, reverse=0.0, cutoff=probability
    )


def r_drop(alpha: float = 5.0) -> ConsistencyObjective:
    """R-Drop, with the paper's default for translation."""
    return ConsistencyObjective(alpha, second_cross_entropy=1.0, forward=0.5, reverse=0.5)


def crossconst(alpha: float, language_mark: str) -> ConsistencyObjective:
    """CrossConST for a joint vocabulary."""
    return ConsistencyObjective(
        alpha, second_cross_entropy=0.0, forward=1.0, reverse=0.0, language_mark=language_mark
    )


def consistency_objective(
    args: TrainingArguments, language_mark: str = "source"
) -> ConsistencyObjective | None:
    """The objective of training arguments, or None. `language_mark` is the side with the token of a language."""
    if getattr(args, "crossconst_alpha", 0):
        return crossconst(args.crossconst_alpha, language_mark)
    if getattr(args, "simcut_alpha", 0):
        return simcut(args.simcut_alpha)
    return r_drop(args.r_drop_alpha) if getattr(args, "r_drop_alpha", 0) else None
