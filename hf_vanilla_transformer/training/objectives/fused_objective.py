"""Objectives on the logits of all target positions, without holding them in memory.

The logits of a batch are computed, differentiated and multiplied back chunk by chunk, in the forward pass; see
`fused_translation_loss`, which does the same for the cross-entropy alone.

Shapes: P passes over a batch, N target positions, N' of them with a label, n positions in a chunk, D d_model,
V target vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...loss_vanilla_transformer import IGNORED, ROW_UNIT, rows_per_chunk

#: Overwrites the logits (P, n, V) of a chunk with the derivatives of the loss by them. It gets the labels (n, 1) and
#: the chunk's positions (n,) among the N, and returns two sums over the chunk: the loss, and what is logged beside it.
Differentiate = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused_objective(
    hidden_states: Tensor, lm_head: nn.Module, labels: Tensor, differentiate: Differentiate, uniform: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The two sums of `differentiate` over all positions with a label, with -Σ u_i mean(z_i) in the first, which alone
    can be differentiated, once.

    Args:
        hidden_states: (P, N, D). lm_head: the output layer, a plain linear layer. labels: (N,), -100 for padding.
        uniform: u (P,), the weight with which label smoothing gives each pass's target to all tokens alike: ε times
            the weight of its cross-entropy. mean(z) = h · mean(W) + mean(b) needs no logits.
    """
    total, logged, *_ = _FusedObjective.apply(
        hidden_states, lm_head.weight, lm_head.bias, labels, differentiate, tuple(uniform), torch.is_grad_enabled()
    )
    return total, logged


class _FusedObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        differentiate: Differentiate,
        uniform: tuple[float, ...],
        grad: bool,
    ) -> tuple[Tensor | None, ...]:
        device_type = hidden.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        counted = labels.ne(IGNORED).nonzero().squeeze(1)  # (N',)
        tokens = F.pad(hidden[:, counted].to(dtype), (0, 0, 0, -len(counted) % ROW_UNIT))  # (P, N' rounded up, D)
        cast_weight = weight.to(dtype)  # (V, D)
        cast_bias = None if bias is None else bias.to(dtype)  # (V,)
        with torch.autocast(device_type, enabled=False):
            u = torch.tensor(uniform, device=hidden.device)  # (P,)
            mean_weight = weight.mean(dim=0, dtype=torch.float32)  # (D,)
            sum_tokens = u @ tokens.sum(dim=1, dtype=torch.float32)  # (D,) from (P,), (P, D)
            total, grad_bias = -(sum_tokens @ mean_weight), None
            if bias is not None:
                count = sum(uniform) * len(counted)
                total -= count * bias.float().mean()
                grad_bias = torch.full_like(bias, -count / len(bias), dtype=torch.float32)  # (V,)
            sums = torch.stack([total, torch.zeros_like(total)])
            grad_tokens: Any = torch.empty_like(tokens, dtype=torch.float32) if grad else None  # (P, N', D)
            grad_weight: Any = (sum_tokens / -len(weight)).repeat(len(weight), 1) if grad else None  # (V, D)
            rows = max(1, rows_per_chunk(weight.shape, device_type, dtype) // len(hidden))
            # One buffer for all chunks, as in the loss of one pass: fresh memory is mapped page by page.
            buffer = tokens.new_empty(min(rows, tokens.shape[1]) * len(hidden), len(weight))  # (P rows, V)
            product = torch.empty_like(cast_weight) if grad and dtype != torch.float32 else None  # (V, D)
            for start in range(0, len(counted), rows):
                chunk = slice(start, start + rows)
                states = tokens[:, chunk].flatten(0, 1)  # (P n, D)
                flat = torch.mm(states, cast_weight.T, out=buffer[: len(states)])  # (P n, V)
                if cast_bias is not None:
                    flat += cast_bias
                logits = flat.unflatten(0, (len(hidden), -1))  # (P, n, V)
                positions = counted[chunk]
                sums += differentiate(logits[:, : len(positions)], labels[positions, None], positions)
                logits[:, len(positions) :] = 0
                if not grad:
                    continue
                grad_tokens[:, chunk] = logits @ cast_weight  # (P, n, D)
                if product is None:
                    grad_weight.addmm_(flat.T, states)  # (V, D) from (V, P n), (P n, D)
                else:
                    grad_weight += torch.mm(flat.T, states, out=product)
                if grad_bias is not None:
                    grad_bias += flat.sum(dim=0, dtype=torch.float32)
            if grad:
                grad_tokens = grad_tokens[:, : len(counted)].sub_(u[:, None, None] * mean_weight)
        return sums[0].clone(), sums[1].clone(), counted, grad_tokens, grad_weight, grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        # `torch.func` takes a context apart from `forward`, and what it saves among the outputs.
        hidden, weight, *_ = inputs
        _, logged, counted, *gradients = output
        ctx.mark_non_differentiable(logged, counted)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(counted, *gradients)
        ctx.like = hidden.shape, hidden.dtype, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(each is not None for each in second):
            raise RuntimeError("this loss has no second derivatives; for those call the model with skip_logits=False")
        counted, grad_tokens, grad_weight, grad_bias = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.like
        grad_hidden = grad_tokens.new_zeros(shape)  # (P, N, D)
        grad_hidden[:, counted] = grad_tokens * grad_total
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_total).to(weight_dtype)
        grad_weight = (grad_weight * grad_total).to(weight_dtype)
        return grad_hidden.to(hidden_dtype), grad_weight, grad_bias, None, None, None, None


def cross_entropy_into(
    derivative: Tensor, weight: float, logits: Tensor, lse: Tensor, labels: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Subtract weight (1 - ε) [label] from a derivative (n, V), which has weight · p already.

    Args:
        logits: (n, V). lse: (n, 1), of their rows. labels: (n, 1). smoothing: ε.

    Returns:
        The sums of the smoothed and of the plain cross-entropy, without the weight and the term of mean(z).
    """
    chosen = logits.gather(1, labels).float()  # z_label (n, 1)
    plain = (lse - chosen).sum()
    derivative.scatter_add_(1, labels, derivative.new_full(labels.shape, weight * (smoothing - 1)))
    return plain + smoothing * chosen.sum(), plain
