"""The training objective of §5.4: cross-entropy per target token, with label smoothing.

Shapes: N target positions, N' of them with a label, D d_model, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label that Hugging Face's collators give to padding

# Logits per chunk. Each chunk adds a product (V, D) to the gradient, which a few times D positions make cheap; on a
# CPU more only leave its cache. In half precision it needs a tensor of its own first, so that larger chunks pay.
CPU_CHUNK, CPU_ROWS = 2**23, 4  # at most; positions, times D
CPU_HALF_CHUNK, CPU_HALF_ROWS = 2**25, 8
DEVICE_CHUNK = 2**26
ROW_UNIT = 64  # to which positions are rounded up: oneDNN compiles and keeps kernels for every shape of a product
CPU_CACHE = 2**19  # logits that are differentiated at once: on a CPU they should stay in a core's cache


def shift_right(labels: Tensor, start_token_id: int, pad_token_id: int) -> Tensor:
    """The decoder's input (§3.1) for labels (B, T): `start_token_id`, then all but the last; padding for -100."""
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = start_token_id
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def translation_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy per token, against (1 - ε) for the label plus ε / V for every token (§5.4): a float32 scalar.

    Args:
        logits: (…, V). labels: (…); -100 is not counted, and without any other the loss is 0. label_smoothing: ε.
        num_items_in_batch: tokens of the whole update, where this batch is only a part of it (gradient accumulation,
            several processes). The parts then add up to the mean over all tokens, however they were split."""
    logits, targets = logits.float().flatten(0, -2), labels.flatten()  # (N, V), (N,)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return total / target_tokens(labels, num_items_in_batch)


def fused_translation_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """`translation_loss` of the logits `hidden_states @ weight.T + bias`, without holding them all in memory.

    For 4,096 tokens of a vocabulary of 37,000 the logits take 600 MB, and each derivative as much again. Here they are
    computed and differentiated chunk by chunk, without the positions whose label is -100.

    Shapes: `hidden_states` (…, D), `weight` (V, D), `bias` (V,) or None, `labels` (…). Returns a float32 scalar,
    differentiable once by the first three, and the same without smoothing and without a gradient."""
    total, plain, *_ = _FusedCrossEntropy.apply(
        hidden_states.flatten(0, -2), weight, bias, labels.flatten(), label_smoothing, torch.is_grad_enabled()
    )
    tokens = target_tokens(labels, num_items_in_batch)
    return total / tokens, plain / tokens


def target_tokens(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    if num_items_in_batch is None:
        return labels.ne(IGNORED).sum().clamp(min=1)
    return num_items_in_batch.to(labels.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch


class _FusedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropies, smoothed and plain. `forward` computes the gradients too, while a chunk's logits exist.

    With p = softmax(z), the loss of one position is  lse(z) - (1 - ε) z_label - ε mean(z),  and its derivative by z is
    p - (1 - ε) [label] - ε / V.  The terms of mean(z) = h · mean(W) + mean(b) need no logits.
    """

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, grad: bool
    ) -> tuple[Tensor | None, ...]:
        device_type, vocab_size = hidden.device.type, weight.shape[0]
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        counted = labels.ne(IGNORED).nonzero().squeeze(1)  # (N',)
        tokens = F.pad(hidden[counted].to(dtype), (0, 0, 0, -len(counted) % ROW_UNIT))  # (N' rounded up, D)
        cast_weight = weight.to(dtype)  # (V, D)
        cast_bias = None if bias is None else bias.to(dtype)  # (V,)
        labels = labels[counted, None]  # (N', 1)
        with torch.autocast(device_type, enabled=False):
            mean_weight, sum_tokens = weight.mean(dim=0, dtype=torch.float32), tokens.sum(dim=0, dtype=torch.float32)
            total = -smoothing * (sum_tokens @ mean_weight)
            grad_bias: Any = None
            if bias is not None:
                total -= smoothing * len(counted) * bias.float().mean()
                grad_bias = sum_tokens.new_full((vocab_size,), -smoothing / vocab_size * len(counted))
            sums = torch.stack([total, torch.zeros_like(total)])  # with smoothing, without
            # Gradients (N', D), (V, D) and (V,)
            grad_tokens: Any = torch.empty_like(tokens, dtype=torch.float32) if grad else None
            grad_weight: Any = (sum_tokens * (-smoothing / vocab_size)).repeat(vocab_size, 1) if grad else None
            rows = rows_per_chunk(weight.shape, device_type, dtype)
            # One buffer for all chunks: fresh memory, mapped page by page, costs a third of this loss's time.
            buffer = tokens.new_empty(min(rows, len(tokens)), vocab_size)  # (rows, V)
            product = torch.empty_like(cast_weight) if grad and dtype != torch.float32 else None  # (V, D)
            for start in range(0, len(labels), rows):
                chunk = slice(start, start + rows)
                logits = buffer[: len(tokens) - start]  # (rows, V), the last chunk fewer
                if cast_bias is None:
                    torch.mm(tokens[chunk], cast_weight.T, out=logits)
                else:
                    torch.addmm(cast_bias, tokens[chunk], cast_weight.T, out=logits)
                sums += _differentiate(logits[: len(labels) - start], labels[chunk], smoothing)
                logits[len(labels) - start :] = 0
                if not grad:
                    continue
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0, dtype=torch.float32)
                grad_tokens[chunk] = logits @ cast_weight
                if product is None:
                    grad_weight.addmm_(logits.T, tokens[chunk])
                else:
                    grad_weight += torch.mm(logits.T, tokens[chunk], out=product)
            if grad:
                grad_tokens = grad_tokens[: len(labels)].sub_(smoothing * mean_weight)
        return sums[0].clone(), sums[1].clone(), counted, grad_tokens, grad_weight, grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        # `torch.func` takes a context apart from `forward`, and what it saves among the outputs.
        hidden, weight, *_ = inputs
        _, plain, counted, *gradients = output
        ctx.mark_non_differentiable(plain, counted)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(counted, *gradients)
        ctx.like = hidden.shape, hidden.dtype, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(each is not None for each in second):
            raise RuntimeError("this loss has no second derivatives; for those call the model with skip_logits=False")
        counted, grad_tokens, grad_weight, grad_bias = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.like
        grad_hidden = grad_tokens.new_zeros(shape)  # (N, D)
        grad_hidden[counted] = grad_tokens * grad_total
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_total).to(weight_dtype)
        return grad_hidden.to(hidden_dtype), (grad_weight * grad_total).to(weight_dtype), grad_bias, None, None, None


def rows_per_chunk(weight: torch.Size, device_type: str, dtype: torch.dtype) -> int:
    """Positions per chunk for a `weight` of shape (V, D)."""
    vocab_size, width = weight
    if device_type != "cpu":
        return max(1, DEVICE_CHUNK // vocab_size)
    chunk, rows = (CPU_CHUNK, CPU_ROWS) if dtype == torch.float32 else (CPU_HALF_CHUNK, CPU_HALF_ROWS)
    return max(1, min(chunk // vocab_size, rows * width))


def _differentiate(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Overwrite logits (rows, V) with p - (1 - ε) [label]; sum lse - (1 - ε) z_label, and the same for ε = 0."""
    sums = logits.new_zeros(2, dtype=torch.float32)
    rows = max(1, CPU_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for z, label in zip(logits.split(rows), labels.split(rows), strict=True):
        (p, lse), chosen = softmax_and_lse(z), z.gather(1, label).float()  # chosen: z_label (rows, 1)
        plain = (lse - chosen).sum()
        sums += torch.stack([plain + smoothing * chosen.sum(), plain])
        z.copy_(p.scatter_add_(1, label, p.new_full(label.shape, smoothing - 1)))
    return sums


def softmax_and_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """p (rows, V) and lse (rows, 1) in float32, with one exponential a logit: p is exp(max - lse) at the maximum."""
    p = logits.softmax(dim=1, dtype=torch.float32)
    return p, logits.amax(dim=1, keepdim=True).float() - p.amax(dim=1, keepdim=True).log()
