"""Multi-head attention (§3.2 of "Attention Is All You Need", Vaswani et al. 2017, arXiv 1706.03762).

Shapes: B batch, S source length, T target length, P positions already in the cache, K = P + T keys, D d_model,
H heads, d_k and d_v the widths of a head.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .arguments_vanilla_transformer import check_unread, one_cache
from .configuration_vanilla_transformer import VanillaTransformerConfig


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V (Eq. 1), for all heads at once.

    The reference for every faster backend in `ALL_ATTENTION_FUNCTIONS`. `query` (B, H, T, d_k), `key` (B, H, K, d_k)
    and `value` (B, H, K, d_v) give the output (B, T, H, d_v) and the weights (B, H, T, K). `attention_mask`
    (B, 1, T, K) is added to the scores: 0, or the lowest finite number at masked keys. A Boolean one is True at
    visible keys. `scaling` is 1 / sqrt(d_k).
    """
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, K)
    if attention_mask is not None:
        # At least in float32: the lowest float16 plus a score overflows, and softmax of a row of -inf is NaN.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = F.dropout(scores.softmax(dim=-1).to(value.dtype), p=dropout, training=module.training)
    output = weights @ value  # (B, H, T, d_v)
    return output.transpose(1, 2).contiguous(), weights


# The kernels of torch's scaled dot-product attention


@torch.compiler.assume_constant_result
def other_kernels() -> list[SDPBackend]:
    """The enabled kernels beside cuDNN's. None if that is not enabled."""
    flags = torch.backends.cuda
    if not flags.cudnn_sdp_enabled():
        return []
    others = {
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: flags.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: flags.math_sdp_enabled(),
    }
    return [kernel for kernel, enabled in others.items() if enabled]


class _WithoutCudnn(AbstractContextManager[None]):
    """Leaves cuDNN's attention out. The flag belongs to the process: the first thread to enter sets it, and the last
    one to leave restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.restores = False

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                # Without another kernel the caller has asked for cuDNN.
                self.restores = bool(other_kernels())
                if self.restores:
                    torch.backends.cuda.enable_cudnn_sdp(False)
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.restores and not self.inside:
                torch.backends.cuda.enable_cudnn_sdp(True)


_WITHOUT_CUDNN = _WithoutCudnn()


def attention_kernels(choice: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention on a GPU does not use cuDNN. It restores torch's settings at its end.

    On Hopper and newer cards torch (2.11 and later) prefers cuDNN, which builds a plan for each new shape, in about a
    tenth of a second. Sentences have hundreds of shapes. The backward pass follows the choice of the forward pass.

    Args:
        choice: `attention_kernels` of the configuration. "auto" leaves cuDNN out, "torch" changes nothing.
        device: of the tensors. On a CPU nothing changes.
    """
    if device.type == "cpu" or choice == "torch":
        return nullcontext()
    if not torch.compiler.is_compiling():
        return _WITHOUT_CUDNN
    # The compiler knows this context, and no locks.
    others = other_kernels()
    return sdpa_kernel(others) if others else nullcontext()


def split_heads(projected: Tensor, width: int) -> Tensor:
    # (B, T, H * width) -> (B, H, T, width).
    return projected.unflatten(-1, (-1, width)).transpose(1, 2)


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention: Concat(head_1 … head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (§3.2.2)."""

    def __init__(
        self, config: VanillaTransformerConfig, num_heads: int, is_causal: bool, layer_idx: int
    ):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim or config.d_model // num_heads  # d_k
        self.value_head_dim = config.value_head_dim or config.d_model // num_heads  # d_v
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        linear = partial(nn.Linear, bias=config.attention_bias)
        self.q_proj = linear(config.d_model, num_heads * self.head_dim)
        self.k_proj = linear(config.d_model, num_heads * self.head_dim)
        self.v_proj = linear(config.d_model, num_heads * self.value_head_dim)
        self.out_proj = linear(num_heads * self.value_head_dim, config.d_model)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, T, D) and weights (B, H, T, K or S), None from some backends, of attention of `hidden_states`
        (B, T, D) to themselves, or to `key_value_states` (B, S, D). `layer_idx` replaces that of the constructor."""
        backend = self.config._attn_implementation
        check_unread(kwargs, backend)
        past_key_values = one_cache(past_key_values, cache)
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        hidden_states = cast_once(hidden_states)
        if key_value_states is None:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            query, key, value = self.project(hidden_states, projections)
            key, value = self.split_keys_and_values(key, value)
            self_cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            if self_cache is not None:
                key, value = self_cache.update(key, value, layer_idx)  # (B, H, K, ·)
        else:
            query = self.q_proj(hidden_states)
            # (B, H, S, ·)
            key, value = self._project_source(key_value_states, past_key_values, layer_idx)
        query = split_heads(query, self.head_dim)  # (B, H, T, d_k)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        is_slow = query.device.type == "cpu" and query.dtype == torch.bfloat16
        if self.training and is_slow and has_no_weights(attend):
            attend = partial(attend_in_float32, attend)
        p = self.dropout if self.training else 0.0
        with attention_kernels(self.config.attention_kernels, query.device):
            output, weights = attend(
                self, query, key, value, attention_mask, scaling=self.scaling, dropout=p, **kwargs
            )
        # (B, T, H, d_v) -> (B, T, H * d_v) -> (B, T, D).
        return self.out_proj(output.flatten(2)), weights

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, K, d_k) and values (B, H, K, d_v) of states (B, K, D)."""
        key, value = self.project(cast_once(states), (self.k_proj, self.v_proj))
        return self.split_keys_and_values(key, value)

    def split_keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(key, self.head_dim), split_heads(value, self.value_head_dim)

    def project(self, states: Tensor, projections: Sequence[nn.Module]) -> Sequence[Tensor]:
        """The outputs of projections of the same states (B, T, D). Training on a GPU by one product."""
        linear = [each for each in projections if is_plain_linear(each)]
        if not self.training or states.device.type == "cpu" or len(linear) < len(projections):
            return [projection(states) for projection in projections]
        return joint_product(states, linear)

    def _project_source(
        self, source: Tensor, past_key_values: Cache | None, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, computed at the first decoding step, then taken from the cache."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self.keys_and_values(source)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(layer_idx):
            return cache.layers[layer_idx].keys, cache.layers[layer_idx].values
        past_key_values.is_updated[layer_idx] = True
        return cache.update(*self.keys_and_values(source), layer_idx)


# Faster training


def joint_product(states: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """The outputs of linear layers for the same states (B, T, D).

    On a GPU three products and their gradients are 17 kernels. The joint one is 8.
    """
    weight = torch.cat([each.weight for each in layers])  # (all outputs, D)
    outputs = F.linear(states, weight, joint_bias(layers))  # (B, T, all outputs)
    return outputs.split([len(each.weight) for each in layers], dim=-1)


def joint_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of linear layers side by side, zeros for a layer without one. None if no layer has one."""
    if all(each.bias is None for each in layers):
        return None
    return torch.cat(
        [
            each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias
            for each in layers
        ]
    )


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True if a call is `F.linear` alone: without hooks, adapter, quantization, and sharded or offloaded weights."""
    return type(module) is nn.Linear and "forward" not in vars(module) and not hooks_of(module)


# The attributes in which `torch.nn.Module` keeps the hooks of a call, for example of pruning
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that a call of a module runs: its own, and those of all modules."""
    of_all = vars(nn.modules.module)
    kinds = [vars(module)[name] for name in _HOOKS] + [of_all[f"_global{name}"] for name in _HOOKS]
    return [hook for hooks in kinds for hook in hooks.values()]


def cast_once(x: Tensor) -> Tensor:
    """`x` in the dtype of autocast. Otherwise each projection would cast it again and keep the copy for backward."""
    device_type = x.device.type
    traced = torch.compiler.is_compiling()  # torch 2.9 cannot trace the next function
    if x.dtype != torch.float32 or not (traced or torch.amp.is_autocast_available(device_type)):
        return x
    return (
        x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
    )


def has_no_weights(attend: Callable) -> bool:
    """True for the eager attention and those of transformers. One of a user may have weights in the model's dtype."""
    home = getattr(attend, "__module__", None) or ""
    return attend is eager_attention_forward or home.startswith("transformers.")


def attend_in_float32(
    attend: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attend` for training in bfloat16 on a CPU, where torch's backward kernel is 15 times as slow as in float32."""
    with torch.autocast("cpu", enabled=False):
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        output, weights = attend(module, query.float(), key.float(), value.float(), mask, **kwargs)
    return output.to(query.dtype), weights
