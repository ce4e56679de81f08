"""Hugging Face's `MarianMTModel`: the same architecture with split sinusoids and an output bias."""

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .sinusoids import weights_with_split_sinusoids

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
