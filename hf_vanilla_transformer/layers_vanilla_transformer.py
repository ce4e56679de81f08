"""The formulas of the paper and the layers made of them (Vaswani et al. 2017, arXiv 1706.03762), bottom-up.

Positions, attention and dropout as functions; then multi-head attention; then the two kinds of layer of Figure 1.
Sections, equations and tables are the paper's.

Shapes: B batch, S source length, T target length, P positions already in the cache, K = P + T keys,
D d_model, H heads, d_k and d_v the widths of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vanilla_transformer import VanillaTransformerConfig

# Formulas


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Number the words of each sentence 0, 1, 2 …, wherever its padding stands.

    Args:
        attention_mask: (B, S); 1 for a word, 0 for padding.

    Returns:
        Positions (B, S); a padding before the first word gets 0, one after a word repeats that word's number.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def positions_from_prepared_mask(attention_mask: Tensor) -> Tensor:
    """Number words by how many they see, where `generate` has made the mask of a cache of fixed size already.

    Args:
        attention_mask: (B, 1, T, K); True, or 0 where it is to be added to scores, for what a word sees: the words
            before it and itself.

    Returns:
        Positions (B, T).
    """
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    return (seen[:, 0].sum(dim=-1) - 1).clamp(min=0)


def sinusoidal_positions(position_ids: Tensor, d_model: int, layout: str = "sinusoidal") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (§3.5).

    A formula instead of a table: it has no last position, and nothing to save, move or cast. The angles are computed
    in float64, because at position 1,000 a float32 angle is already 6e-5 off.

    Two layouts deviate from §3.5, for weights that were trained with them: "sinusoidal_split" (Marian) has all sines
    before all cosines. So has "sinusoidal_fairseq" (fairseq, FSMT, tensor2tensor), with exponents i / (D/2 - 1) in
    place of 2i / D, and a 0 in the last place where D is odd.

    Args:
        position_ids: (B, T), 0-based in §3.5.
        d_model: width D; where odd, §3.5 has one sine more than cosines.
        layout: one of the sinusoidal `POSITION_ENCODING_TYPES`.

    Returns:
        Encodings (B, T, D), float32.
    """
    # MPS devices have no float64.
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    half, device = d_model // 2, position_ids.device
    if layout == "sinusoidal_fairseq":
        exponents = torch.linspace(0, 1, half, dtype=dtype, device=device)  # i / (D/2 - 1)
    else:
        exponents = torch.arange(0, d_model, 2, dtype=dtype, device=device) / d_model  # 2i / D
    angles = position_ids[..., None].to(dtype) / 10000**exponents  # (B, T, D/2), rounded up in §3.5
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

    The oracle of every faster backend in `ALL_ATTENTION_FUNCTIONS`, and the one that can return its weights.

    Args:
        module: asked for `training`.
        query: (B, H, T, d_k). key: (B, H, K, d_k). value: (B, H, K, d_v).
        attention_mask: (B, 1, T, K), added to the scores; the lowest finite number where T must not see K.
        scaling: 1 / sqrt(d_k).
        dropout: on the weights, a probability.

    Returns:
        Output (B, T, H, d_v) and weights (B, H, T, K).
    """
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, K)
    if attention_mask is not None:
        # In float32: the lowest float16 and a score have no finite sum, and a row of minus infinities no softmax.
        scores = scores.float() + attention_mask
    weights = F.dropout(scores.softmax(dim=-1).to(value.dtype), p=dropout, training=module.training)
    output = weights @ value  # (B, H, T, d_v)
    return output.transpose(1, 2).contiguous(), weights


def _in_float32(attend: Callable) -> Callable:
    """Attention for training in bfloat16 on a CPU: backwards, torch's kernel takes 15 times as long as in float32."""

    def attend_in_float32(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", enabled=False):
            if attention_mask is not None and attention_mask.is_floating_point():
                attention_mask = attention_mask.float()
            output, weights = attend(module, query.float(), key.float(), value.float(), attention_mask, **kwargs)
            return output.to(query.dtype), weights

    return attend_in_float32


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`, with cheaper random numbers on a CPU."""
    if not _draws_itself(x, p, training):
        return F.dropout(x, p=p, training=training)
    kept, scale = _draw_kept(x, p)
    return x * kept * scale


def add_dropout(x: Tensor, y: Tensor, p: float, training: bool) -> Tensor:
    """x + Dropout(y), all of one shape; on a CPU with one tensor in between, where there would be two."""
    if not _draws_itself(y, p, training):
        return x + F.dropout(y, p=p, training=training)
    kept, scale = _draw_kept(y, p)
    return torch.add(x, y * kept, alpha=scale)


def _draws_itself(x: Tensor, p: float, training: bool) -> bool:
    return training and p > 0.0 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _draw_kept(x: Tensor, p: float) -> tuple[Tensor, float]:
    """What dropout keeps of x: True or False for each number, and the factor that makes up for the rest.

    torch draws 64 random bits for each number on a CPU, on one core, which is a sixth of a small model's training
    step. 16 bits are enough: p becomes a multiple of 2^-16, and what is kept is scaled by exactly its share.
    """
    dropped = min(round(p * 2**16), 2**16 - 1)  # of 2^16
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # four draws of 16 bits each
    draws = words.view(torch.int16)[: x.numel()].view(x.shape)
    return draws >= dropped - 2**15, 2**16 / (2**16 - dropped)


def cast_once(x: Tensor) -> Tensor:
    """`x` as autocast wants it for products. It would cast it anew for each, and keep each copy for the gradients."""
    device_type = x.device.type
    available = x.dtype == torch.float32 and torch.amp.is_autocast_available(device_type)
    if not available or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


# Sub-layers and layers


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention: Concat(head_1 … head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (§3.2.2)."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, is_causal: bool, layer_idx: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim or config.d_model // num_heads  # d_k
        self.value_head_dim = config.value_head_dim or config.d_model // num_heads  # d_v
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.is_causal = is_causal
        self.layer_idx = layer_idx
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
        """Attend from `hidden_states` (B, T, D) to themselves, or to `key_value_states` (B, S, D) where given.

        Returns:
            Output (B, T, D) and weights (B, H, T, K or S), None from a backend that has none.
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

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if self.training and query.device.type == "cpu" and query.dtype == torch.bfloat16:
            attend = _in_float32(attend)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.out_proj(output.flatten(2)), weights  # (B, T, H, d_v) -> (B, T, H * d_v) -> (B, T, D)

    def _split_heads(self, projected: Tensor, width: int) -> Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, T, H * width) -> (B, H, T, width)

    def _project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        states = cast_once(states)
        key = self._split_heads(self.k_proj(states), self.head_dim)
        value = self._split_heads(self.v_proj(states), self.value_head_dim)
        return key, value

    def _project_source(self, source: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source: computed at the first decoding step, then taken from the cache."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self._project(source)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        past_key_values.is_updated[self.layer_idx] = True
        return cache.update(*self._project(source), self.layer_idx)


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: the residual connection and the feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def add_and_norm(self, x: Tensor, sublayer_of_x: Tensor, layer_norm: nn.LayerNorm) -> Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))), around every sub-layer (§3.1, §5.4). All (B, T, D)."""
        return layer_norm(add_dropout(x, sublayer_of_x, p=self.dropout, training=self.training))

    def feed_forward(self, x: Tensor) -> Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (Eq. 2), (B, T, D) to (B, T, D)."""
        hidden = self.activation(self.fc1(x))  # (B, T, d_ff)
        return self.fc2(dropout(hidden, p=self.activation_dropout, training=self.training))


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = VanillaTransformerAttention(
            config, config.encoder_attention_heads, is_causal=False, layer_idx=layer_idx
        )
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        # 1. self-attention
        attended, _ = self.self_attn(x, attention_mask=attention_mask, **kwargs)
        x = self.add_and_norm(x, attended, self.self_attn_layer_norm)
        # 2. feed-forward
        return self.add_and_norm(x, self.feed_forward(x), self.final_layer_norm)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config, config.decoder_ffn_dim)
        heads = config.decoder_attention_heads
        self.self_attn = VanillaTransformerAttention(config, heads, is_causal=True, layer_idx=layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.cross_attn = VanillaTransformerAttention(config, heads, is_causal=False, layer_idx=layer_idx)
        self.cross_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        attention_mask: Tensor | None,
        source_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        # 1. masked self-attention
        attended, _ = self.self_attn(x, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)
        x = self.add_and_norm(x, attended, self.self_attn_layer_norm)
        # 2. cross-attention
        attended, _ = self.cross_attn(x, source, attention_mask=source_mask, past_key_values=past_key_values, **kwargs)
        x = self.add_and_norm(x, attended, self.cross_attn_layer_norm)
        # 3. feed-forward
        return self.add_and_norm(x, self.feed_forward(x), self.final_layer_norm)


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """How several processes share the layers of a stack (Shoeybi et al. 2019, arXiv 1909.08053, §3).

    Each has some of the heads and some of the feed-forward units: it has their rows of the first matrices and their
    columns of the last one, whose products are then summed.

    Args:
        attentions: the attention sub-layers of a layer.

    Returns:
        A style of `transformers` for every matrix.
    """
    plan = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    for attention in attentions:
        for projection in ("q_proj", "k_proj", "v_proj"):
            plan[f"layers.*.{attention}.{projection}"] = "colwise"
        plan[f"layers.*.{attention}.out_proj"] = "rowwise"
    return plan


class VanillaTransformerLearnedPositions(nn.Embedding):
    """Table 3, row E: positional embeddings that are learned, and so end at `max_position_embeddings`."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """(B, T) to (B, T, D); a position past the table is a ValueError."""
        # Looking at the values would stop a GPU and break a compiled graph; there torch's own check has to do.
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            last = int(position_ids.max())
            if last >= self.num_embeddings:
                raise ValueError(
                    f"a sequence of {last + 1} tokens is longer than max_position_embeddings={self.num_embeddings}; "
                    f"shorten it, or use sinusoidal positions, which have no limit"
                )
        return super().forward(position_ids)
