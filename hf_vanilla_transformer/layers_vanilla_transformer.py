"""Positions, layers and the two stacks of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762).

Shapes: B batch, S source length, T target length, P positions already in the cache, D d_model.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .arguments_vanilla_transformer import CACHE, check_ids, one_cache
from .attention_vanilla_transformer import VanillaTransformerAttention
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .masks_vanilla_transformer import (
    bidirectional_mask,
    causal_mask,
    padding_mask,
    segment_mask,
    segment_positions,
    token_positions,
    without_hidden,
)


def sinusoidal_positions(position_ids: Tensor, d_model: int, layout: str = "sinusoidal") -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same) (§3.5): (B, T) to (B, T, D), float32.

    A formula instead of a table: no last position, and nothing to save, move or cast. The angles are float64, because
    at position 1,000 a float32 angle is already 6e-5 off. Two layouts deviate, for weights trained with them:
    "sinusoidal_split" (Marian) has all sines before all cosines, and so has "sinusoidal_fairseq" (fairseq, FSMT,
    tensor2tensor), with exponents i / (D/2 - 1) instead of 2i / D and, if D is odd, a 0 at the end.
    """
    # MPS has no float64.
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    half = d_model // 2
    device = position_ids.device
    if layout == "sinusoidal_fairseq":
        exponents = torch.linspace(0, 1, half, dtype=dtype, device=device)  # i / (D/2 - 1)
    else:
        exponents = torch.arange(0, d_model, 2, dtype=dtype, device=device) / d_model  # 2i / D
    # (B, T, D/2), one more if D is odd.
    angles = position_ids[..., None].to(dtype) / 10000**exponents
    sines = angles.sin()
    cosines = angles[..., :half].cos()
    if layout != "sinusoidal":
        halves = torch.cat([sines, cosines], dim=-1)
        return F.pad(halves, (0, d_model - halves.shape[-1])).float()
    encoding = sines.new_empty(*position_ids.shape, d_model)
    encoding[..., 0::2] = sines
    encoding[..., 1::2] = cosines
    return encoding.float()


class VanillaTransformerLayer(GradientCheckpointingLayer):
    """Base of encoder and decoder layers: self-attention, feed-forward network and residual connection."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        heads: int,
        ffn_dim: int,
        layer_idx: int,
        is_causal: bool,
    ):
        super().__init__()
        self.layer_idx = layer_idx
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.pre_norm = config.layer_norm_position == "pre"
        self.activation = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.self_attn = VanillaTransformerAttention(
            config, heads, is_causal=is_causal, layer_idx=layer_idx
        )
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def add_and_norm(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], layer_norm: nn.LayerNorm
    ) -> Tensor:
        """LayerNorm(x + Dropout(Sublayer(x))) (§3.1, §5.4), or pre-norm: x + Dropout(Sublayer(LayerNorm(x)))."""
        if self.pre_norm:
            return dropout(sublayer(layer_norm(x)), self.dropout, self.training, residual=x)
        return layer_norm(dropout(sublayer(x), self.dropout, self.training, residual=x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (Eq. 2), (B, T, D) to (B, T, D)."""
        hidden = self.activation(self.fc1(x))  # (B, T, d_ff)
        return self.fc2(dropout(hidden, p=self.activation_dropout, training=self.training))


class VanillaTransformerEncoderLayer(VanillaTransformerLayer):
    """Self-attention and feed-forward network (§3.1)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(
            config,
            config.encoder_attention_heads,
            config.encoder_ffn_dim,
            layer_idx,
            is_causal=False,
        )

    def forward(self, x: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        x = self.add_and_norm(
            x, lambda x: self.self_attn(x, None, mask, **kwargs)[0], self.self_attn_layer_norm
        )
        return self.add_and_norm(x, self.feed_forward, self.final_layer_norm)


class VanillaTransformerDecoderLayer(VanillaTransformerLayer):
    """Masked self-attention, cross-attention and feed-forward network (§3.1). Without a source no cross-attention."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        heads = config.decoder_attention_heads
        super().__init__(config, heads, config.decoder_ffn_dim, layer_idx, is_causal=True)
        self.cross_attn = VanillaTransformerAttention(
            config, heads, is_causal=False, layer_idx=layer_idx
        )
        self.cross_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Tensor | None,
        source_mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        x = self.add_and_norm(
            x, lambda x: self.self_attn(x, None, mask, **kwargs)[0], self.self_attn_layer_norm
        )
        if source is not None:
            x = self.add_and_norm(
                x,
                lambda x: self.cross_attn(x, source, source_mask, **kwargs)[0],
                self.cross_attn_layer_norm,
            )
        return self.add_and_norm(x, self.feed_forward, self.final_layer_norm)


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """The tensor-parallel plan of a stack with these attention modules in its layers: each rank has some heads and
    feed-forward units (Shoeybi et al. 2019, arXiv 1909.08053, §3).
    """
    plan = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    for attention in attentions:
        plan |= {
            f"layers.*.{attention}.{projection}": "colwise"
            for projection in ("q_proj", "k_proj", "v_proj")
        }
        plan[f"layers.*.{attention}.out_proj"] = "rowwise"
    return plan


class VanillaTransformerLearnedPositions(nn.Embedding):
    """Table 3, row E: learned positional embeddings, up to `max_position_embeddings`."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """(B, T) to (B, T, D). Raises a ValueError for a position beyond the table."""
        remedy = f"shorten it to max_position_embeddings={self.num_embeddings} tokens, or use sinusoidal positions"
        check_ids(position_ids, self.num_embeddings, "a sequence with position_ids", remedy)
        return super().forward(position_ids)


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Weight initialisation, weight tying and the capabilities that Hugging Face reads."""

    config_class = VanillaTransformerConfig
    config: VanillaTransformerConfig
    base_model_prefix = "model"
    # of encoder and decoder. A subclass may replace them
    layer_classes: tuple[Callable, Callable] = (
        VanillaTransformerEncoderLayer,
        VanillaTransformerDecoderLayer,
    )
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = True
    supports_gradient_checkpointing = _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier with gain 1/4 for projections, N(0, d_model^-0.5) for embeddings and the output layer.

        The paper does not give it. With this deviation (tensor2tensor's), scaled embeddings are as large as positions
        and the first logits have unit variance. With this gain, sub-layers start small, and a post-LN stack learns at
        once.
        """
        output = isinstance(module, nn.Linear) and module is self.get_output_embeddings()
        if output or isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=0.25)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            init.zeros_(module.bias)

    def tied_weights(self) -> dict[str, str]:
        """Names of tied weights (§3.4), each with the name under which it is saved."""
        return {}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # Without `tie_word_embeddings` the base class ties nothing. Here the two embeddings can still be one.
        return (
            super().get_expanded_tied_weights_keys(True) if all_submodels else self.tied_weights()
        )

    def source_mask(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the caller's mask, or the `padding_mask` of the ids (B, S)."""
        if attention_mask is not None or input_ids is None:
            return attention_mask
        return padding_mask(self.config, input_ids)


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """Base of encoder and decoder: embeddings plus positions before the layers, optionally a normalisation after."""

    _fsdp_plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight"}

    def __init__(
        self, config: VanillaTransformerConfig, vocab_size: int, layer: Callable, depth: int
    ):
        config.validate_architecture()  # fields may have been set one by one
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        if config.position_encoding_type == "learned":
            self.embed_positions = VanillaTransformerLearnedPositions(
                config.max_position_embeddings, config.d_model
            )
        if config.final_layer_norm:  # other libraries look for the attribute
            self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(layer(config, i) for i in range(depth))
        self.gradient_checkpointing = False
        self.post_init()

    def look_up(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = ""
    ) -> Tensor:
        """Unscaled embeddings (B, T, D). Both inputs or neither, an empty one and an unknown id are ValueErrors."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"give exactly one of {prefix}input_ids and {prefix}inputs_embeds")
        source: Any = inputs_embeds if input_ids is None else input_ids
        name = prefix + ("inputs_embeds" if input_ids is None else "input_ids")
        if 0 in source.shape[:2]:
            raise ValueError(f"{name} of shape {tuple(source.shape)} is empty")
        if input_ids is None:
            return source
        weight = getattr(self.embed_tokens, "weight", None)  # a module of the user's may have none
        if weight is not None:
            check_ids(source, len(weight), name)
        return self.embed_tokens(source)

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Dropout(sqrt(d_model) · embedding + position) (§3.4, §3.5, §5.4), (B, T, D)."""
        length, width = inputs_embeds.shape[1:]
        is_right = position_ids.shape[-1] in (1, length) and width == self.config.d_model
        # Torch would repeat a single token or component.
        if not torch.compiler.is_compiling() and not is_right:
            raise ValueError(
                f"embeddings of shape {tuple(inputs_embeds.shape)} and position_ids of shape "
                f"{tuple(position_ids.shape)} do not fit together, or not to d_model={self.config.d_model}"
            )
        layout = self.config.position_encoding_type
        if layout == "sinusoidal_fairseq":
            # fairseq's table has padding in row `pad_token_id`, and the first token in the next one.
            position_ids = position_ids + (self.config.position_offset or 0)
        if layout == "learned":
            positions = self.embed_positions(position_ids)
        else:
            positions = sinusoidal_positions(position_ids, self.config.d_model, layout).to(
                inputs_embeds.dtype
            )
        return dropout(
            inputs_embeds * self.embed_scale + positions,
            p=self.config.dropout,
            training=self.training,
        )

    def check_mask(
        self,
        attention_mask: Tensor | None,
        expected: tuple[int, int],
        name: str,
        keys: int | None = None,
    ) -> None:
        """Raise a ValueError for a 2-d mask of another shape than `expected`, or a 4-d one not of `keys` keys."""
        if torch.compiler.is_compiling() or attention_mask is None:
            return
        shape = tuple(getattr(attention_mask, "shape", ()))
        if len(shape) not in (2, 4):
            raise ValueError(f"{name} has shape {shape}: a mask has two dimensions, or four")
        if len(shape) == 2 and shape != expected:
            raise ValueError(f"{name} has shape {shape}, but must have {expected}")
        if len(shape) == 4 and keys is not None and shape[-1] not in (1, keys):
            raise ValueError(
                f"{name} of shape {shape} is for {shape[-1]} keys, but there are {keys}: is a cache missing?"
            )


class VanillaTransformerEncoder(VanillaTransformerStack):
    """The left half of Figure 1: N layers of self-attention and feed-forward."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1),
    }
    _tp_plan = tensor_parallel_plan("self_attn")

    def __init__(
        self, config: VanillaTransformerConfig, layer: Callable = VanillaTransformerEncoderLayer
    ):
        super().__init__(config, config.vocab_size, layer, config.encoder_layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **options: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source: `last_hidden_state` (B, S, D), `hidden_states` and `attentions` on request.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for tokens and 0 for padding on any side. By default from `pad_token_id`. Or
                (B, 1, S, S), in the form that the attention's backend takes.
            inputs_embeds: (B, S, D), before scaling, instead of ids.
            position_ids: (B or 1, S), if they are not those of the tokens of `attention_mask`, or of each segment.
            segment_ids: (B, S), the number of the sentence to which each token of a packed row belongs, and 0 for
                free places. Tokens see their own segment.
        """
        inputs_embeds = self.look_up(input_ids, inputs_embeds)
        batch, length = inputs_embeds.shape[:2]
        self.check_mask(attention_mask, (batch, length), "attention_mask")
        if segment_ids is None:
            attention_mask = self.source_mask(input_ids, attention_mask)
            mask = bidirectional_mask(self.config, inputs_embeds, attention_mask)  # (B, 1, S, S)
            if position_ids is None:
                position_ids = token_positions(inputs_embeds, attention_mask)  # (B or 1, S)
        else:
            self.check_mask(segment_ids, (batch, length), "segment_ids")
            segments = without_hidden(segment_ids, attention_mask, "attention_mask")
            mask = segment_mask(self.config, segments, segments, inputs_embeds.dtype)
            if position_ids is None:
                position_ids = segment_positions(segment_ids, attention_mask)  # (B, S)
        x = self.embed(inputs_embeds, position_ids)
        for layer in self.layers:
            x = layer(x, mask, **options)
        x = self.layer_norm(x) if self.config.final_layer_norm else x
        return BaseModelOutput(last_hidden_state=x)


# Negative indices in `output_hidden_states` count from the decoder's depth, not from the config's `num_hidden_layers`.
DECODER_STATES = OutputRecorder(VanillaTransformerDecoderLayer)
DECODER_STATES.num_hidden_layers_key = "decoder_layers"


class VanillaTransformerDecoder(VanillaTransformerStack):
    """The right half of Figure 1: N layers of masked self-attention, cross-attention and feed-forward."""

    _can_record_outputs = {
        "hidden_states": DECODER_STATES,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(
            VanillaTransformerAttention, index=1, layer_name="cross_attn"
        ),
    }
    _tp_plan = tensor_parallel_plan("self_attn", "cross_attn")

    def __init__(
        self, config: VanillaTransformerConfig, layer: Callable = VanillaTransformerDecoderLayer
    ):
        super().__init__(config, config.target_vocab_size, layer, config.decoder_layers)

    def masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[Any, Any]:
        """The masks of self-attention (B, 1, T, P + T) and of attention to the source (B, 1, T, S)."""
        self_cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        mask = causal_mask(self.config, inputs_embeds, attention_mask, self_cache)
        if encoder_hidden_states is None:
            return mask, None
        return mask, bidirectional_mask(
            self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
        )

    def packed_masks(
        self,
        *,
        segment_ids: Tensor,
        attention_mask: Tensor | None,
        encoder_segment_ids: Tensor | None,
        encoder_attention_mask: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """`masks` of packed rows."""
        segments = without_hidden(segment_ids, attention_mask, "decoder_attention_mask")
        mask = segment_mask(self.config, segments, segments, dtype, causal=True)
        if encoder_segment_ids is None:
            return mask, None
        sources = without_hidden(encoder_segment_ids, encoder_attention_mask, "attention_mask")
        return mask, segment_mask(self.config, segments, sources, dtype)

    def checked_segments(
        self,
        segment_ids: Tensor | None,
        encoder_segment_ids: Tensor | None,
        expected: tuple[int, int],
        past: int,
    ) -> Tensor:
        """Return `segment_ids`. A ValueError for those of one side, of another shape, or after P tokens."""
        if segment_ids is None or (encoder_segment_ids is None and self.config.is_encoder_decoder):
            raise ValueError("segment_ids and decoder_segment_ids: give both or neither")
        self.check_mask(segment_ids, expected, "decoder_segment_ids")
        if past:
            raise ValueError(
                f"decoder_segment_ids: packed rows are for training, not for decoding after {past} tokens in a cache"
            )
        return segment_ids

    def check_cached(self, past_key_values: Cache | None) -> None:
        """Raise a ValueError if a layer has kept nothing of the tokens of which another layer has keys."""
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        if not isinstance(cache, DynamicCache):
            return
        kept = [layer.get_seq_length() for layer in cache.layers]
        kept = (kept + [0] * len(self.layers))[: len(self.layers)]
        if any(kept) and 0 in kept:
            raise ValueError(
                f"decoder.layers[{kept.index(0)}] adds no keys to past_key_values and sees the last token only: "
                "give use_cache=False, or let it update the cache"
            )

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
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target: `last_hidden_state` (B, T, D), `past_key_values`, states and attentions on request.

        Args:
            input_ids: (B, T), the tokens after those in the cache.
            attention_mask: (B, P + T), 0 for padding, needed only for padding on the left. Or (B, 1, T, P + T), in
                the form that the attention's backend takes.
            encoder_hidden_states: (B, S, D), the encoder's output. None skips cross-attention, in a model without an
                encoder only.
            encoder_attention_mask: (B, S) or (B, 1, T, S).
            past_key_values: keys and values of P earlier tokens.
            inputs_embeds: (B, T, D), before scaling, instead of ids.
            position_ids: (B or 1, T), if they are not P, P + 1 …, or those of each segment.
            use_cache: return `past_key_values` with these T tokens added.
            segment_ids, encoder_segment_ids: (B, T) and (B, S), the number of the sentence to which each token of a
                packed row belongs, and 0 for free places. Tokens see their own segment on both sides.
            cache: `past_key_values` under its name in transformers 5.24 and later.
        """
        past_key_values = one_cache(past_key_values, cache)
        inputs_embeds = self.look_up(input_ids, inputs_embeds, "decoder_")
        if self.config.is_encoder_decoder and encoder_hidden_states is None:
            raise ValueError(
                "encoder_hidden_states is missing: a translator's decoder always reads a source"
            )
        batch, length = inputs_embeds.shape[:2]
        if encoder_hidden_states is not None:
            source = batch, encoder_hidden_states.shape[1]
            self.check_mask(encoder_attention_mask, source, "attention_mask")
            self.check_mask(encoder_segment_ids, source, "segment_ids")
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes and past_key_values is not None:
            raise ValueError(
                "past_key_values does not go with gradient checkpointing: a layer that runs twice adds its keys twice"
            )
        self.check_cached(past_key_values)
        keys = length if past_key_values is None else None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
            if encoder_hidden_states is not None:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())
        past = past_key_values.get_seq_length() if past_key_values is not None else 0  # P
        self.check_mask(attention_mask, (batch, past + length), "decoder_attention_mask", keys)

        if segment_ids is None and encoder_segment_ids is None:
            # (B, 1, T, P + T) and (B, 1, T, S)
            mask, source_mask = self.masks(
                inputs_embeds,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
            )
        else:
            segment_ids = self.checked_segments(
                segment_ids, encoder_segment_ids, (batch, length), past
            )
            mask, source_mask = self.packed_masks(
                segment_ids=segment_ids,
                attention_mask=attention_mask,
                encoder_segment_ids=encoder_segment_ids,
                encoder_attention_mask=encoder_attention_mask,
                dtype=inputs_embeds.dtype,
            )
        if position_ids is None and segment_ids is not None:
            position_ids = segment_positions(segment_ids, attention_mask)  # (B, T)
        elif position_ids is None:
            static = getattr(past_key_values, "is_compileable", False)
            # (B or 1, T)
            position_ids = token_positions(inputs_embeds, attention_mask, past, static)
        x = self.embed(inputs_embeds, position_ids)
        for index, layer in enumerate(self.layers):
            # A cache knows layers by their places. Users remove, move and share them.
            moved = getattr(layer, "layer_idx", index) != index
            place = {"layer_idx": index} if moved else {}
            x = layer(
                x,
                encoder_hidden_states,
                mask,
                source_mask,
                past_key_values=past_key_values,
                **place,
                **kwargs,
            )
        x = self.layer_norm(x) if self.config.final_layer_norm else x
        returned = {CACHE: past_key_values if use_cache else None}
        return BaseModelOutputWithPastAndCrossAttentions(x, **returned)


# Faster training on a CPU


def dropout(x: Tensor, p: float, training: bool, residual: Tensor | None = None) -> Tensor:
    """Dropout(x), plus `residual` of the same shape. On a CPU with cheaper random numbers and a temporary tensor less.

    There torch draws 64 random bits for each number, on one core: a sixth of a small model's training step. 16 bits
    are enough: p is rounded to a multiple of 2^-16, and the scale is exactly that of the rounded p.
    """
    if not training or p <= 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        dropped = F.dropout(x, p=p, training=training)
        return dropped if residual is None else residual + dropped
    threshold = min(round(p * 2**16), 2**16 - 1)
    # Four draws in each.
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device).random_(
        -(2**63), None
    )
    kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= threshold - 2**15
    scale = 2**16 / (2**16 - threshold)
    return x * kept * scale if residual is None else torch.add(residual, x * kept, alpha=scale)
