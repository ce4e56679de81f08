"""Hugging Face's `MarianMTModel`: the same architecture with split sinusoids and an output bias."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..generation_vanilla_transformer import chosen_settings
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .converting import Converted
from .sinusoids import weights_with_split_sinusoids
from .state_dicts import Place, build_model, position_layout, require_tensors, word_matrices
from .transformers_folders import decode_as, load_peer, load_tokenizer

_SAME_FIELDS = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads", "activation_function", "scale_embedding"),
    *("dropout", "attention_dropout", "activation_dropout", "max_position_embeddings"),
    *("share_encoder_decoder_embeddings", "tie_word_embeddings"),
    *("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"),
)


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` that gives the same logits.

    Args:
        model: a translator with sinusoids. Where they stand in turn, the weights are permuted to Marian's order.

    Returns:
        The model in evaluation mode, with the dtype of `model`, on its device.

    Raises:
        UserError: what Marian's architecture does not have.
    """
    config = model.config
    _refuse(config)
    fields = {name: getattr(config, name) for name in _SAME_FIELDS}
    marian = MarianMTModel(
        MarianConfig(**fields, decoder_vocab_size=config.target_vocab_size, forced_eos_token_id=None)
    ).to(device=model.device, dtype=model.dtype)
    weights = weights_with_split_sinusoids(model)
    bias = weights.pop("lm_head.bias", None)
    _fill(marian, {name.replace("cross_attn", "encoder_attn"): weight for name, weight in weights.items()})
    if bias is not None:
        marian.final_logits_bias.copy_(bias[None])  # (1, V)
    return marian.eval()


def write(model: VanillaTransformerForConditionalGeneration, folder: Path) -> None:
    """Save `to_marian(model)`, which decodes as near to ours as transformers' search can: score log P / length^α."""
    marian, own = to_marian(model), chosen_settings(model.generation_config)
    beams = own.get("num_beams", 1)
    marian.generation_config.update(num_beams=beams, max_length=model.config.max_position_embeddings)
    if beams > 1:  # transformers saves no penalty for a greedy search
        marian.generation_config.length_penalty = own.get("length_penalty", own.get("paper_length_penalty", 1.0))
    marian.save_pretrained(folder)


def from_marian(folder: str | Path) -> Converted:
    """A folder of a `MarianMTModel`, such as every OPUS-MT model on the Hub.

    Its tokenizer stays the `MarianTokenizer`, so that ids and text are the same; that needs sentencepiece.

    Args:
        folder: config.json, the weights, and source.spm, target.spm, vocab.json where it has a tokenizer.

    Raises:
        UserError: another kind of model, damaged or missing files.
    """
    marian = load_peer(MarianMTModel, folder)
    tensors, config = require_tensors(marian.state_dict(), str(folder)), marian.config
    words = word_matrices(
        tensors, "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
    )
    tables = {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
    layout = position_layout(tensors[name] for name in tables)
    tokenizer = load_tokenizer("MarianTokenizer", folder, ("source.spm", "target.spm", "vocab.json"), "sentencepiece")
    fields = {name: getattr(config, name) for name in _SAME_FIELDS} | words.fields
    model = build_model(
        fields
        | {
            "position_encoding_type": layout,
            "lm_head_bias": bool(tensors["final_logits_bias"].any()),
            "unk_token_id": None if tokenizer is None else tokenizer.unk_token_id,
        },
        tensors,
        _place,
        unused=words.copies | tables | {"model.shared.weight", "final_logits_bias"},
    )
    decode_as(model, marian.generation_config)
    return Converted(model, tokenizer)


def _place(name: str) -> str | Place:
    if name == "lm_head.bias":
        return Place("final_logits_bias", 0)  # (1, V)
    return name.replace("cross_attn", "encoder_attn")


@torch.no_grad()
def _fill(marian: MarianMTModel, weights: dict[str, Tensor]) -> None:
    """Copy weights by name; all of them have to find their place, and every place its weight."""
    missing = set()
    for name, parameter in marian.named_parameters(remove_duplicate=False):
        if name.endswith("embed_positions.weight"):
            continue
        source = weights.get(name.replace("model.shared", "model.encoder.embed_tokens"))
        if source is None:
            missing.add(name)
        else:
            parameter.copy_(source)
    surplus = weights.keys() - {name for name, _ in marian.named_parameters(remove_duplicate=False)}
    if missing or surplus:
        raise UserError(f"Marian lacks {sorted(surplus)}, and has {sorted(missing)} besides")


def _refuse(config: VanillaTransformerConfig) -> None:
    widths = {config.d_model / heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads)}
    free = {width for width in (config.head_dim, config.value_head_dim) if width is not None}
    refused = {
        "position_encoding_type": config.position_encoding_type not in ("sinusoidal", "sinusoidal_split"),
        "attention_bias": not config.attention_bias,
        "final_layer_norm": config.final_layer_norm,
        "head_dim": bool(free) and free != widths,
        "layer_norm_eps": config.layer_norm_eps != 1e-5,
    }
    for name, cannot in refused.items():
        if cannot:
            raise UserError(f"{name}={getattr(config, name)!r}: Marian has no such option, the model stays as it is")
