"""State dictionaries of `torch.nn.Transformer`, and of the Transformers in well-known tutorials.

Such a file contains weights under module names, but neither the number of heads nor the activation. The names identify
the tutorial (`TUTORIALS`). The caller gives the rest.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from . import state_dicts
from .converting import Converted
from .state_dicts import STACKS, Renames, TensorRef

# To names of `torch.nn.Transformer`. `_locate_in_layer` resolves the fused projections.
TORCH_RENAMES: Renames = (
    (r"(encoder\.layers\.\d+)\.final_layer_norm", r"\1.norm2"),
    (r"(decoder\.layers\.\d+)\.final_layer_norm", r"\1.norm3"),
    ("self_attn_layer_norm", "norm1"),
    ("cross_attn_layer_norm", "norm2"),
    (r"coder\.layer_norm", "coder.norm"),
    ("cross_attn", "multihead_attn"),
    ("fc1", "linear1"),
    ("fc2", "linear2"),
)

# Ben Trevett's "Attention is All You Need" in pytorch-seq2seq
TREVETT_RENAMES: Renames = (
    ("embed_positions", "pos_embedding"),
    ("final_layer_norm", "ff_layer_norm"),
    ("cross_attn_layer_norm", "enc_attn_layer_norm"),
    (r"self_attn\.", "self_attention."),
    (r"cross_attn\.", "encoder_attention."),
    (r"\b(q|k|v)_proj", r"fc_\1"),
    ("out_proj", "fc_o"),
    ("fc1", "positionwise_feedforward.fc_1"),
    ("fc2", "positionwise_feedforward.fc_2"),
)

# The Annotated Transformer
ANNOTATED_RENAMES: Renames = (
    (r"(layers\.\d+)\.self_attn_layer_norm", r"\1.sublayer.0.norm"),
    (r"(layers\.\d+)\.cross_attn_layer_norm", r"\1.sublayer.1.norm"),
    (r"(encoder\.layers\.\d+)\.final_layer_norm", r"\1.sublayer.1.norm"),
    (r"(decoder\.layers\.\d+)\.final_layer_norm", r"\1.sublayer.2.norm"),
    (r"coder\.layer_norm", "coder.norm"),
    (r"norm\.weight", "norm.a_2"),
    (r"norm\.bias", "norm.b_2"),
    ("cross_attn", "src_attn"),
    *((rf"attn\.{part}_proj", f"attn.linears.{number}") for number, part in enumerate(("q", "k", "v", "out"))),
    ("fc1", "feed_forward.w_1"),
    ("fc2", "feed_forward.w_2"),
)


@dataclass(frozen=True)
class Naming:
    """The module names of one tutorial, and the settings that its code fixes."""

    source: str  #: the embedding modules and the output layer
    target: str
    output: str
    positions: tuple[str, ...]  #: tables of positions, for the source and the target
    settings: Mapping[str, Any]  #: fields of our configuration
    renames: Renames | None = None  #: for its layers; None for `torch.nn.Transformer`


# torchtext's order of the special tokens
_SPECIAL = {"unk_token_id": 0, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}

TUTORIALS = {
    "PyTorch's tutorial “Language Translation with nn.Transformer”": Naming(
        source="src_tok_emb.embedding",
        target="tgt_tok_emb.embedding",
        output="generator",
        positions=("positional_encoding.pos_embedding",),
        settings={"scale_embedding": True, **_SPECIAL},
    ),
    "Aladdin Persson's “seq2seq_transformer”": Naming(
        source="src_word_embedding",
        target="trg_word_embedding",
        output="fc_out",
        positions=("src_position_embedding.weight", "trg_position_embedding.weight"),
        settings={"scale_embedding": False, **_SPECIAL},
    ),
    "Ben Trevett's “pytorch-seq2seq”, Attention is All You Need": Naming(
        source="encoder.tok_embedding",
        target="decoder.tok_embedding",
        output="decoder.fc_out",
        positions=("encoder.pos_embedding.weight", "decoder.pos_embedding.weight"),
        settings={"scale_embedding": True, **_SPECIAL},
        renames=TREVETT_RENAMES,
    ),
    "The Annotated Transformer": Naming(
        source="src_embed.0.lut",
        target="tgt_embed.0.lut",
        output="generator.proj",
        positions=("src_embed.1.pe", "tgt_embed.1.pe"),
        # its text is post-norm, its code pre-norm; its vocabularies start with <s>, </s>, <blank>, <unk>
        settings={
            **{"scale_embedding": True, "layer_norm_position": "pre", "layer_norm_eps": 1e-12},
            **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3},
        },
        renames=ANNOTATED_RENAMES,
    ),
}

_TARGET_TABLE = "the target's table of positions"

# This tensor identifies attention-is-all-you-need-pytorch.
_NORMALISED_EMBEDDINGS = "encoder.layer_stack.0.slf_attn.w_qs.weight"


def from_torch(
    source: str | Path | Mapping[str, Tensor],
    heads: int | None = None,
    *,
    activation: str = "relu",
    norm_first: bool = False,
    layer_norm_eps: float | None = None,
    positions: str | None = None,
    scale_embedding: bool | None = None,
    source_embedding: str | None = None,
    target_embedding: str | None = None,
    output_layer: str | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    unk_token_id: int | None = None,
) -> Converted:
    """A model around `torch.nn.Transformer`, or one of a tutorial (`TUTORIALS`), without a tokenizer.

    Args:
        source: a file of `torch.save` or safetensors, or a state dictionary; wrappers ("state_dict", "module." …) are
            removed.
        heads: the number of heads of every attention. A state dictionary lacks it.
        activation: "relu" or "gelu".
        norm_first: `torch.nn.Transformer`'s option: True for pre-norm. A state dictionary lacks it.
        layer_norm_eps: default: 1e-5.
        positions: the name of a tensor, or one of the sinusoidal `POSITION_ENCODING_TYPES`.
        scale_embedding: multiply embeddings by sqrt(d_model).
        source_embedding, target_embedding, output_layer: names of modules, unless a tutorial fixes them.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: special tokens; the decoder starts from `bos`.
    """
    tensors = _unwrapped(source)
    if _NORMALISED_EMBEDDINGS in tensors:
        reason = "normalises the embeddings as well (Encoder.layer_norm), §3.4 does not"
        raise UserError(f"{_NORMALISED_EMBEDDINGS}: attention-is-all-you-need-pytorch {reason}")
    if heads is None:
        raise UserError("heads is missing: give the number of attention heads, which a state dictionary lacks")
    given = {"layer_norm_eps": layer_norm_eps, "scale_embedding": scale_embedding, "pad_token_id": pad_token_id}
    given |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "unk_token_id": unk_token_id}
    custom = (source_embedding, target_embedding or source_embedding, output_layer)
    naming = _naming(tensors, custom, positions)
    settings = {**naming.settings, **{name: value for name, value in given.items() if value is not None}}
    for name in ("scale_embedding", "pad_token_id", "bos_token_id", "eos_token_id"):
        if name not in settings:
            raise UserError(f"{name} is missing: give it, because these are no tutorial's names")
    if norm_first:
        settings["layer_norm_position"] = "pre"
    fields = {"activation_function": activation, "decoder_start_token_id": settings["bos_token_id"], **settings}
    fields |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    return Converted(_build(tensors, naming, fields, positions))


def _unwrapped(source: str | Path | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, without the wrappers of trainers and compilers."""
    state = source if isinstance(source, Mapping) else state_dicts.read_torch_file(source)
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    where = str(source) if isinstance(source, str | Path) else "the state dictionary"
    tensors = state_dicts.require_tensors(state, where)
    while all(name.startswith(("module.", "_orig_mod.", "model.")) for name in tensors):
        tensors = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
    return tensors


def _naming(tensors: Mapping[str, Tensor], custom: tuple[str | None, ...], positions: str | None) -> Naming:
    if all(custom):
        source, target, output = (str(name) for name in custom)
        tables = (positions,) if positions is not None and positions in tensors else ()
        return Naming(source, target, output, tables, {})
    for naming in TUTORIALS.values():
        if all(f"{name}.weight" in tensors for name in (naming.source, naming.output)):
            return naming
    raise UserError(
        f"these are the names of no known tutorial ({'; '.join(TUTORIALS)}): "
        f"give source_embedding, target_embedding and output_layer, the names of those modules"
    )


def _build(
    tensors: dict[str, Tensor], naming: Naming, fields: dict[str, Any], positions: str | None
) -> VanillaTransformerForConditionalGeneration:
    prefix, renames = "", naming.renames
    if renames is ANNOTATED_RENAMES:
        tensors = _with_biased_variance(tensors)
    if renames is None:
        prefix, renames = _prefix(tensors), TORCH_RENAMES
        tensors = _with_biases(tensors, prefix)
    matrices = (f"{name}.weight" for name in (naming.source, naming.target, naming.output))
    tying = state_dicts.find_tying(tensors, *matrices)
    fields = {**fields, **tying.fields, **_sizes(tensors, naming, prefix, renames)}
    fields["lm_head_bias"] = f"{naming.output}.bias" in tensors
    tables = [name for name in naming.positions if name in tensors]
    fields["position_encoding_type"] = positions if positions and positions not in tables else "sinusoidal"
    if tables:
        rows = {name: tensors[name].flatten(0, -2) for name in tables}  # (P, 1, D) or (1, P, D) to (P, D)
        fields["position_encoding_type"] = state_dicts.position_layout(rows.values())
        fields["max_position_embeddings"] = len(rows[tables[0]])
        # one table may serve both stacks
        tensors = {**tensors, **rows, _TARGET_TABLE: rows[tables[-1]]}
    learned = fields["position_encoding_type"] == "learned"

    def locate(name: str) -> str | TensorRef:
        is_source = ".encoder." in name
        if "embed_tokens" in name:
            return f"{naming.source if is_source else naming.target}.weight"
        if "embed_positions" in name:
            return tables[0] if is_source else _TARGET_TABLE
        if name.startswith("lm_head"):
            return name.replace("lm_head", naming.output)
        return _locate_in_layer(prefix + state_dicts.rename(name.removeprefix("model."), renames), fields["d_model"])

    unused = {_TARGET_TABLE, *tables} if not learned else set(tables[1:])
    return state_dicts.build_model(fields, tensors, locate, tying.copies | unused)


def _sizes(tensors: Mapping[str, Tensor], naming: Naming, prefix: str, renames: Renames) -> dict[str, Any]:
    """Widths and depths, and `final_layer_norm`."""
    layers = [f"{prefix}{stack}.layers." for stack in STACKS]
    ffn = state_dicts.rename("fc1.weight", renames)
    sizes: dict[str, Any] = state_dicts.find_sizes(tensors, f"{naming.source}.weight", layers, ffn)
    names = (prefix + state_dicts.rename(f"{stack}.layer_norm.weight", renames) for stack in STACKS)
    norms = [name in tensors for name in names]
    if any(norms) and not all(norms):
        raise UserError("one stack ends with a normalisation and the other does not: here both do, or neither")
    return sizes | {"final_layer_norm": all(norms)}


def _locate_in_layer(name: str, width: int) -> str | TensorRef:
    """The tensor of a parameter. `torch.nn.MultiheadAttention` fuses the projections of queries, keys and values."""
    fused = re.fullmatch(r"(.*)\.([qkv])_proj\.(weight|bias)", name)
    if not fused:
        return name
    third = "qkv".index(fused[2])
    return TensorRef(f"{fused[1]}.in_proj_{fused[3]}", slice(third * width, (third + 1) * width))


def _with_biased_variance(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scale the gains: the Annotated Transformer divides by the unbiased standard deviation + 1e-6."""

    def gain(tensor: Tensor) -> Tensor:
        return tensor * math.sqrt((len(tensor) - 1) / len(tensor))

    return {name: gain(tensor) if name.endswith("norm.a_2") else tensor for name, tensor in tensors.items()}


def _prefix(tensors: Mapping[str, Tensor]) -> str:
    """The prefix of the names of `torch.nn.Transformer`."""
    for name in tensors:
        if match := re.fullmatch(r"(.*?)encoder\.layers\.0\.self_attn\.in_proj_weight", name):
            return match[1]
    raise UserError("there is no …encoder.layers.0.self_attn.in_proj_weight: this is no torch.nn.Transformer")


def _with_biases(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Add zeros for missing biases: `bias=False` leaves out every bias of `torch.nn.Transformer`."""
    filled = dict(tensors)
    for name, weight in tensors.items():
        bias = re.sub("weight$", "bias", name)
        if name.startswith(prefix) and re.search(r"coder\..*weight$", name) and bias not in tensors:
            filled[bias] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return filled
