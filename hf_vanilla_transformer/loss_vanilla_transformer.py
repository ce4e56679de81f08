"""The training objective of §5.4: cross-entropy per target word, with label smoothing.

Shapes: N target places, D d_model, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label that Hugging Face's collators give to padding

# Logits computed at a time, in numbers. On a CPU a chunk should stay in its cache; a GPU wants larger products.
CPU_CHUNK = 2**21
DEVICE_CHUNK = 2**26


def shift_right(labels: Tensor, start_token_id: int, pad_token_id: int) -> Tensor:
    """What the decoder reads while it learns to write `labels`: the same, one place later (§3.1).

    Args:
        labels: (B, T), -100 for padding; left as they are.

    Returns:
        (B, T): `start_token_id`, then all labels but the last, with `pad_token_id` for -100.
    """
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = start_token_id
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def translation_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy per word, against (1 - ε) for the right word plus ε / V for every word (§5.4).

    Args:
        logits: (…, V). labels: (…), of the same leading shape; -100 is not counted.
        label_smoothing: ε.
        num_items_in_batch: words of the whole update, where this batch is only a part of it (gradient accumulation,
            several processes). The sum over the parts is then the mean over all words, however they were cut.

    Returns:
        A float32 scalar; 0 where no word counts.
    """
    total = F.cross_entropy(
        logits.float().flatten(0, -2),  # (N, V)
        labels.flatten(),  # (N,)
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / _words(labels, num_items_in_batch)


def fused_translation_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """`translation_loss` of the logits `hidden_states @ weight.T + bias`, which never exist as a whole.

    At 4,096 words of a 37,000-word vocabulary the logits take 600 MB, and as much again for each of their
    derivatives; in a small model writing and reading them is most of a training step. Here they are made and
    differentiated a chunk at a time, and places whose label is -100 are left out.

    Args:
        hidden_states: (…, D). weight: (V, D). bias: (V,) or None. labels: (…).
        label_smoothing, num_items_in_batch: as in `translation_loss`.

    Returns:
        A float32 scalar, differentiable once by `hidden_states`, `weight` and `bias`.
    """
    total = _FusedCrossEntropy.apply(
        hidden_states.flatten(0, -2), weight, bias, labels.flatten(), label_smoothing, torch.is_grad_enabled()
    )
    return total / _words(labels, num_items_in_batch)


def _words(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    if num_items_in_batch is None:
        return labels.ne(IGNORED).sum().clamp(min=1)
    return num_items_in_batch.to(labels.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch


class _FusedCrossEntropy(torch.autograd.Function):
    """Sum of smoothed cross-entropies. The gradients are made in the forward pass, while a chunk's logits are there.

    With p = softmax(z), the loss of one place is  lse(z) - (1 - ε) z_right - ε mean(z),
    and its derivative by z is  p - ε / V - (1 - ε) [right].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, grad: bool
    ) -> Tensor:
        device_type, vocab_size = hidden.device.type, weight.shape[0]
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        counted = labels.ne(IGNORED).nonzero().squeeze(1)  # (N',)
        words, cast_weight = hidden[counted].to(dtype), weight.to(dtype)  # (N', D), (V, D)
        labels = labels[counted, None]  # (N', 1)
        grad_words = torch.empty_like(words, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, (CPU_CHUNK if device_type == "cpu" else DEVICE_CHUNK) // vocab_size)
        with torch.autocast(device_type, enabled=False):
            for start in range(0, len(counted), rows):
                chunk = slice(start, start + rows)
                logits = (words[chunk] @ cast_weight.T).float()  # (rows, V)
                if bias is not None:
                    logits += bias
                log_sum = logits.logsumexp(dim=1, keepdim=True)  # (rows, 1)
                right = logits.gather(1, labels[chunk])  # (rows, 1)
                total += (log_sum - (1 - smoothing) * right).sum()
                if smoothing:
                    total -= smoothing / vocab_size * logits.sum()
                if not grad:
                    continue
                grad_logits = logits.sub_(log_sum).exp_().sub_(smoothing / vocab_size)
                grad_logits.scatter_add_(1, labels[chunk], grad_logits.new_full(right.shape, smoothing - 1))
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(dim=0)
                grad_logits = grad_logits.to(dtype)
                grad_words[chunk] = grad_logits @ cast_weight
                grad_weight += grad_logits.T @ words[chunk]
        ctx.save_for_backward(counted, grad_words, grad_weight, grad_bias)
        ctx.like = hidden.shape, hidden.dtype, weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        counted, grad_words, grad_weight, grad_bias = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.like
        grad_hidden = grad_words.new_zeros(shape)  # (N, D)
        grad_hidden[counted] = grad_words * grad_total
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_total).to(weight_dtype)
        return grad_hidden.to(hidden_dtype), (grad_weight * grad_total).to(weight_dtype), grad_bias, None, None, None
