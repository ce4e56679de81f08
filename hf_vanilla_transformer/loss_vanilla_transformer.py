"""The training objective of §5.4: cross-entropy per target word, with label smoothing.

Shapes: N target places, D d_model, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label that Hugging Face's collators give to padding

# Logits computed at a time, in numbers. A chunk of n places writes n V of them and adds V D to the gradient of the
# matrix. With a few times D places the sum costs little, and on a CPU more of them only leave its cache; in half
# precision the product is made apart before it is added in full, which costs more.
CPU_CHUNK = 2**23
CPU_HALF_CHUNK = 2**25
CPU_PLACES = 4  # times D
CPU_HALF_PLACES = 8
DEVICE_CHUNK = 2**26
# Of them, those that are looked at together; on a CPU they should stay in the cache of a core.
CPU_CACHE = 2**19


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


def plain_loss(
    loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """What `loss`, the `translation_loss` of the rest, would be without smoothing; for the log, without a gradient."""
    if not label_smoothing:
        return loss.detach().clone()  # `Trainer` multiplies its loss in place
    with torch.no_grad():
        return translation_loss(logits, labels, 0.0, num_items_in_batch)


def fused_translation_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """`translation_loss` of the logits `hidden_states @ weight.T + bias`, which never exist as a whole.

    At 4,096 words of a 37,000-word vocabulary the logits take 600 MB, and as much again for each of their
    derivatives; in a small model writing and reading them is most of a training step. Here they are made and
    differentiated a chunk at a time, and places whose label is -100 are left out.

    Args:
        hidden_states: (…, D). weight: (V, D). bias: (V,) or None. labels: (…).
        label_smoothing, num_items_in_batch: as in `translation_loss`.

    Returns:
        A float32 scalar, differentiable once by `hidden_states`, `weight` and `bias`; and without a gradient, the
        same without smoothing.
    """
    total, plain = _FusedCrossEntropy.apply(
        hidden_states.flatten(0, -2), weight, bias, labels.flatten(), label_smoothing, torch.is_grad_enabled()
    )
    words = _words(labels, num_items_in_batch)
    return total / words, plain / words


def _words(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    if num_items_in_batch is None:
        return labels.ne(IGNORED).sum().clamp(min=1)
    return num_items_in_batch.to(labels.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch


class _FusedCrossEntropy(torch.autograd.Function):
    """Sums of the cross-entropies, smoothed and plain. The gradients are made in the forward pass, while a chunk's
    logits are there.

    With p = softmax(z), the loss of one place is  lse(z) - (1 - ε) z_right - ε mean(z),
    and its derivative by z is  p - (1 - ε) [right] - ε / V.
    Of these, mean(z) = h · mean(W) + mean(b) and its derivatives need no logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, grad: bool
    ) -> tuple[Tensor, Tensor]:
        device_type, vocab_size = hidden.device.type, weight.shape[0]
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        counted = labels.ne(IGNORED).nonzero().squeeze(1)  # (N',)
        words, cast_weight = hidden[counted].to(dtype), weight.to(dtype)  # (N', D), (V, D)
        cast_bias = None if bias is None else bias.to(dtype)  # (V,)
        labels = labels[counted, None]  # (N', 1)
        with torch.autocast(device_type, enabled=False):
            mean_weight, sum_words = weight.mean(dim=0, dtype=torch.float32), words.sum(dim=0, dtype=torch.float32)
            total = -smoothing * (sum_words @ mean_weight)
            plain = torch.zeros_like(total)
            if bias is not None:
                total -= smoothing * len(counted) * bias.float().mean()
            grad_words: Any = None
            grad_weight: Any = None
            grad_bias: Any = None
            if grad:
                grad_words = torch.empty_like(words, dtype=torch.float32)
                grad_weight = (sum_words * (-smoothing / vocab_size)).repeat(vocab_size, 1)  # (V, D)
                if bias is not None:
                    grad_bias = sum_words.new_full((vocab_size,), -smoothing / vocab_size * len(counted))
            rows = _rows_of_a_chunk(weight.shape, device_type, dtype)
            # Room that all chunks share: a system gives fresh memory page by page, in a third of this loss's time.
            room = words.new_empty(min(rows, len(words)), vocab_size)  # (rows, V)
            product = torch.empty_like(cast_weight) if grad and dtype != torch.float32 else None  # (V, D)
            for start in range(0, len(words), rows):
                chunk = slice(start, start + rows)
                logits = room[: len(words) - start]  # (rows, V), the last chunk fewer
                if cast_bias is None:
                    torch.mm(words[chunk], cast_weight.T, out=logits)
                else:
                    torch.addmm(cast_bias, words[chunk], cast_weight.T, out=logits)
                losses = _differentiate(logits, labels[chunk], smoothing)
                total += losses[0]
                plain += losses[1]
                if not grad:
                    continue
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0, dtype=torch.float32)
                grad_words[chunk] = logits @ cast_weight
                if product is None:
                    grad_weight.addmm_(logits.T, words[chunk])
                else:
                    grad_weight += torch.mm(logits.T, words[chunk], out=product)
            if grad:
                grad_words -= smoothing * mean_weight
        ctx.save_for_backward(counted, grad_words, grad_weight, grad_bias)
        ctx.like = hidden.shape, hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        counted, grad_words, grad_weight, grad_bias = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.like
        grad_hidden = grad_words.new_zeros(shape)  # (N, D)
        grad_hidden[counted] = grad_words * grad_total
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_total).to(weight_dtype)
        return grad_hidden.to(hidden_dtype), (grad_weight * grad_total).to(weight_dtype), grad_bias, None, None, None


def _rows_of_a_chunk(matrix: torch.Size, device_type: str, dtype: torch.dtype) -> int:
    """Places whose logits are made together, for a matrix (V, D)."""
    vocab_size, width = matrix
    if device_type != "cpu":
        return max(1, DEVICE_CHUNK // vocab_size)
    chunk, places = (CPU_CHUNK, CPU_PLACES) if dtype == torch.float32 else (CPU_HALF_CHUNK, CPU_HALF_PLACES)
    return max(1, min(chunk // vocab_size, places * width))


def _differentiate(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Put p - (1 - ε) [right] in the place of the logits (rows, V), and sum  lse - (1 - ε) z_right  over the rows.

    Returns:
        The sum, and the same for ε = 0.
    """
    sums = logits.new_zeros(2, dtype=torch.float32)
    rows = max(1, CPU_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for z, label in zip(logits.split(rows), labels.split(rows), strict=True):
        right = z.gather(1, label).float()  # (rows, 1)
        log_p = z.log_softmax(dim=1, dtype=torch.float32)  # (rows, V), z - lse(z)
        plain = -log_p.gather(1, label).sum()
        sums += torch.stack([plain + smoothing * right.sum(), plain])
        z.copy_(log_p.exp_().scatter_add_(1, label, log_p.new_full(label.shape, smoothing - 1)))
    return sums[0], sums[1]
