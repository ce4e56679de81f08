"""The formulas and layers of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762), whose section,
equation and table numbers are cited.

Shapes: B batch, S source length, T target length, P positions already in the cache, K = P + T keys, D d_model,
H heads, d_k and d_v the widths of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vanilla_transformer import VanillaTransformerConfig


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions (B, S) that count tokens only; padding gets the position of the token before it, or 0.

    The mask is (B, S), 1 for a token and 0 for padding on any side; or (B, 1, S, K), prepared by `generate` for a
    static cache, where True or 0.0 marks a visible key.
    """
    if attention_mask.ndim == 4:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (visible[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def sinusoidal_positions(position_ids: Tensor, d_model: int, layout: str = "sinusoidal") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (§3.5): (B, T) to (B, T, D), float32.

    A formula instead of a table: no last position, and nothing to save, move or cast. The angles are float64, because
    at position 1,000 a float32 angle is already 6e-5 off. Positions start at 0.

    `layout` is one of the sinusoidal `POSITION_ENCODING_TYPES`. Two deviate, for weights that were trained with them:
    "sinusoidal_split" (Marian) has all sines before all cosines, and so has "sinusoidal_fairseq" (fairseq, FSMT,
    tensor2tensor), with exponents i / (D/2 - 1) instead of 2i / D and, where D is odd, a 0 at the end.
    """
    # MPS devices have no float64.
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    half, device = d_model // 2, position_ids.device
    if layout == "sinusoidal_fairseq":
        exponents = torch.linspace(0, 1, half, dtype=dtype, device=device)  # i / (D/2 - 1)
    else:
        exponents = torch.arange(0, d_model, 2, dtype=dtype, device=device) / d_model  # 2i / D
    angles = position_ids[..., None].to(dtype) / 10000**exponents  # (B, T, D/2); §3.5 has one more where D is odd
    sines, cosines = angles.sin(), angles[..., :half].cos()
    if layout != "sinusoidal":
        halves = torch.cat([sines, cosines], dim=-1)
        return F.pad(halves, (0, d_model - halves.shape[-1])).float()
    encoding = sines.new_empty(*position_ids.shape, d_model)
    encoding[..., 0::2] = sines
    encoding[..., 1::2] = cosines
    return encoding.float()


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

    The reference for every faster backend in `ALL_ATTENTION_FUNCTIONS`, and the one that returns the weights
    (B, H, T, K) with the output (B, T, H, d_v).

    Args:
        query: (B, H, T, d_k). key: (B, H, K, d_k). value: (B, H, K, d_v).
        attention_mask: (B, 1, T, K), added to the scores: 0, or the lowest finite number at masked keys.
        scaling: 1 / sqrt(d_k). dropout: probability, on the weights while `module` is in training mode.
    """
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, K)
    if attention_mask is not None:
        # In float32: the lowest float16 plus a score overflows, and softmax of a row of -inf is NaN.
        scores = scores.float() + attention_mask
    weights = F.dropout(scores.softmax(dim=-1).to(value.dtype), p=dropout, training=module.training)
    output = weights @ value  # (B, H, T, d_v)
    return output.transpose(1, 2).contiguous(), weights


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention: Concat(head_1 … head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (§3.2.2)."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim or config.d_model // num_heads  # d_k
        self.value_head_dim = config.value_head_dim or config.d_model // num_heads  # d_v
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.is_causal, self.layer_idx = is_causal, layer_idx
        self.q_proj = nn.Linear(config.d_model, num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.value_head_dim, bias=config.attention_bias)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, config.d_model, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `hidden_states` (B, T, D) to themselves, or to `key_value_states` (B, S, D).

        Returns the output (B, T, D) and the weights (B, H, T, K or S), None from a backend without them.
        """
        hidden_states = cast_once(hidden_states)
        query = self._split_heads(self.q_proj(hidden_states), self.head_dim)  # (B, H, T, d_k)
        if key_value_states is None:
            key, value = self._project(hidden_states)
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)  # (B, H, K, ·)
        else:
            key, value = self._project_source(key_value_states, past_key_values)  # (B, H, S, ·)

        backend = self.config._attn_implementation
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        if self.training and query.device.type == "cpu" and query.dtype == torch.bfloat16:
            attend = partial(attend_in_float32, attend)
        p = self.dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=p, **kwargs)
        return self.out_proj(output.flatten(2)), weights  # (B, T, H, d_v) -> (B, T, H * d_v) -> (B, T, D)

    def _split_heads(self, projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, T, H * width) -> (B, H, T, width)

    def _project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        states = cast_once(states)
        key = self._split_heads(self.k_proj(states), self.head_dim)
        value = self._split_heads(self.v_proj(states), self.value_head_dim)
        return key, value

    def _project_source(self, source: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source; computed at the first decoding step, then taken from the cache."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self._project(source)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        past_key_values.is_updated[self.layer_idx] = True
        return cache.update(*self._project(source), self.layer_idx)


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """Base of encoder and decoder layers: self-attention, feed-forward network and residual connection."""

    def __init__(self, config: VanillaTransformerConfig, heads: int, ffn_dim: int, layer_idx: int, is_causal: bool):
        super().__init__()
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.pre_norm = config.layer_norm_position == "pre"
        self.activation = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.self_attn = VanillaTransformerAttention(config, heads, is_causal=is_causal, layer_idx=layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def add_and_norm(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], layer_norm: nn.LayerNorm) -> Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))) (§3.1, §5.4), or pre-norm: x + Dropout(Sublayer(LayerNorm(x)))."""
        if self.pre_norm:
            return add_dropout(x, sublayer(layer_norm(x)), p=self.dropout, training=self.training)
        return layer_norm(add_dropout(x, sublayer(x), p=self.dropout, training=self.training))

    def feed_forward(self, x: Tensor) -> Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (Eq. 2), (B, T, D) to (B, T, D)."""
        hidden = self.activation(self.fc1(x))  # (B, T, d_ff)
        return self.fc2(dropout(hidden, p=self.activation_dropout, training=self.training))


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.encoder_attention_heads, config.encoder_ffn_dim, layer_idx, is_causal=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        def self_attention(x: Tensor) -> Tensor:
            return self.self_attn(x, attention_mask=attention_mask, **kwargs)[0]

        x = self.add_and_norm(x, self_attention, self.self_attn_layer_norm)
        return self.add_and_norm(x, self.feed_forward, self.final_layer_norm)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        heads = config.decoder_attention_heads
        super().__init__(config, heads, config.decoder_ffn_dim, layer_idx, is_causal=True)
        self.cross_attn = VanillaTransformerAttention(config, heads, is_causal=False, layer_idx=layer_idx)
        self.cross_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, x: Tensor, source: Tensor, attention_mask: Tensor | None, source_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        def self_attention(x: Tensor) -> Tensor:
            return self.self_attn(x, attention_mask=attention_mask, **kwargs)[0]

        def cross_attention(x: Tensor) -> Tensor:
            return self.cross_attn(x, source, attention_mask=source_mask, **kwargs)[0]

        x = self.add_and_norm(x, self_attention, self.self_attn_layer_norm)
        x = self.add_and_norm(x, cross_attention, self.cross_attn_layer_norm)
        return self.add_and_norm(x, self.feed_forward, self.final_layer_norm)


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """The `transformers` tensor-parallel plan of a stack whose layers have these attention modules: each rank holds
    some heads and feed-forward units (Shoeybi et al. 2019, arXiv 1909.08053, §3).
    """
    plan = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    for attention in attentions:
        plan |= {f"layers.*.{attention}.{projection}": "colwise" for projection in ("q_proj", "k_proj", "v_proj")}
        plan[f"layers.*.{attention}.out_proj"] = "rowwise"
    return plan


class VanillaTransformerLearnedPositions(nn.Embedding):
    """Table 3, row E: learned positional embeddings, up to `max_position_embeddings`."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """(B, T) to (B, T, D); a ValueError for a position beyond the table."""
        # Reading the values would synchronise a GPU and break a compiled graph; there torch's own check must do.
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            last = int(position_ids.max())
            if last >= self.num_embeddings:
                raise ValueError(
                    f"a sequence of {last + 1} tokens is longer than max_position_embeddings={self.num_embeddings}; "
                    f"shorten it, or use sinusoidal positions, which have no limit"
                )
        return super().forward(position_ids)


# Faster training on a CPU


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`, with cheaper random numbers on a CPU."""
    kept, scale = _draw_mask(x, p, training)
    return F.dropout(x, p=p, training=training) if kept is None else x * kept * scale


def add_dropout(x: Tensor, y: Tensor, p: float, training: bool) -> Tensor:
    """x + Dropout(y), all of one shape; on a CPU with one temporary tensor instead of two."""
    kept, scale = _draw_mask(y, p, training)
    return x + F.dropout(y, p=p, training=training) if kept is None else torch.add(x, y * kept, alpha=scale)


def _draw_mask(x: Tensor, p: float, training: bool) -> tuple[Tensor | None, float]:
    """Dropout's mask, True for what is kept, and the scale of what is kept; None where torch is to draw the mask.

    On a CPU torch draws 64 random bits for each number, on one core: a sixth of a small model's training step. 16 bits
    are enough: p is rounded to a multiple of 2^-16, and the scale is exactly that of the rounded p.
    """
    if not training or p <= 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return None, 1.0
    dropped = min(round(p * 2**16), 2**16 - 1)  # of 2^16
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # four draws in each
    draws = bits.view(torch.int16)[: x.numel()].view(x.shape)
    return draws >= dropped - 2**15, 2**16 / (2**16 - dropped)


def cast_once(x: Tensor) -> Tensor:
    """`x` in the dtype of autocast, which would cast it again for each projection and keep every copy for backward."""
    device_type, traced = x.device.type, torch.compiler.is_compiling()  # torch 2.9 cannot trace the next function
    if x.dtype != torch.float32 or not (traced or torch.amp.is_autocast_available(device_type)):
        return x
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def attend_in_float32(
    attend: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`attend` for training in bfloat16 on a CPU, where torch's backward kernel is 15 times as slow as in float32."""
    with torch.autocast("cpu", enabled=False):
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        output, weights = attend(module, query.float(), key.float(), value.float(), mask, **kwargs)
    return output.to(query.dtype), weights
