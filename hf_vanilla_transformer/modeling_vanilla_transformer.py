"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762), bottom-up.

Formulas first (positions, attention, loss), then the sub-layers, the layers, the two stacks, and the models that
Hugging Face's Auto classes load. Sections, equations and tables are the paper's.

Shapes: B batch, S source length, T target length, P positions already in the cache, K = P + T keys,
D d_model, H heads, d_k and d_v the widths of a head, V target vocabulary.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import paper_generation_config, paper_max_new_tokens
from .loss_vanilla_transformer import fused_translation_loss, translation_loss

# ---------------------------------------------------------------------------------------------------------------------
# Formulas
# ---------------------------------------------------------------------------------------------------------------------


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Number the words of each sentence 0, 1, 2 …, wherever its padding stands.

    Args:
        attention_mask: (B, S); 1 for a word, 0 for padding.

    Returns:
        Positions (B, S); a padding before the first word gets 0, one after a word repeats that word's number.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def sinusoidal_positions(position_ids: Tensor, d_model: int, split: bool = False) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (§3.5).

    A formula instead of a table: it has no last position, and nothing to save, move or cast. The angles are computed
    in float64, because at position 1,000 a float32 angle is already 6e-5 off.

    Args:
        position_ids: (B, T), 0-based.
        d_model: width D; where odd, there is one sine more than cosines.
        split: all sines before all cosines, instead of in turn.

    Returns:
        Encodings (B, T, D), float32.
    """
    # MPS devices have no float64.
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    even = torch.arange(0, d_model, 2, dtype=dtype, device=position_ids.device)  # 2i
    angles = position_ids[..., None].to(dtype) / 10000 ** (even / d_model)  # (B, T, ceil(D/2))
    sines, cosines = angles.sin(), angles[..., : d_model // 2].cos()
    if split:
        return torch.cat([sines, cosines], dim=-1).float()
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
        scores = scores + attention_mask
    weights = F.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    output = weights @ value  # (B, H, T, d_v)
    return output.transpose(1, 2).contiguous(), weights


def _in_float32(attend: Callable) -> Callable:
    """Attention for training in bfloat16 on a CPU, where torch's kernel is 15 times slower backwards than in float32."""

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
    """`torch.nn.functional.dropout`, with cheaper random numbers on a CPU.

    torch draws 64 random bits for each number there, on one core, which is a sixth of a small model's training step.
    16 bits are enough: p becomes a multiple of 2^-16, and what is kept is scaled by exactly its share.
    """
    if not training or p == 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p=p, training=training)
    dropped = round(p * 2**16)  # of 2^16
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # four draws of 16 bits each
    draws = words.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (draws >= dropped - 2**15) * (2**16 / (2**16 - dropped))


def shift_right(labels: Tensor, start_token_id: int, pad_token_id: int) -> Tensor:
    """What the decoder reads while it learns to write `labels`: the same, one place later (§3.1).

    Args:
        labels: (B, T), -100 for padding; left as they are.

    Returns:
        (B, T): `start_token_id`, then all labels but the last, with `pad_token_id` for -100.
    """
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = start_token_id
    return shifted.masked_fill(shifted == -100, pad_token_id)


# ---------------------------------------------------------------------------------------------------------------------
# Sub-layers and layers
# ---------------------------------------------------------------------------------------------------------------------


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
        return layer_norm(x + dropout(sublayer_of_x, p=self.dropout, training=self.training))

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
        attended, _ = self.cross_attn(
            x, source, attention_mask=source_mask, past_key_values=past_key_values, **kwargs
        )
        x = self.add_and_norm(x, attended, self.cross_attn_layer_norm)
        # 3. feed-forward
        return self.add_and_norm(x, self.feed_forward(x), self.final_layer_norm)


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


# ---------------------------------------------------------------------------------------------------------------------
# Stacks
# ---------------------------------------------------------------------------------------------------------------------


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Weight initialisation, tying and what Hugging Face must know of every model here."""

    config_class = VanillaTransformerConfig
    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier for projections, N(0, d_model^-0.5) for embeddings.

        The paper is silent; these are the values of its own code (tensor2tensor). The embeddings, multiplied by
        sqrt(d_model), then have the same size as the positions, and logits start with unit variance.
        """
        std = self.config.d_model**-0.5
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.Linear):
            if module is self.get_output_embeddings():
                init.normal_(module.weight, mean=0.0, std=std)
            else:
                init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def tied_weights(self) -> dict[str, str]:
        """The weights of this model that are one and the same (§3.4), each with the one that is saved."""
        return {}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # The base class ties nothing where `tie_word_embeddings` is off; here the two embeddings may still be one.
        return super().get_expanded_tied_weights_keys(True) if all_submodels else self.tied_weights()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([[4, 5, 6, 2], [7, 8, 2, 1]], device=self.device)
        return {"input_ids": ids, "attention_mask": ids.ne(1), "decoder_input_ids": ids}


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embeddings plus positions at the bottom, perhaps a normalisation on top."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        if config.position_encoding_type == "learned":
            self.embed_positions = VanillaTransformerLearnedPositions(config.max_position_embeddings, config.d_model)
        if config.final_layer_norm:
            self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False

    def look_up(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
        """Token embeddings (B, T, D) before scaling, or those that the caller brings.

        Raises:
            ValueError: both or neither given, an empty batch, an id outside the vocabulary.
        """
        names = f"{prefix}input_ids", f"{prefix}inputs_embeds"
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"give exactly one of {names[0]} and {names[1]}")
        given = input_ids if input_ids is not None else inputs_embeds
        if 0 in given.shape[:2]:
            raise ValueError(f"{names[input_ids is None]} of shape {tuple(given.shape)} is empty")
        if input_ids is None:
            return inputs_embeds
        # Looking at the values would stop a GPU and break a compiled graph; there torch's own check has to do.
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(extreme) for extreme in input_ids.aminmax())
            if low < 0 or high >= self.embed_tokens.num_embeddings:
                raise ValueError(
                    f"{names[0]} holds {low if low < 0 else high}, but the vocabulary ends at "
                    f"{self.embed_tokens.num_embeddings - 1}; was it made by another tokenizer?"
                )
        return self.embed_tokens(input_ids)

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Dropout(sqrt(d_model) · embedding + position) (§3.4, §3.5, §5.4), (B, T, D)."""
        if self.config.position_encoding_type == "learned":
            positions = self.embed_positions(position_ids)
        else:
            split = self.config.position_encoding_type == "sinusoidal_split"
            positions = sinusoidal_positions(position_ids, self.config.d_model, split).to(inputs_embeds.dtype)
        return dropout(inputs_embeds * self.embed_scale + positions, p=self.config.dropout, training=self.training)

    def check_mask(self, attention_mask: Tensor | None, expected: tuple[int, int], name: str) -> None:
        """Raise a ValueError for a (B, K) mask of another shape; a prepared (B, 1, T, K) mask is the caller's."""
        if attention_mask is None or attention_mask.ndim != 2 or torch.compiler.is_compiling():
            return
        if tuple(attention_mask.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(attention_mask.shape)}, but must have {expected}")


class VanillaTransformerEncoder(VanillaTransformerStack):
    """The left half of Figure 1: N layers of self-attention and feed-forward."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList(VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Read the source.

        Args:
            input_ids: (B, S). inputs_embeds: (B, S, D), before scaling, instead of ids.
            attention_mask: (B, S), 1 for words and 0 for padding on any side; made from the pad token where missing.

        Returns:
            `last_hidden_state` (B, S, D); `hidden_states` and `attentions` when asked for.
        """
        inputs_embeds = self.look_up(input_ids, inputs_embeds)
        self.check_mask(attention_mask, tuple(inputs_embeds.shape[:2]), "attention_mask")
        attention_mask = default_source_mask(self.config, input_ids, attention_mask)
        if attention_mask is not None and attention_mask.ndim == 2:
            position_ids = positions_from_mask(attention_mask)  # (B, S)
        else:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]  # (1, S)

        hidden_states = self.embed(inputs_embeds, position_ids)
        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)  # (B, 1, S, S)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        if self.config.final_layer_norm:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VanillaTransformerDecoder(VanillaTransformerStack):
    """The right half of Figure 1: N layers of masked self-attention, cross-attention and feed-forward."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.decoder_vocab_size)
        self.layers = nn.ModuleList(VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Write the target.

        Args:
            input_ids: (B, T), the words after those in the cache. inputs_embeds: (B, T, D), before scaling.
            attention_mask: (B, P + T), 0 for padding; needed only for padding before the first word, since no word
                sees a later one.
            encoder_hidden_states: (B, S, D), what the encoder returned. encoder_attention_mask: (B, S).
            past_key_values: keys and values of the P words before. use_cache: return them with these T added.

        Returns:
            `last_hidden_state` (B, T, D), `past_key_values`; `hidden_states`, `attentions`, `cross_attentions`
            when asked for.
        """
        inputs_embeds = self.look_up(input_ids, inputs_embeds, "decoder_")
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states is missing: this decoder always reads a source")
        batch, length = inputs_embeds.shape[:2]
        self.check_mask(encoder_attention_mask, tuple(encoder_hidden_states.shape[:2]), "attention_mask")
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past = past_key_values.get_seq_length() if past_key_values is not None else 0  # P
        self.check_mask(attention_mask, (batch, past + length), "decoder_attention_mask")

        if attention_mask is not None and attention_mask.ndim == 2:
            position_ids = positions_from_mask(attention_mask)[:, -length:]  # (B, T)
        else:
            position_ids = (torch.arange(length, device=inputs_embeds.device) + past)[None]  # (1, T)
        hidden_states = self.embed(inputs_embeds, position_ids)
        mask = create_causal_mask(
            self.config,
            inputs_embeds,
            attention_mask,
            getattr(past_key_values, "self_attention_cache", past_key_values),
        )  # (B, 1, T, K)
        source_mask = create_bidirectional_mask(
            self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
        )  # (B, 1, T, S)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, encoder_hidden_states, mask, source_mask, past_key_values=past_key_values, **kwargs
            )
        if self.config.final_layer_norm:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )


def default_source_mask(
    config: VanillaTransformerConfig, input_ids: Tensor | None, attention_mask: Tensor | None
) -> Tensor | None:
    """The caller's mask; where there is none, 1 for every id (B, S) that is not the pad token."""
    if attention_mask is None and input_ids is not None and config.pad_token_id is not None:
        return input_ids.ne(config.pad_token_id).long()
    return attention_mask


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without an output layer (`AutoModel`)."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self._tied_weights_keys = self.tied_weights()
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def tied_weights(self) -> dict[str, str]:
        if not self.config.share_encoder_decoder_embeddings:
            return {}
        return {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Read the source, or take what was read (`encoder_outputs`), and write the target.

        Args and returns: those of the two stacks; `attention_mask` (B, S) serves both.
        """
        attention_mask = default_source_mask(self.config, input_ids, attention_mask)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs.last_hidden_state,
            attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, GenerationMixin):
    """The whole of Figure 1: the model that translates (`AutoModelForSeq2SeqLM`)."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self._tied_weights_keys = self.tied_weights()
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=config.lm_head_bias)
        self.post_init()
        self.generation_config = paper_generation_config(config)

    def tied_weights(self) -> dict[str, str]:
        shared, tied = self.config.share_encoder_decoder_embeddings, self.config.tie_word_embeddings
        source, target, output = (
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        )
        pairs = {target: source} if shared else {}
        if tied:
            pairs[output] = source if shared else target
        return pairs

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the number of source words; of all words, where source and target share their embeddings.

        Args and returns: those of `PreTrainedModel.resize_token_embeddings`.
        """
        if self.config.share_encoder_decoder_embeddings:
            embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.config.decoder_vocab_size = self.config.vocab_size
            return embeddings
        old = self.get_input_embeddings()
        new = self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.set_input_embeddings(new)
        self.config.vocab_size = new.num_embeddings
        return new

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the number of target words, where the target has a vocabulary of its own.

        Args and returns: those of `PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: source and target share their embeddings.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("share_encoder_decoder_embeddings=True: call resize_token_embeddings, it resizes both")
        decoder = self.model.decoder
        new = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder.embed_tokens = new
        self.lm_head = self._get_resized_lm_head(self.lm_head, new.num_embeddings, mean_resizing=mean_resizing)
        self.config.decoder_vocab_size = new.num_embeddings
        self.tie_weights()
        return new

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Score every target word, and compare with `labels` where given.

        Args:
            labels: (B, T), -100 for padding; the decoder reads them shifted right, unless it is given other inputs.
            num_items_in_batch: target words of the whole update (`Trainer` passes it); see `translation_loss`.
            skip_logits: compute the loss without the (B, T, V) logits, in a fraction of their time and memory. None
                means: while training. Without labels, and with an output layer that an adapter has changed, there
                are always logits.
            The others: as in the two stacks.

        Returns:
            `loss` (with label smoothing only while training), `logits` (B, T, V) or None, and what the stacks return.

        Raises:
            ValueError: nothing tells the decoder what to read.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError(
                    "the decoder has nothing to read: give labels, decoder_input_ids or decoder_inputs_embeds; with "
                    "Trainer's own label_smoothing_factor use DataCollatorForSeq2Seq(tokenizer, model=model), or "
                    "better the label_smoothing of the configuration"
                )
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        logits = None
        if labels is None or not self._can_skip_logits(skip_logits):
            logits = self.lm_head(outputs.last_hidden_state)  # (B, T, V)
        loss = None
        if labels is not None:
            loss = self._loss(outputs.last_hidden_state, logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _can_skip_logits(self, wanted: bool | None) -> bool:
        plain = type(self.lm_head) is nn.Linear  # an adapter or a quantised layer computes something else
        wanted = self.training if wanted is None else wanted
        return wanted and plain and not torch.compiler.is_compiling()

    def _loss(
        self, hidden_states: Tensor, logits: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        smoothing = self.config.label_smoothing if self.training else 0.0
        labels = labels.to(hidden_states.device)
        if logits is not None:
            return translation_loss(logits, labels, smoothing, num_items_in_batch)
        weight, bias = self.lm_head.weight, self.lm_head.bias
        return fused_translation_loss(hidden_states, weight, bias, labels, smoothing, num_items_in_batch)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """`labels` (B, T) shifted right; `DataCollatorForSeq2Seq(tokenizer, model=model)` calls this."""
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    @torch.no_grad()
    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Translate: `GenerationMixin.generate`, whose default length is the paper's, source + 50 (§6.1).

        A length that the caller gives, or that the model's generation config has, wins.
        """
        kwargs.update(paper_max_new_tokens(generation_config or self.generation_config, inputs, kwargs))
        return super().generate(inputs, generation_config, **kwargs)


class VanillaTransformerEncoderModel(VanillaTransformerPreTrainedModel):
    """The encoder alone (`AutoModelForTextEncoding`); loads from the checkpoint of a whole translator."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        config = copy.deepcopy(config)  # the caller's may serve a translator too
        config.is_encoder_decoder = False
        config.use_cache = False
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Args and returns: those of `VanillaTransformerEncoder`."""
        return self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)


class VanillaTransformerForSequenceClassification(VanillaTransformerPreTrainedModel):
    """The encoder, the mean of its words, and one linear layer (`AutoModelForSequenceClassification`).

    Not in the paper. The encoder loads from the checkpoint of a whole translator.
    """

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]
    # The mean is over sentences: `Trainer` must divide by its accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = VanillaTransformerEncoderModel(config)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify sentences.

        Args:
            input_ids, attention_mask, inputs_embeds: those of the encoder.
            labels: (B,) classes, (B, L) zeros and ones for several at once, or (B,) numbers for a regression;
                which of them, `config.problem_type` says, or their type where it is None.

        Returns:
            `loss` where labels are given, `logits` (B, L).
        """
        attention_mask = default_source_mask(self.config, input_ids, attention_mask)
        outputs = self.model(input_ids, attention_mask, inputs_embeds, **kwargs)
        words = outputs.last_hidden_state  # (B, S, D)
        if attention_mask is None:
            mean = words.mean(dim=1)
        else:
            counted = attention_mask[..., None].to(words.dtype)  # (B, S, 1)
            mean = (words * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        logits = self.classifier(dropout(mean, p=self.config.dropout, training=self.training))  # (B, L)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
