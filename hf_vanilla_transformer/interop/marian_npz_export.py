"""Marian's own files, as Firefox reads them: model.npz with its options, vocabularies and decoder.yml.

Marian can express models with its arithmetic only, such as converted ones after fine-tuning. Its decoder starts
from a zero vector, has different sinusoids, and reads trained positions wrongly: each step is at position 0.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from ..data.side_tokens import tokens_of_sides
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from .converted import Fields
from .ctranslate2 import NEVER, position_table
from .marian_npz import ACTIVATIONS, EPSILON, IN_LAYER, OPTIONS, marian_positions
from .search_settings import (
    MARIAN,
    banned_tokens,
    check_search,
    length_penalty,
    refuse_fields,
    unusual_heads,
)
from .state_dicts import STACKS
from .vocabularies import sentencepiece_pieces

_ACTIVATIONS = {
    **{ours: theirs for theirs, ours in ACTIVATIONS.items()},
    "swish": "swish",
    "gelu": "gelu",
}
_SPECIAL = {"eos": "</s>", "unk": "<unk>"}
# The options of every model that is written here.
_OPTIONS = """
type: transformer
version: v1.12.42
input-types: []
lemma-dim-emb: 0
layer-normalization: false
right-left: false
skip: false
transformer-aan-only: false
transformer-decoder-autoreg: self-attention
transformer-decoder-ffn-depth: 0
transformer-ffn-depth: 2
transformer-guided-alignment-layer: last
transformer-no-projection: false
transformer-postprocess: dan
transformer-postprocess-emb: d
transformer-postprocess-top: ""
transformer-preprocess: ""
transformer-tied-layers: []
transformer-train-position-embeddings: false
ulr: false
"""
_REMEDY = (
    "Marian's own files need its positions, epsilon and zero vector at the start, and no recipe trains such a model. "
    "Fine-tune one of convert --from marian-npz, or export --to marian or ctranslate2"
)


def write(
    model: VanillaTransformerForConditionalGeneration,
    model_folder: str | Path,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    folder: Path,
) -> str:
    """Write a model in float32 into a new folder, and return a note about its text.

    `model_folder` has its SentencePiece models, if there are any.
    """
    _refuse(model)
    settings = check_search(model, MARIAN)
    source, target = tokens_of_sides(model.config, *tokenizers)
    sides = [_without_padding(model, "source", source), _without_padding(model, "target", target)]
    folder.mkdir()
    names = _write_vocabularies(Path(model_folder), folder, sides)
    unk = model.config.unk_token_id
    banned = banned_tokens(settings)
    arrays, options = _arrays(
        model, [len(side) for side in sides], [token for token in banned if token != unk]
    )
    content = yaml.safe_dump(options).encode() + b"\0"
    stored: Any = {**arrays, OPTIONS: np.frombuffer(content, dtype=np.int8)}
    np.savez(folder / "model.npz", **stored)
    beams = settings.get("num_beams") or 1
    decoder = {
        "models": ["model.npz"],
        "vocabs": names,
        "relative-paths": True,
        "beam-size": beams,
        "normalize": float(length_penalty(settings)) if beams > 1 else 0.0,
        "word-penalty": 0.0,
        "allow-unk": unk not in banned,
    }
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder), encoding="utf-8")
    has_pieces = names[0].endswith(".spm")
    return "" if has_pieces else "; its text has to be tokens with spaces between them"


def _refuse(model: VanillaTransformerForConditionalGeneration) -> None:
    config = model.config
    expected = marian_positions(config.d_model)
    tables = [
        position_table(stack)[: len(expected)]
        for stack in (model.model.encoder, model.model.decoder)
    ]
    start = model.model.decoder.embed_tokens.weight[config.decoder_start_token_id]
    refuse_fields(
        config,
        _REMEDY,
        layer_norm_position=config.layer_norm_position
        != "post",  # its decoder does not normalise cached keys
        final_layer_norm=config.final_layer_norm,
        layer_norm_eps=config.layer_norm_eps != EPSILON,
        scale_embedding=not config.scale_embedding,
        **unusual_heads(config),
        activation_function=config.activation_function not in _ACTIVATIONS,
        position_encoding_type=any(
            (table - expected[: len(table)]).abs().max() > 1e-6 for table in tables
        ),
        decoder_start_token_id=bool(start.any()),
    )


def _without_padding(
    model: VanillaTransformerForConditionalGeneration, side: str, tokens: list[str]
) -> list[str]:
    """The tokens up to the last one that is neither unused nor the padding, with Marian's names of end and unknown."""
    tokens = list(tokens)
    eos = model.config.target_eos_token_id if side == "target" else model.config.eos_token_id
    for number, name in ((eos, _SPECIAL["eos"]), (model.config.unk_token_id, _SPECIAL["unk"])):
        if not isinstance(number, int) or (name in tokens and tokens.index(name) != number):
            raise UserError(
                f"{name} of the {side}: Marian needs one such token, and the model has {number}"
            )
        tokens[number] = name
    if model.config.share_encoder_decoder_embeddings and side == "source":
        return _without_padding(model, "target", tokens)
    pad = model.config.target_pad_token_id if side == "target" else model.config.pad_token_id
    while tokens[-1].startswith("<unused_") or len(tokens) - 1 == pad:
        tokens.pop()
    return tokens


def _write_vocabularies(source: Path, folder: Path, sides: list[list[str]]) -> list[str]:
    """The files of source and target: SentencePiece models whose pieces have the model's ids, otherwise YAML."""
    names = ["source.spm", "target.spm"]
    has_models = all((source / name).is_file() for name in names)
    if has_models and [sentencepiece_pieces(source / name) for name in names] == sides:
        for name in names:
            shutil.copyfile(source / name, folder / name)
        return names
    names = ["vocab.yml"] * 2 if sides[0] == sides[1] else ["source.yml", "target.yml"]
    for name, tokens in zip(names, sides, strict=True):
        ids = {token: number for number, token in enumerate(tokens)}
        text = yaml.safe_dump(ids, sort_keys=False, width=1_000_000)  # escapes all but ASCII
        (folder / name).write_text(text, encoding="ascii")
    return names


def _arrays(
    model: VanillaTransformerForConditionalGeneration, sizes: list[int], banned: list[int]
) -> tuple[dict[str, np.ndarray], Fields]:
    """The weights under Marian's names, and its options."""
    config = model.config
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    shared = config.share_encoder_decoder_embeddings
    tied = config.tie_word_embeddings
    arrays = {} if tied else {"decoder_ff_logit_out_Wt": weights["lm_head.weight"][: sizes[1]]}
    bias = weights.get("lm_head.bias", torch.zeros(config.target_vocab_size)).clone()
    bias[banned] = NEVER
    arrays["decoder_ff_logit_out_b"] = bias[: sizes[1]]
    for stack, size in zip(STACKS, sizes, strict=True):
        embedding = weights[f"model.{stack}.embed_tokens.weight"]
        arrays["Wemb" if shared else f"{stack}_Wemb"] = embedding[:size]
    for name, weight in weights.items():
        if match := re.fullmatch(r"model\.(\w+)\.layers\.(\d+)\.(.+)\.weight", name):
            stack, layer, module = match.groups()
            bias = weights.get(name.replace("weight", "bias"), torch.zeros(len(weight)))
            # Marian's matrices are (inputs, outputs)
            pair = (weight if weight.ndim == 1 else weight.T, bias)
            for marian_name, part in zip(IN_LAYER[module], pair, strict=True):
                arrays[f"{stack}_l{int(layer) + 1}_{marian_name}"] = part
    options = yaml.safe_load(_OPTIONS) | {
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "dim-emb": config.d_model,
        "dim-vocabs": sizes,
        "transformer-heads": config.encoder_attention_heads,
        "transformer-dim-ffn": config.encoder_ffn_dim,
        "transformer-decoder-dim-ffn": config.decoder_ffn_dim,
        "transformer-ffn-activation": _ACTIVATIONS[config.activation_function],
        "tied-embeddings-all": shared and tied,
        "tied-embeddings-src": shared and not tied,
        "tied-embeddings": tied and not shared,
    }
    # (n,) to (1, n)
    return {
        name: np.atleast_2d(np.ascontiguousarray(part.float().numpy()))
        for name, part in arrays.items()
    }, options
