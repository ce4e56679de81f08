"""The training objective of §5.4: cross-entropy per target token, with label smoothing.

Shapes: N target positions, N' of them with a label, n positions in a chunk, P passes over a batch, D d_model, V target
vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import Seq2SeqLMOutput

IGNORED = -100  # the label that Hugging Face's collators give to padding

# Logits per chunk, at most. Each chunk accumulates a (V, D) gradient. With a few times D positions that is negligible,
# and larger chunks only overflow the CPU's cache. In half precision the product needs a temporary tensor, so
# that larger chunks pay.
CPU_CHUNK = 2**23
CPU_ROWS = 4  # logits, and positions times D
CPU_HALF_CHUNK = 2**25
CPU_HALF_ROWS = 8
DEVICE_CHUNK = 2**27
# positions of a chunk are a multiple of it: oneDNN compiles and keeps kernels for every shape of a product
ROW_UNIT = 64
# Logits that are differentiated at once: on a CPU they should stay in a core's cache.
CPU_CACHE = 2**19

#: Overwrites the logits (P, n, V) of a chunk with the derivatives of the loss by them. It gets the labels (n, 1), the
#: chunk's positions among the N, as numbers (n,) or as a slice, and weights (n, 1): 0 for a position that does not
#: count, whose derivative is 0, or None if all count. It returns two sums over the chunk: the loss and a value for the
#: log.
Differentiate: TypeAlias = Callable[[Tensor, Tensor, Tensor | slice, Tensor | None], Tensor]


def shift_right(labels: Tensor, start_token_id: int, pad_token_id: int) -> Tensor:
    """The decoder's input (§3.1) for labels (B, T): `start_token_id`, then all but the last, with padding for -100."""
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = start_token_id
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def translation_loss(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Cross-entropy per token, against (1 - ε) for the label plus ε / V for every token (§5.4): a float32 scalar.

    Args:
        logits: (…, V). labels: (…). -100 is not counted, and without any other the loss is 0. label_smoothing: ε.
        num_items_in_batch: tokens of the whole update, if this batch is only a part of it (gradient accumulation,
            several processes). The parts then add up to the mean over all tokens, however they were split.
    """
    logits = logits.float().flatten(0, -2)
    targets = labels.flatten()  # (N, V), (N,)
    total = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return total / target_tokens(labels, num_items_in_batch)


def fused_translation_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """`translation_loss` of the logits `hidden_states @ weight.T + bias`, without keeping them all in memory.

    For 4,096 tokens and a vocabulary of 37,000 the logits take 600 MB, and each derivative as much again. They are
    computed and differentiated chunk by chunk. On a CPU the positions that have the label -100 are left out. Elsewhere
    and under torch.compile they stay with the weight 0, so that the host does not wait for their number, and one graph
    serves all batches of a shape.

    `torch.nn.functional.linear_cross_entropy` has chunks and smoothing as well, but exists only from torch 2.13 on,
    covers one pass over a batch, and returns no loss without smoothing.

    Args:
        hidden_states: (…, D). weight: (V, D). bias: (V,) or None. labels: (…).

    Returns:
        A float32 scalar, differentiable once by the first three, and the same without smoothing and gradient.
    """
    hidden = hidden_states.flatten(0, -2)[None]  # (1, N, D)
    differentiate = partial(_differentiate, smoothing=label_smoothing)
    total, plain = fused_objective(
        hidden, weight, bias, labels.flatten(), differentiate, uniform=(label_smoothing,)
    )
    tokens = target_tokens(labels, num_items_in_batch)
    return total / tokens, plain / tokens


def translation_losses(
    states: Tensor,
    logits: Tensor | None,
    lm_head: nn.Linear,
    labels: Tensor,
    smoothing: float,
    num_items: Any = None,
) -> tuple[Tensor, Tensor]:
    """The loss of states (B, T, D) to train on, and the same without smoothing. Fused if there are no logits."""
    if logits is None:
        return fused_translation_loss(
            states, lm_head.weight, lm_head.bias, labels, smoothing, num_items
        )
    loss = translation_loss(logits, labels, smoothing, num_items)
    if not smoothing:
        return loss, loss.detach().clone()  # `Trainer` multiplies its loss in place
    return loss, translation_loss(logits.detach(), labels, 0.0, num_items)


def fused_objective(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    differentiate: Differentiate,
    uniform: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """(loss, logged value), summed over labelled positions. Only the loss has a gradient, of first order.

    The loss is the first sum of `differentiate` and -Σ u_i mean(z_i), which needs no logits: mean(z) is
    h · mean(W) + mean(b).

    Args:
        hidden_states: (P, N, D). weight: (V, D). bias: (V,) or None. labels: (N,), -100 for padding.
        uniform: u (P,), the weight that label smoothing gives to all tokens alike in each pass: ε times the weight of
            the pass's cross-entropy.

    Raises:
        ValueError: N is another number in the labels.
    """
    if hidden_states.shape[1] != len(labels):
        raise ValueError(
            f"labels have {len(labels)} places, but the inputs of the decoder {hidden_states.shape[1]}: "
            "pad both alike"
        )
    with_gradients = torch.is_grad_enabled()
    loss, logged, *_ = _FusedObjective.apply(
        hidden_states, weight, bias, labels, differentiate, tuple(uniform), with_gradients
    )
    return loss, logged


def target_tokens(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    """The tokens of an update, those of `labels` by default. 1 if it has none: its loss, a sum, is 0."""
    if num_items_in_batch is None:
        num_items_in_batch = labels.ne(IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(1, num_items_in_batch)


class _FusedObjective(torch.autograd.Function):
    """`forward` computes the gradients too, while the logits of a chunk exist."""

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
        dtype = (
            torch.get_autocast_dtype(device_type)
            if torch.is_autocast_enabled(device_type)
            else weight.dtype
        )
        with torch.autocast(device_type, enabled=False):
            return _losses_and_gradients(
                hidden=hidden,
                weight=weight,
                bias=bias,
                labels=labels,
                differentiate=differentiate,
                uniform=uniform,
                grad=grad,
                dtype=dtype,
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        # `torch.func` wants a separate context, and saved tensors among the outputs.
        hidden, weight, *_ = inputs
        _, logged, counted, *gradients = output
        constants = [logged]
        if counted is not None:
            constants.append(counted)
        if torch.compiler.is_compiling():
            # Elsewhere a derivative of a gradient is an error of `backward`.
            constants += [gradient for gradient in gradients if gradient is not None]
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(counted, *gradients)
        ctx.hidden_shape = hidden.shape
        ctx.hidden_dtype = hidden.dtype
        ctx.weight_dtype = weight.dtype

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        is_second = any(gradient is not None for gradient in second)
        if is_second and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this loss has no second derivatives; for those call the model with skip_logits=False"
            )
        counted, grad_tokens, grad_weight, grad_bias = ctx.saved_tensors
        if counted is None:
            grad_hidden = grad_tokens * grad_total  # (P, N, D)
        else:
            grad_hidden = grad_tokens.new_zeros(ctx.hidden_shape)
            grad_hidden[:, counted] = grad_tokens * grad_total
        grad_weight = (grad_weight * grad_total).to(ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_total).to(ctx.weight_dtype)
        return grad_hidden.to(ctx.hidden_dtype), grad_weight, grad_bias, None, None, None, None


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    differentiate: Differentiate,
    uniform: tuple[float, ...],
    grad: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Compute the outputs of `_FusedObjective`: two sums, the positions that have gradients, and the gradients.

    On a CPU, only the N' positions with a label are computed, in one buffer for all chunks. On other devices and under
    torch.compile, all positions are computed, and those without a label have the weight 0. All shapes then follow from
    those of the arguments, without a wait of the host. The positions returned are None.
    """
    passes = len(hidden)
    vocab_size = len(weight)
    device_type = hidden.device.type
    is_label = labels.ne(IGNORED)  # (N,)
    counted = None
    weights = None
    if device_type == "cpu" and not torch.compiler.is_compiling():
        counted = is_label.nonzero().squeeze(1)  # (N',)
        targets = labels[counted, None]  # (N', 1)
        # (P, N' rounded up, D)
        tokens = F.pad(hidden[:, counted].to(dtype), (0, 0, 0, -len(counted) % ROW_UNIT))
    else:
        weights = is_label.float()[:, None]  # (N, 1)
        targets = labels.masked_fill(~is_label, 0)[:, None]  # (N, 1)
        tokens = hidden.to(dtype)  # (P, N, D)
    cast_weight = weight.to(dtype)  # (V, D)
    cast_bias = None if bias is None else bias.to(dtype)  # (V,)

    # The terms of mean(z), and their derivatives by weight and bias.
    mean_weight = weight.mean(dim=0, dtype=torch.float32)  # (D,)
    smoothed = tokens if weights is None else tokens * weights
    by_pass = smoothed.sum(dim=1, dtype=torch.float32)  # (P, D)
    sum_tokens = torch.stack([u * each for u, each in zip(uniform, by_pass, strict=True)]).sum(0)
    total = -(sum_tokens @ mean_weight)
    grad_bias = None
    if bias is not None:
        count = sum(uniform) * is_label.sum(dtype=torch.float32)
        total = total - count * bias.float().mean()
        grad_bias = (count / -vocab_size).repeat(vocab_size)  # (V,)
    sums = torch.stack([total, torch.zeros_like(total)])
    grad_tokens: Any = torch.empty_like(tokens, dtype=torch.float32) if grad else None
    # (V, D)
    grad_weight: Any = (sum_tokens / -vocab_size).repeat(vocab_size, 1) if grad else None

    rows = max(1, rows_per_chunk(weight.shape, device_type, dtype) // passes)
    buffer = None
    product = None
    if counted is None:
        chunks = -(-len(targets) // rows)
        rows = -(-len(targets) // chunks)  # the same for all chunks but the last
        rows += -rows % ROW_UNIT  # products of odd sizes take slower kernels
    else:
        # One buffer for all chunks: fresh memory, mapped page by page, costs a third of this loss's time.
        buffer = tokens.new_empty(min(rows, tokens.shape[1]) * passes, vocab_size)  # (P rows, V)
        if grad and dtype != torch.float32:
            product = torch.empty_like(cast_weight)  # (V, D)
    for start in range(0, len(targets), rows):
        chunk = slice(start, start + rows)
        states = tokens[:, chunk].flatten(0, 1)  # (P n, D)
        out = None if buffer is None else buffer[: len(states)]
        if cast_bias is None:
            flat = torch.mm(states, cast_weight.T, out=out)  # (P n, V)
        else:
            flat = torch.addmm(cast_bias, states, cast_weight.T, out=out)
        logits = flat.unflatten(0, (passes, -1))  # (P, n, V)
        chunk_targets = targets[chunk]  # (n, 1), without those of the rounding
        positions = chunk if counted is None else counted[chunk]
        chunk_weights = None if weights is None else weights[chunk]
        chunk_logits = logits[:, : len(chunk_targets)]
        sums = sums + differentiate(chunk_logits, chunk_targets, positions, chunk_weights)
        if counted is not None:
            logits[:, len(chunk_targets) :] = 0
        if not grad:
            continue
        grad_tokens[:, chunk] = logits @ cast_weight  # (P, n, D)
        if dtype == torch.float32:
            grad_weight.addmm_(flat.T, states)  # (V, D) from (V, P n), (P n, D)
        else:
            grad_weight += torch.mm(flat.T, states, out=product)
        if grad_bias is not None:
            grad_bias += flat.sum(dim=0, dtype=torch.float32)
    if grad:
        grad_tokens = grad_tokens[:, : len(targets)]
        share = mean_weight if weights is None else weights * mean_weight  # (D,) or (N, D)
        for u, each in zip(uniform, grad_tokens, strict=True):
            each.sub_(share, alpha=u)
    return sums[0].clone(), sums[1].clone(), counted, grad_tokens, grad_weight, grad_bias


def rows_per_chunk(weight: torch.Size, device_type: str, dtype: torch.dtype) -> int:
    """Positions per chunk for a `weight` of shape (V, D)."""
    vocab_size, width = weight
    if device_type != "cpu":
        return max(1, DEVICE_CHUNK // vocab_size)
    chunk, rows = (
        (CPU_CHUNK, CPU_ROWS) if dtype == torch.float32 else (CPU_HALF_CHUNK, CPU_HALF_ROWS)
    )
    return max(1, min(chunk // vocab_size, rows * width))


def _differentiate(
    logits: Tensor,
    labels: Tensor,
    positions: Tensor | slice,
    weights: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Overwrite logits (1, n, V) with p - (1 - ε) [label]. Return the cross-entropies with smoothing and without.

    With p = softmax(z), the loss of one position is  lse(z) - (1 - ε) z_label - ε mean(z),  and its derivative by z is
    p - (1 - ε) [label] - ε / V.  `fused_objective` adds the terms of mean(z).
    """
    sums = torch.zeros(2, device=logits.device)
    for rows in cache_sized_parts(logits, CPU_CACHE):
        z = logits[0, rows]
        p, lse = softmax_and_lse(z)  # (rows, V), (rows, 1)
        some = None if weights is None else weights[rows]
        smoothed, plain = cross_entropy_into(p, 1.0, z, lse, labels[rows], smoothing)  # (rows, 1)
        sums = sums + torch.stack([weighted_sum(smoothed, some), weighted_sum(plain, some)])
        z.copy_(p if some is None else p.mul_(some))
    return sums


def cache_sized_parts(logits: Tensor, cache: int) -> list[slice]:
    """Split the positions of logits (P, n, V): on a CPU so that a pass has at most `cache` logits in a part."""
    _, positions, vocab_size = logits.shape
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(0, positions)]
    rows = max(1, cache // vocab_size)
    return [slice(start, start + rows) for start in range(0, positions, rows)]


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of values (n, 1), each times its weight if there are weights (n, 1)."""
    return values.sum() if weights is None else (values * weights).sum()


def cross_entropy_into(
    derivative: Tensor, weight: float, logits: Tensor, lse: Tensor, labels: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Subtract weight (1 - ε) [label] from a derivative (n, V) that has weight · p already.

    `logits` are (n, V), `lse` of their rows and `labels` (n, 1). Return the smoothed and the plain cross-entropy of
    each row (n, 1), without the weight and the term of mean(z).
    """
    chosen = logits.gather(1, labels).float()  # z_label (n, 1)
    plain = lse - chosen
    if torch.compiler.is_compiling():
        # The comparison is fused. A scatter needs the whole derivative in memory.
        is_label = torch.arange(logits.shape[1], device=logits.device) == labels
        derivative.sub_(is_label * (weight * (1 - smoothing)))
    else:
        step = derivative.new_full(labels.shape, weight * (smoothing - 1))
        derivative.scatter_add_(1, labels, step)
    return plain + smoothing * chosen, plain


def softmax_and_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """p (rows, V) and lse (rows, 1) in float32, with one exponential a logit: p is exp(max - lse) at the maximum."""
    p = logits.softmax(dim=1, dtype=torch.float32)
    return p, logits.amax(dim=1, keepdim=True).float() - p.amax(dim=1, keepdim=True).log()


# Outputs of a training step


class KeptTensors(torch.autograd.Function):
    """Saves tensors as autograd does: reading them after a write to one of them raises a RuntimeError."""

    @staticmethod
    def forward(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return states.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        return None, None, None


class UnreadLogits:
    """Logits (B, T, V) of a training step that are computed if somebody reads them. The fused loss does not.

    `VanillaTransformerTrainingOutput` computes them at the first access, and so does access to an attribute of a
    tensor. `dtype` and `float()` are for accelerate, and convert the outputs of a step in half precision to float32
    without computing them.
    """

    def __init__(self, states: Tensor, lm_head: nn.Linear):
        kind = states.device.type
        enabled = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        self.autocast: dict[str, Any] = {"device_type": kind, "enabled": enabled, "dtype": dtype}
        self.dtype = dtype if enabled else lm_head.weight.dtype
        self.kept: Any = KeptTensors.apply(states, lm_head.weight, lm_head.bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read() if "kept" in vars(self) else None, name)

    def float(self) -> "UnreadLogits":
        self.dtype = torch.float32
        return self

    def read(self) -> Tensor:
        try:
            states, weight, bias = self.kept.grad_fn.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "logits: the weights have changed since the forward pass; read outputs.logits before "
                "optimizer.step(), or call the model with skip_logits=False"
            ) from error
        # The first reader may compute a metric without gradients, and a later one a loss.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(**self.autocast):
            return F.linear(states, weight, bias).to(self.dtype)


@dataclass
class VanillaTransformerOutput(Seq2SeqLMOutput):
    """`Seq2SeqLMOutput`, and while training the loss without smoothing: `nll_loss`, a scalar without a gradient."""

    nll_loss: Tensor | None = None


@dataclass
class VanillaTransformerTrainingOutput(VanillaTransformerOutput):
    """An output with `UnreadLogits`, computed at the first access by name, key, index or `items()`.

    A separate class, because torch.compile cannot trace one that intercepts access. `values()` computes nothing:
    DistributedDataParallel reads them.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, UnreadLogits):
            value = value.read()
            setattr(self, name, value)
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return getattr(self, key) if key in self else super().__getitem__(key)
        names = list(self)[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    def items(self) -> Any:
        is_small = getattr(vars(self)["logits"], "dtype", None) in (torch.float16, torch.bfloat16)
        # accelerate converts small ones through this
        return super().items() if is_small else {name: self[name] for name in self}.items()
