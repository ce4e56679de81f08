"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762) as Hugging Face models.

The models that the Auto classes load. attention_ and layers_vanilla_transformer.py have their parts. Sections,
equations and tables are the paper's.

Shapes: B batch, S source length, T target length, D d_model, V target vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .arguments_vanilla_transformer import CACHE, check_ids, one_cache
from .attention_vanilla_transformer import is_plain_linear
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import encoder_output
from .generation_vanilla_transformer import (
    VanillaTransformerGenerationMixin,
    paper_generation_config,
)
from .layers_vanilla_transformer import (
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerPreTrainedModel,
    dropout,
)
from .loss_vanilla_transformer import (
    IGNORED,
    UnreadLogits,
    VanillaTransformerOutput,
    VanillaTransformerTrainingOutput,
    shift_right,
    translation_loss,
    translation_losses,
)
from .masks_vanilla_transformer import segment_starts


def check_labels(labels: Tensor, size: int) -> None:
    """Raise a ValueError for labels that are neither -100 nor in 0 … size - 1, where `check_ids` looks at values."""
    if labels.device.type == "cpu":
        check_ids(labels.masked_fill(labels == IGNORED, 0), size, "labels")


def check_serves_both(attention_mask: Tensor) -> None:
    """Raise a ValueError for a mask with a row for each place of the source. The decoder has other places."""
    shape = tuple(attention_mask.shape)
    if len(shape) == 4 and shape[2] != 1:
        raise ValueError(
            f"attention_mask of shape {shape} has a row for each place of the source: give cross_attention_mask, such "
            "as (B, S), for the decoder"
        )


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without an output layer (`AutoModel`)."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig, layer_classes: Any = None):
        super().__init__(config)
        self._tied_weights_keys = self.tied_weights()
        encoder_layer, decoder_layer = layer_classes or self.layer_classes
        self.encoder = VanillaTransformerEncoder(config, encoder_layer)
        self.decoder = VanillaTransformerDecoder(config, decoder_layer)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel` does. `AutoModel` passes the `config`, and a saved encoder loads as an encoder."""
        if config is not None and not getattr(config, "is_encoder_decoder", True):
            return VanillaTransformerEncoderModel.from_pretrained(*args, config=config, **kwargs)
        return super().from_pretrained(*args, config=config, **kwargs)

    def tied_weights(self) -> dict[str, str]:
        shared = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        return shared if self.config.share_encoder_decoder_embeddings else {}

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
        decoder_position_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput | BaseModelOutput:
        """Encode the source, or take its `encoder_outputs`, and decode the target.

        Args and returns: as in the two stacks. `attention_mask` (B, S) serves both, unless `cross_attention_mask`
        (B, S) or (B, 1, T, S) says what the decoder sees of the source. It must where `attention_mask` is
        (B, 1, S, S). `segment_ids` (B, S) and `decoder_segment_ids` (B, T) are those of packed rows. A call with a
        source alone returns the encoder's states, as embedders expect.
        """
        past_key_values = one_cache(past_key_values, cache)
        if segment_ids is None:
            attention_mask = self.source_mask(input_ids, attention_mask)
        source: Any = encoder_outputs
        if source is None:
            # By name, without what is not given: the encoder may be a user's.
            places = {"position_ids": position_ids, "segment_ids": segment_ids}
            source = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                **{name: ids for name, ids in places.items() if ids is not None},
                **kwargs,
            )
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                return source
            if cross_attention_mask is None and attention_mask is not None:
                check_serves_both(attention_mask)
        source = encoder_output(source)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            source.last_hidden_state,
            attention_mask if cross_attention_mask is None else cross_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            segment_ids=decoder_segment_ids,
            encoder_segment_ids=segment_ids,
            **kwargs,
        )
        cached = {CACHE: decoder_outputs.get(CACHE)}
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **cached,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=source.last_hidden_state,
            encoder_hidden_states=source.get("hidden_states"),
            encoder_attentions=source.get("attentions"),
        )


class VanillaTransformerLanguageModel(VanillaTransformerPreTrainedModel):
    """Base of the models with an output layer, which may be the target embedding (§3.4)."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def tied_weights(self) -> dict[str, str]:
        source, target = (f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
        shared = self.config.share_encoder_decoder_embeddings
        pairs = {target: source} if shared else {}
        if self.config.tie_word_embeddings:
            pairs["lm_head.weight"] = source if shared else target
        return pairs

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as `PreTrainedModel` does, with every weight that the configuration, as it is now, does not tie.

        PEFT sets `tie_word_embeddings` to False when it adds an adapter to a model with separate vocabularies. A user
        may tie weights later: transformers knows those of the start only, and refuses to save others in one tensor.
        """
        known = self.all_tied_weights_keys.keys() & self.tied_weights().keys()
        untied = (
            {"lm_head.weight", "model.decoder.embed_tokens.weight"}
            - known
            - dict(self.named_parameters()).keys()
        )
        if untied:
            weights = kwargs.get("state_dict") or self.state_dict()
            kwargs["state_dict"] = dict(weights) | {
                name: weights[name].clone() for name in untied & weights.keys()
            }
        return super().save_pretrained(save_directory, *args, **kwargs)


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerGenerationMixin, VanillaTransformerLanguageModel
):
    """The whole of Figure 1: the model that translates (`AutoModelForSeq2SeqLM`)."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self._tied_weights_keys = self.tied_weights()
        self.model = VanillaTransformerModel(config, self.layer_classes)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=config.lm_head_bias)
        self.generation_config = paper_generation_config(config)
        self.post_init()

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the number of source tokens, or of all tokens if source and target share their embeddings."""
        owner: Any = super() if self.config.share_encoder_decoder_embeddings else self.model.encoder
        embeddings = owner.resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.vocab_size = self.config.vocab_size  # as `PreTrainedModel` leaves it
        return embeddings

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """`resize_token_embeddings` for a separate target vocabulary. Raises a ValueError if there is none."""
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "share_encoder_decoder_embeddings=True: call resize_token_embeddings, it resizes both"
            )
        decoder = self.model.decoder
        new = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder.embed_tokens = new
        self.lm_head = self._get_resized_lm_head(
            self.lm_head, new.num_embeddings, mean_resizing=mean_resizing
        )
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
        objective: Any = None,
        decoder_segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> VanillaTransformerOutput:
        """Logits of every target token, and their loss against `labels`.

        Args:
            labels: (B, T), -100 for padding. The decoder reads them shifted right, unless it is given other inputs.
            num_items_in_batch: target tokens of the whole update, passed by `Trainer`. See `translation_loss`.
            skip_logits: True computes the loss without the (B, T, V) logits, in a fraction of their time and memory.
                None does so while training, and computes logits if they are read, but not under torch.compile. False,
                a call without labels, and an output layer with a hook, an adapter or a different class compute them
                at once.
            objective: called in place of `translation_losses`. Other arguments: as in the two stacks.

        Returns:
            `loss` (with label smoothing only while training), `logits` (B, T, V), the outputs of the stacks, and
            while training `nll_loss`, the loss without smoothing.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(
                labels, decoder_segment_ids
            )
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=one_cache(past_key_values, cache),
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            decoder_segment_ids=decoder_segment_ids,
            **kwargs,
        )
        states = outputs.last_hidden_state  # (B, T, D)
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        skips = labels is not None and self._can_skip_logits(states, skip_logits)
        logits: Any = None if skips else self.lm_head(states)  # (B, T, V)
        if labels is None:
            return VanillaTransformerOutput(logits=logits, **fields)
        labels = labels.to(states.device, torch.long)
        check_labels(labels, self.config.target_vocab_size)
        smoothing = self.config.label_smoothing if self.training else 0.0
        compute_losses = objective or translation_losses
        loss, nll_loss = compute_losses(
            states, logits, self.lm_head, labels, smoothing, num_items_in_batch
        )
        # `Trainer` takes all but the loss for predictions.
        fields["nll_loss"] = nll_loss if self.training else None
        if skips and skip_logits is None:
            return VanillaTransformerTrainingOutput(
                loss, UnreadLogits(states, self.lm_head), **fields
            )
        return VanillaTransformerOutput(loss, logits, **fields)

    def _can_skip_logits(self, states: Tensor, skip_logits: bool | None) -> bool:
        if skip_logits is None:
            # Without a gradient there is no fused backward pass to gain from. torch.compile cannot trace logits that
            # are computed when they are read.
            requested = self.training and states.requires_grad and not torch.compiler.is_compiling()
        else:
            requested = skip_logits
        if not requested or not is_plain_linear(self.lm_head):
            return False
        # The fused gradients come before the loss is scaled, and float16 underflows on small ones.
        device_type = self.lm_head.weight.device.type
        return not (
            torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == torch.float16
        )

    def prepare_decoder_input_ids_from_labels(
        self, labels: Tensor | None, segment_ids: Tensor | None = None
    ) -> Tensor:
        """`labels` (B, T) shifted right, in packed rows within each segment of `segment_ids` (B, T).

        `DataCollatorForSeq2Seq(tokenizer, model=model)` calls this.
        """
        if labels is None:
            raise ValueError(
                "the decoder has nothing to read: give labels, decoder_input_ids or decoder_inputs_embeds; Trainer's "
                "label_smoothing_factor and compute_loss_func need DataCollatorForSeq2Seq(tokenizer, model=model), "
                "label_smoothing of the configuration does not; to predict for rows without labels take "
                "DataCollatorWithPadding"
            )
        start = self.config.decoder_start_token_id
        pad = self.config.target_pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={pad}: labels need both"
            )
        if labels.dim() != 2 or labels.shape[1] == 0:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}: give (B, T), of one token or more"
            )
        shifted = shift_right(labels, start, pad)
        if segment_ids is None:
            return shifted
        if segment_ids.shape != labels.shape:
            raise ValueError(
                f"decoder_segment_ids has shape {tuple(segment_ids.shape)}, but must have that of labels, "
                f"{tuple(labels.shape)}"
            )
        return shifted.masked_fill(segment_starts(segment_ids), start)


class VanillaTransformerSharedEmbedding(nn.Module):
    """What a decoder alone keeps of the encoder: the matrix of both, under the name in a translator's checkpoint."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)


class VanillaTransformerDecoderModel(VanillaTransformerPreTrainedModel):
    """The decoder of `VanillaTransformerForCausalLM`, with the names of weights of a translator."""

    def __init__(self, config: VanillaTransformerConfig, layer: Any):
        super().__init__(config)
        self.decoder = VanillaTransformerDecoder(config, layer)
        if config.share_encoder_decoder_embeddings:
            self.encoder = VanillaTransformerSharedEmbedding(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.encoder.embed_tokens = value

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """Args and returns: as in `VanillaTransformerDecoder`."""
        return self.decoder(*args, **kwargs)


def _decoder_config(config: VanillaTransformerConfig) -> VanillaTransformerConfig:
    """A copy of `config` for a decoder alone, with the target's values under the names that transformers reads."""
    config = copy.deepcopy(config)  # the caller's may serve a translator too
    for name in ("vocab_size", "pad_token_id", "eos_token_id"):
        setattr(config, name, getattr(config, f"target_{name}"))
        setattr(config, f"decoder_{name}", None)
    config.encoder_layers = config.decoder_layers
    config.encoder_attention_heads = config.decoder_attention_heads
    config.is_encoder_decoder = False
    return config


class VanillaTransformerForCausalLM(GenerationMixin, VanillaTransformerLanguageModel):
    """The decoder alone (`AutoModelForCausalLM`), like `MarianForCausalLM`. Not in the paper.

    It loads from the checkpoint of a whole translator. Without `encoder_hidden_states` it has no cross-attention.
    `generate` runs transformers' loops, which do not have the paper's length penalty.
    """

    _keys_to_ignore_on_load_unexpected = [r"encoder\."]

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(_decoder_config(config))
        self._tied_weights_keys = self.tied_weights()
        self.model = VanillaTransformerDecoderModel(self.config, self.layer_classes[1])
        self.lm_head = nn.Linear(
            self.config.d_model, self.config.vocab_size, bias=self.config.lm_head_bias
        )
        self.loss_type = None  # otherwise `Trainer` counts labels as if the model shifted them
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        """Logits of the token after each of `input_ids`, and their loss against `labels`.

        Args:
            labels: (B, T), -100 for padding. As in `MarianForCausalLM` they are not shifted here: `labels[:, t]` is
                the token after `input_ids[:, t]`.
            logits_to_keep: compute the logits of this many last tokens only, or of the tokens at these indices. 0
                computes all.
            num_items_in_batch: tokens of the whole update, passed by `Trainer`. See `translation_loss`.
            Other arguments: as in `VanillaTransformerDecoder`.

        Returns:
            `loss` (with label smoothing only while training), `logits` (B, T, V), and the outputs of the decoder.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values=one_cache(past_key_values, cache),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])  # (B, T, V)
        loss = None
        if labels is not None:
            labels = labels.to(logits.device, torch.long)
            check_labels(labels, self.config.vocab_size)
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss = translation_loss(logits, labels, smoothing, num_items_in_batch)
        cached = {CACHE: outputs.get(CACHE)}
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            **cached,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class VanillaTransformerEncoderModel(VanillaTransformerPreTrainedModel):
    """The encoder alone (`AutoModelForTextEncoding`). Loads from the checkpoint of a whole translator."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: VanillaTransformerConfig):
        config = copy.deepcopy(config)  # the caller's may serve a translator too
        config.is_encoder_decoder = config.use_cache = False
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config, self.layer_classes[0])
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Args and returns: as in `VanillaTransformerEncoder`."""
        return self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)


class VanillaTransformerForSequenceClassification(VanillaTransformerPreTrainedModel):
    """The encoder, the mean of its states, and one linear layer (`AutoModelForSequenceClassification`).

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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify sentences.

        Args:
            input_ids, inputs_embeds: as in the encoder. attention_mask: (B, S).
            labels: (B,) classes, (B, L) zeros and ones for several classes, or (B,) numbers for a regression.
                `config.problem_type` says which, or their dtype if that is None.

        Returns:
            `loss` if labels are given, `logits` (B, L).
        """
        if "segment_ids" in kwargs:
            raise ValueError(
                "segment_ids: a row is one sentence here, because its states are averaged"
            )
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: give (B, S), which also says whose states "
                "are averaged"
            )
        mask = self.source_mask(input_ids, attention_mask)
        outputs = self.model(input_ids, mask, inputs_embeds, **kwargs)
        states = outputs.last_hidden_state  # (B, S, D)
        # (B, S, 1)
        mask = torch.ones_like(states[..., :1]) if mask is None else mask[..., None].ne(0)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # (B, D)
        # (B, L)
        logits = self.classifier(dropout(mean, p=self.config.dropout, training=self.training))
        loss = (
            None
            if labels is None
            else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        )
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


__all__ = [
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
