"""CTranslate2: registers our architecture with its converter of transformers' models.

Its command ct2-transformers-converter does not import this package, so call `write_ctranslate2` instead.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.language_tokens import language_tokens
from ..text.side_tokens import side_tokens, tokens_of_sides
from ..text.source_text import normalizing
from ..text.tokenizer_files import load_tokenizers, save_tokenizers
from ..utils.atomic_write import new_folder
from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import require_file
from .converted import Fields, File
from .search_settings import (
    CTRANSLATE2,
    banned_tokens,
    check_search,
    ends,
    flat,
    length_penalty,
    longest,
    refuse_fields,
    shortest,
)

MIN_POSITIONS = 1024  # rows of the table of sinusoids. CTranslate2 computes none
NEVER = -1e4  # output bias of forbidden tokens, within the range of float16

# Activation functions, and their names in `ctranslate2.specs.common_spec.Activation`.
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "quick_gelu": "GELUSigmoid",
    "tanh": "Tanh",
    "silu": "SWISH",
    "swish": "SWISH",
    "sigmoid": "Sigmoid",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "GELUTanh"),
}


def write_ctranslate2(
    folder: str | Path,
    output: str | Path,
    quantization: str | None = None,
    vmap: File = None,
) -> Path:
    """Write a model folder as a CTranslate2 model, with its tokenizer, and return `output`.

    CTranslate2 has no list of forbidden tokens, so they get an output bias of `NEVER`.

    Args:
        folder: a model with its tokenizer.
        output: a new folder. It appears when it is complete.
        quantization: CTranslate2's name of a dtype, such as "int8". None keeps the dtype of the weights.
        vmap: a vocabulary mapping, for `use_vmap` of `Translator.translate_batch`.
    """
    register()
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

    if quantization not in (None, *ACCEPTED_MODEL_TYPES):
        raise UserError(
            f"quantization={quantization}: CTranslate2 has {', '.join(ACCEPTED_MODEL_TYPES)}"
        )
    with new_folder(Path(output)) as temporary:
        mapping = None if vmap is None else str(require_file(Path(vmap)))
        TransformersConverter(str(folder)).convert(
            str(temporary), mapping, quantization=quantization
        )
        save_tokenizers(temporary, *normalizing(*load_tokenizers(folder)))
    return Path(output)


def search_arguments(
    model: VanillaTransformerForConditionalGeneration, tokens: Sequence[str]
) -> Fields:
    """The arguments of `Translator.translate_batch` for this model's search. The paper's α becomes a length penalty.

    `tokens` are those of the target, by id.
    """
    settings = check_search(model, CTRANSLATE2)
    beams = settings.get("num_beams") or 1
    arguments: Fields = {"beam_size": beams}
    if beams > 1:
        arguments["length_penalty"] = length_penalty(settings)
    for name, neutral in (("no_repeat_ngram_size", 0), ("repetition_penalty", 1)):
        if settings.get(name) not in (None, neutral):
            arguments[name] = settings[name]
    arguments["min_decoding_length"] = shortest(settings)
    if (length := longest(settings)) is not None:
        # a forced end at the limit replaces the last token
        is_forced = settings.get("forced_eos_token_id") is not None
        arguments["max_decoding_length"] = length - is_forced
    if (forced := settings.get("forced_bos_token_id")) is not None:
        # for each sentence
        arguments["target_prefix"] = [[tokens[flat(forced)[0]]]]
    if sequences := [ids for ids in settings.get("bad_words_ids") or [] if len(ids) > 1]:
        arguments["suppress_sequences"] = [[tokens[token] for token in ids] for ids in sequences]
    if len(ends(settings)) > 1:
        arguments["end_token"] = [tokens[token] for token in ends(settings)]
    return arguments


def search_note(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> str:
    """A note for users: the arguments of `translate_batch`, and how its scores differ. `tokenizer` is the target's."""
    tokens = side_tokens(tokenizer, model.config.target_vocab_size, "target")
    arguments = search_arguments(model, tokens)
    listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
    note = f"; its search is an argument of translate_batch: {listed}"
    languages = language_tokens(tokenizer, "target")
    code, number = next(iter(languages.ids.items())) if languages else ("", 0)
    mark = tokens[number]
    if languages and languages.source_mark:
        note += f"; a source has the token of a language ({mark} for {code})"
    if languages and languages.target_mark:
        note += f"; a translation starts with the one of its language, target_prefix=[[{mark!r}]]"
    settings = check_search(model, CTRANSLATE2)
    excluding = {"no_repeat_ngram_size", "suppress_sequences"}
    excludes = (
        not excluding.isdisjoint(arguments)
        or banned_tokens(settings)
        or arguments["min_decoding_length"] > 1
    )
    if excludes and arguments["beam_size"] > 1 and not settings.get("renormalize_logits"):
        note += "; its beams exclude tokens before the softmax, as `generate` does with renormalize_logits=True"
    return note


def register() -> None:
    """Register `VanillaTransformerConfig` with CTranslate2's converter of transformers' models."""
    with naming_extras():
        from ctranslate2.converters import transformers as converter
        from ctranslate2.specs import TransformerSpec

    class VanillaTransformerLoader(converter.BartLoader):
        """Bart's loader with our module names, either position of LayerNorm, and a table of our positions."""

        architecture_name = "AutoModelForSeq2SeqLM"

        def get_model_spec(
            self, model: VanillaTransformerForConditionalGeneration
        ) -> TransformerSpec:
            spec = _new_spec(model.config)
            if model.dtype == torch.float64:  # CTranslate2 has none
                model.float()
            _use_names_of_bart(model)
            self.set_encoder(spec.encoder, model.model.encoder)
            self.set_decoder(spec.decoder, model.model.decoder)
            self.set_linear(spec.decoder.projection, model.lm_head)
            return spec

        def get_vocabulary(
            self,
            model: VanillaTransformerForConditionalGeneration,
            tokenizer: PreTrainedTokenizerBase,
        ) -> tuple[list[str], list[str]]:
            return tokens_of_sides(model.config, *load_tokenizers(tokenizer.name_or_path))

        def set_vocabulary(
            self, spec: TransformerSpec, tokens: tuple[list[str], list[str]]
        ) -> None:
            spec.register_source_vocabulary(tokens[0])
            spec.register_target_vocabulary(tokens[1])

        def set_config(
            self,
            config: Any,
            model: VanillaTransformerForConditionalGeneration,
            tokenizer: PreTrainedTokenizerBase,
        ) -> None:
            # the base class writes null for a token that the tokenizer lacks, so that nothing can load the folder
            source, target = self.get_vocabulary(model, tokenizer)
            fields = model.config
            search = model.generation_config
            end = fields.target_eos_token_id if search.eos_token_id is None else search.eos_token_id
            start = search.decoder_start_token_id
            named = {
                "bos_token": (fields.bos_token_id, source),
                "unk_token": (fields.unk_token_id, source),
                "eos_token": (end, target),
                "decoder_start_token": (
                    fields.decoder_start_token_id if start is None else start,
                    target,
                ),
            }
            for name, (number, tokens) in named.items():
                if number is not None:
                    setattr(config, name, tokens[flat(number)[0]])
            config.layer_norm_epsilon = fields.layer_norm_eps

    converter.register_loader(VanillaTransformerConfig.__name__)(VanillaTransformerLoader)


def _new_spec(config: VanillaTransformerConfig) -> Any:
    """A specification of the model's sizes. A UserError for a model that CTranslate2 cannot express."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    heads = config.encoder_attention_heads
    widths = None, config.d_model // heads
    is_pre_norm = config.layer_norm_position == "pre"
    refuse_fields(
        config,
        "CTranslate2's Transformer has one number of heads, heads of width d_model / h, a final LayerNorm only with "
        f"pre-norm, and the activations {', '.join(ACTIVATIONS)}",
        activation_function=config.activation_function not in ACTIVATIONS,
        final_layer_norm=config.final_layer_norm and not is_pre_norm,  # always True with "pre"
        decoder_attention_heads=config.decoder_attention_heads != heads,
        head_dim=config.head_dim not in widths,
        value_head_dim=config.value_head_dim not in widths,
    )
    activation = Activation[ACTIVATIONS[config.activation_function]]
    depths = config.encoder_layers, config.decoder_layers
    return TransformerSpec.from_config(depths, heads, pre_norm=is_pre_norm, activation=activation)


def _use_names_of_bart(model: VanillaTransformerForConditionalGeneration) -> None:
    """Give the loader's names to modules, a table to positions, and a bias to forbidden tokens."""
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions = torch.nn.Embedding.from_pretrained(position_table(stack))
    for layer in model.model.decoder.layers:
        layer.encoder_attn = layer.cross_attn
        layer.encoder_attn_layer_norm = layer.cross_attn_layer_norm
    if banned := banned_tokens(check_search(model, CTRANSLATE2)):
        head = model.lm_head
        bias = head.weight.new_zeros(head.out_features) if head.bias is None else head.bias.detach()
        head.bias = torch.nn.Parameter(
            bias.index_fill(0, torch.tensor(banned), NEVER), requires_grad=False
        )


def position_table(stack: Any) -> torch.Tensor:
    """The positions of a stack as a table (P, D): its embedding layer applied to zeros."""
    rows = stack.config.max_position_embeddings
    if stack.config.position_encoding_type != "learned":
        rows = max(MIN_POSITIONS, rows)
    zeros = torch.zeros(1, rows, stack.config.d_model)
    return stack.eval().embed(zeros, torch.arange(rows)[None])[0].detach()
