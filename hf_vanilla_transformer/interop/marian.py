"""Hugging Face's `MarianMTModel`: the same architecture with split sinusoids and an output bias."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError
from .converted import Converted, Tensors
from .search_settings import OF_HYPOTHESES, TRANSFORMERS, refuse_fields
from .state_dicts import TensorRef, position_layout
from .transformers_folders import (
    POSITION_TABLES,
    SAME_FIELDS,
    from_peer,
    load_tokenizer,
    make_savable,
    read_folder,
)

# The D features are the input of these modules.
_READS = ("q_proj", "k_proj", "v_proj", "fc1", "lm_head")


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` that gives the same logits.

    `model` has sinusoidal positions. If sines and cosines are interleaved, the weights are permuted to Marian's split
    order. The result is in evaluation mode, with the dtype of `model`, on its device.
    """
    config = model.config
    _refuse(config)
    tying = ("vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings")
    fields = {name: getattr(config, name) for name in (*SAME_FIELDS, *tying)}
    # Its two vocabularies share the special tokens of its search. The tokenizer pads the source.
    fields |= {name: getattr(config, f"target_{name}") for name in ("pad_token_id", "eos_token_id")}
    marian = MarianMTModel(
        MarianConfig(
            **fields, decoder_vocab_size=config.target_vocab_size, forced_eos_token_id=None
        )
    ).to(device=model.device, dtype=model.dtype)
    weights = weights_with_split_sinusoids(model)
    weights = {
        name.replace("cross_attn", "encoder_attn"): weight for name, weight in weights.items()
    }
    if config.share_encoder_decoder_embeddings:
        weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"]
    bias = weights.pop("lm_head.bias", torch.zeros(config.target_vocab_size))
    missing, surplus = marian.load_state_dict(
        {**weights, "final_logits_bias": bias[None]}, strict=False
    )
    if surplus or set(missing) - POSITION_TABLES:
        raise UserError(f"Marian lacks {sorted(surplus)}, and has {sorted(missing)} besides")
    return marian.eval()


def write(model: VanillaTransformerForConditionalGeneration, folder: Path) -> None:
    """Save `to_marian(model)` with the model's search. The paper's length penalty becomes log P / length^α."""
    marian = to_marian(model)
    search = model.generation_config.to_diff_dict()
    defaults = {"num_beams": 1, "length_penalty": search.get("paper_length_penalty", 1.0)}
    for name, libraries in OF_HYPOTHESES.items():
        if TRANSFORMERS not in libraries:
            search.pop(name, None)
    settings = marian.generation_config.to_diff_dict() | defaults | search
    if not settings.keys() & {"max_length", "max_new_tokens"}:
        settings["max_length"] = model.config.max_position_embeddings
    marian.generation_config = GenerationConfig(**settings)
    make_savable(marian.generation_config)
    marian.save_pretrained(folder)


def from_marian(folder: str | Path) -> Converted:
    """A folder of a `MarianMTModel`, such as every OPUS-MT model on the Hub.

    If config.json ties matrices that differ in the weights, as in some opus-mt-tc folders, they stay untied and a note
    says so. The tokenizer stays a `MarianTokenizer`, so that ids and text are the same. It needs sentencepiece. A
    folder that `write` made has a tokenizer.json instead.

    Args:
        folder: config.json, the weights and, if it has a tokenizer, source.spm, target.spm and vocab.json, or
            tokenizer.json.
    """
    files = ("source.spm", "target.spm", "vocab.json")
    peer = read_folder(MarianConfig, folder)
    tables = [peer.tensors[name] for name in sorted(POSITION_TABLES) if name in peer.tensors]
    positions = position_layout(tables) if tables else "sinusoidal_split"
    bias = peer.tensors.get("final_logits_bias")
    tokenizer = load_tokenizer("MarianTokenizer", folder, files)
    target_tokenizer = None
    if tokenizer is None and (Path(folder) / "tokenizer.json").is_file():
        tokenizer, target_tokenizer = load_tokenizers(folder)
    converted = from_peer(
        peer,
        tokenizer,
        {"lm_head.bias": TensorRef("final_logits_bias", 0)},
        ["final_logits_bias"],  # (1, V)
        position_encoding_type=positions,
        lm_head_bias=bias is not None and bool(bias.any()),
    )
    converted.target_tokenizer = None if target_tokenizer is tokenizer else target_tokenizer
    return converted


def _refuse(config: VanillaTransformerConfig) -> None:
    widths = {
        config.d_model / heads
        for heads in (config.encoder_attention_heads, config.decoder_attention_heads)
    }
    set_widths = {width for width in (config.head_dim, config.value_head_dim) if width is not None}
    refuse_fields(
        config,
        "MarianMTModel has no such option, the model stays as it is",
        position_encoding_type=config.position_encoding_type
        not in ("sinusoidal", "sinusoidal_split"),
        attention_bias=not config.attention_bias,
        layer_norm_position=config.layer_norm_position != "post",
        final_layer_norm=config.final_layer_norm,
        head_dim=bool(set_widths) and set_widths != widths,
        layer_norm_eps=config.layer_norm_eps != 1e-5,
    )


def weights_with_split_sinusoids(
    model: VanillaTransformerForConditionalGeneration,
) -> Tensors:
    """The weights by name, tied ones under each name, with which `model` gives the same logits from split sinusoids.

    The paper interleaves sines and cosines (§3.5). The order of the D features of the residual stream is free as long
    as every matrix uses the same one, so permuting the weights moves all sines to the front. A ValueError for other
    positions.
    """
    kind = model.config.position_encoding_type
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    if kind == "sinusoidal_split":
        return weights
    if kind != "sinusoidal":
        raise ValueError(
            f"position_encoding_type={kind!r} has no split order; 'sinusoidal' is needed"
        )
    width = model.config.d_model
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)]).to(model.device)
    return {name: _permuted(name, weight, order) for name, weight in weights.items()}


def _permuted(name: str, weight: Tensor, order: Tensor) -> Tensor:
    module, kind = name.split(".")[-2:]
    if module == "embed_tokens" or (module in _READS and kind == "weight"):
        return weight[:, order]  # (·, D)
    # (D, ·) or (D,): out_proj, fc2 and LayerNorm.
    return weight if module in _READS else weight[order]
