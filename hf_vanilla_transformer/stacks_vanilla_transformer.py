"""Encoder and decoder, the two stacks of Figure 1 (Vaswani et al. 2017, arXiv 1706.03762, whose sections are cited).

Shapes: B batch, S source length, T target length, P positions already in the cache, D d_model.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers_vanilla_transformer import (
    VanillaTransformerAttention,
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
    VanillaTransformerLearnedPositions,
    dropout,
    positions_from_mask,
    sinusoidal_positions,
    tensor_parallel_plan,
)


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Weight initialisation, weight tying and the capabilities that Hugging Face reads."""

    config_class = VanillaTransformerConfig
    config: VanillaTransformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = True
    supports_gradient_checkpointing = _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier with gain 1/4 for projections, N(0, d_model^-0.5) for embeddings and the output layer.

        The paper does not give it. With this standard deviation (tensor2tensor's), scaled embeddings are as large as
        positions and the first logits have unit variance. The gain is this package's: with sub-layers that start small
        beside the residual path a post-LN stack learns at once.
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
        # Without `tie_word_embeddings` the base class ties nothing; here the two embeddings can still be one.
        return super().get_expanded_tied_weights_keys(True) if all_submodels else self.tied_weights()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([[4, 5, 6, 2], [7, 8, 2, 1]], device=self.device)
        return {"input_ids": ids, "attention_mask": ids.ne(1), "decoder_input_ids": ids}


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """Base of encoder and decoder: embeddings plus positions before the layers, optionally a normalisation after."""

    _fsdp_plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight"}

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layer: Callable, depth: int):
        config.validate_architecture()  # fields may have been set one by one
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        if config.position_encoding_type == "learned":
            self.embed_positions = VanillaTransformerLearnedPositions(config.max_position_embeddings, config.d_model)
        if config.final_layer_norm:
            self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(layer(config, i) for i in range(depth))
        self.gradient_checkpointing = False
        self.post_init()

    def look_up(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
        """Unscaled embeddings (B, T, D); both inputs or neither, an empty one or an unknown id is a ValueError."""
        given = inputs_embeds if input_ids is None else input_ids
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError(f"give exactly one of {prefix}input_ids and {prefix}inputs_embeds")
        name = f"{prefix}inputs_embeds" if input_ids is None else f"{prefix}input_ids"
        if 0 in given.shape[:2]:
            raise ValueError(f"{name} of shape {tuple(given.shape)} is empty")
        if input_ids is None:
            return given
        check_ids(input_ids, self.embed_tokens.weight.shape[0], name)
        return self.embed_tokens(input_ids)

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Dropout(sqrt(d_model) · embedding + position) (§3.4, §3.5, §5.4), (B, T, D)."""
        layout = self.config.position_encoding_type
        if layout == "sinusoidal_fairseq":
            # fairseq's table has padding in row `pad_token_id`, and the first token in the next one.
            position_ids = position_ids + 1 + (self.config.pad_token_id or 0)
        if layout == "learned":
            positions = self.embed_positions(position_ids)
        else:
            positions = sinusoidal_positions(position_ids, self.config.d_model, layout).to(inputs_embeds.dtype)
        return dropout(inputs_embeds * self.embed_scale + positions, p=self.config.dropout, training=self.training)

    def check_mask(self, attention_mask: Tensor | None, expected: tuple[int, int], name: str) -> None:
        """Raise a ValueError for a 2-d mask whose shape is not `expected`; 4-d masks are not checked."""
        if attention_mask is None or len(attention_mask.shape) != 2 or torch.compiler.is_compiling():
            return
        if tuple(attention_mask.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(attention_mask.shape)}, but must have {expected}")


class VanillaTransformerEncoder(VanillaTransformerStack):
    """The left half of Figure 1: N layers of self-attention and feed-forward."""

    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1),
    }
    _tp_plan = tensor_parallel_plan("self_attn")

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.vocab_size, VanillaTransformerEncoderLayer, config.encoder_layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source: `last_hidden_state` (B, S, D); `hidden_states` and `attentions` when asked for.

        Args:
            input_ids: (B, S). inputs_embeds: (B, S, D), before scaling, instead of ids.
            attention_mask: (B, S), 1 for tokens and 0 for padding on any side; by default from `pad_token_id`.
        """
        inputs_embeds = self.look_up(input_ids, inputs_embeds)
        batch, length = inputs_embeds.shape[:2]
        self.check_mask(attention_mask, (batch, length), "attention_mask")
        attention_mask = default_source_mask(self.config, input_ids, attention_mask)
        if attention_mask is not None and len(attention_mask.shape) == 2:
            position_ids = positions_from_mask(attention_mask)  # (B, S)
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None]  # (1, S)

        x = self.embed(inputs_embeds, position_ids)
        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)  # (B, 1, S, S)
        for layer in self.layers:
            x = layer(x, mask, **kwargs)
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
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = tensor_parallel_plan("self_attn", "cross_attn")

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.target_vocab_size, VanillaTransformerDecoderLayer, config.decoder_layers)

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target: `last_hidden_state` (B, T, D), `past_key_values`; states and attentions when asked for.

        Args:
            input_ids: (B, T), the tokens after those in the cache. inputs_embeds: (B, T, D), before scaling.
            attention_mask: (B, P + T), 0 for padding; needed only for padding on the left.
            encoder_hidden_states: (B, S, D), the encoder's output. encoder_attention_mask: (B, S).
            past_key_values: keys and values of P earlier tokens. use_cache: return them with these T added.
            position_ids: (B or 1, T), where they are not P, P + 1 …
        """
        inputs_embeds = self.look_up(input_ids, inputs_embeds, "decoder_")
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states is missing: this decoder always reads a source")
        batch, length = inputs_embeds.shape[:2]
        self.check_mask(encoder_attention_mask, (batch, encoder_hidden_states.shape[1]), "attention_mask")
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        past = past_key_values.get_seq_length() if past_key_values is not None else 0  # P
        self.check_mask(attention_mask, (batch, past + length), "decoder_attention_mask")

        if position_ids is None:
            static = getattr(past_key_values, "is_compileable", False)
            if isinstance(attention_mask, Tensor) and (attention_mask.ndim == 2 or static):
                position_ids = positions_from_mask(attention_mask)[:, -length:]  # (B, T)
            else:
                position_ids = (torch.arange(length, device=inputs_embeds.device) + past)[None]  # (1, T)
        x = self.embed(inputs_embeds, position_ids)
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, cache)  # (B, 1, T, P + T)
        source_mask = create_bidirectional_mask(
            self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
        )  # (B, 1, T, S)
        for layer in self.layers:
            x = layer(x, encoder_hidden_states, mask, source_mask, past_key_values=past_key_values, **kwargs)
        x = self.layer_norm(x) if self.config.final_layer_norm else x
        return BaseModelOutputWithPastAndCrossAttentions(x, past_key_values=past_key_values if use_cache else None)


def check_ids(ids: Tensor, vocab_size: int, name: str) -> None:
    """Raise a ValueError for ids outside the vocabulary, on a CPU and outside compiled graphs."""
    # Elsewhere reading the values would synchronise the GPU or break the graph; there torch's own check must do.
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = (int(extreme) for extreme in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} holds {low if low < 0 else high}, but the vocabulary ends at {vocab_size - 1}; "
            f"was it made by another tokenizer?"
        )


def default_source_mask(
    config: VanillaTransformerConfig, input_ids: Tensor | None, attention_mask: Tensor | None
) -> Tensor | None:
    """The caller's mask; without one, 1 for every id (B, S) that is not the pad token."""
    if attention_mask is None and input_ids is not None and config.pad_token_id is not None:
        return input_ids.ne(config.pad_token_id).long()
    return attention_mask
