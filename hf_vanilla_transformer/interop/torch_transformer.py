"""State dictionaries of `torch.nn.Transformer`, and of the Transformers in tutorials.

Such a file contains weights under module names, but neither the number of heads nor the activation. The names give the
role of each tensor (`torch_roles`). The caller gives the rest.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import POSITION_ENCODING_TYPES
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from . import state_dicts, vocabularies
from .converted import Converted, Fields, File, Tensors
from .state_dicts import STACKS, TensorRef
from .torch_roles import Around, around_layers, is_transformer, layer_refs, one_model, with_around

# The usual names of special tokens.
_USUAL_NAMES = {
    "unk_token_id": ("<unk>", "[UNK]"),
    "pad_token_id": ("<pad>", "[PAD]", "<blank>"),
    "bos_token_id": ("<bos>", "<s>", "<sos>", "[BOS]", "[SOS]"),
    "eos_token_id": ("<eos>", "</s>", "[EOS]"),
}
_TABLES = ("the source's table of positions", "the target's table of positions")
_GAINS_OF_UNBIASED_NORMS = (".a_2", ".alpha")

# This tensor identifies attention-is-all-you-need-pytorch.
_NORMALISED_EMBEDDINGS = "encoder.layer_stack.0.slf_attn.w_qs.weight"


def from_torch(
    source: str | Path | Tensors,
    heads: int | None = None,
    *,
    activation: str | None = None,
    norm_first: bool | None = None,
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
    tokenizer: File = None,
    target_tokenizer: File = None,
) -> Converted:
    """A model around `torch.nn.Transformer`, or one of a tutorial.

    Args:
        source: a file of `torch.save` or safetensors, or a state dictionary. It may be part of what a trainer saved,
            or a whole module. Wrappers and prefixes ("state_dict", "module." …) are removed.
        heads: the number of heads of every attention. A state dictionary lacks it.
        activation: "relu" or "gelu". A state dictionary lacks it. Default: "relu", with a note.
        norm_first: `torch.nn.Transformer`'s option: True for pre-norm. A state dictionary lacks it. Default: False for
            `torch.nn.Transformer`, and otherwise True if a normalisation follows each stack.
        layer_norm_eps: default: 1e-5.
        positions: the name of a tensor, or one of the sinusoidal `POSITION_ENCODING_TYPES`.
        scale_embedding: multiply embeddings by sqrt(d_model).
        source_embedding, target_embedding, output_layer: names of modules. Default: found by the words in their names.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: special tokens. The decoder starts from `bos`.
        tokenizer, target_tokenizer: a tokenizer.json of the tokenizers library, or a folder of one of transformers.
            One may serve both sides.
            As in the tutorials, a source starts with `bos` and ends with `eos`, unless a folder says otherwise.
    """
    state = source if isinstance(source, Mapping) else state_dicts.read_torch_file(source)
    where = str(source) if isinstance(source, str | Path) else "the state dictionary"
    siblings: list[str] = []
    weights = state_dicts.find_weights(state, is_transformer, where, siblings)
    tensors, copies = one_model(weights, where)
    _require_convertible(tensors, heads)
    refs, unordered = layer_refs(tensors)
    width = tensors[refs["model.encoder.layers.0.fc1.weight"].name].shape[-1]
    around = _around(tensors, width, (source_embedding, target_embedding, output_layer), positions)
    requested = {
        "activation_function": activation,
        "layer_norm_position": None if norm_first is None else "pre" if norm_first else "post",
        "layer_norm_eps": layer_norm_eps,
        "scale_embedding": scale_embedding,
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "unk_token_id": unk_token_id,
    }
    is_of_torch = any("in_proj" in ref.name for ref in refs.values())
    settings, notes = _settings(around, requested, positions, is_of_torch)
    fields = settings | {
        "decoder_start_token_id": settings["bos_token_id"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }
    model, others = _build(tensors, refs, around, fields, positions)
    _check_forward(model)
    if any(ref.rows is not None for ref in refs.values()) and not is_of_torch:
        notes.append("fused projections are read as all queries, then keys, then values")
    if not is_of_torch and not any(name.endswith("layer_norm.bias") for name in refs):
        notes.append("its normalisations have no biases, and are read as LayerNorm, not as RMSNorm")
    others += [*(f"{prefix}*" for prefix in copies), *siblings]
    if others:
        notes.append(f"not part of the model, and left out: {', '.join(others)}")
    if unordered := [*unordered, *around.unordered]:
        notes.append(
            f"read in the order of the file, because no name tells it: {', '.join(unordered)}"
        )
    files = vocabularies.both_sides(tokenizer, target_tokenizer)
    if not files:
        return Converted(model, notes=notes)
    source_tokenizer = _tokenizer(files[0], settings, starts=True)
    for_target = _tokenizer(files[1], settings, starts=False)
    for path, each in zip(files, (source_tokenizer, for_target), strict=True):
        notes += _notes_on_ids(each, settings, path)
    return Converted(model, source_tokenizer, for_target, notes)


def _require_convertible(tensors: Tensors, heads: int | None) -> None:
    if any(f".{name}".endswith(f".{_NORMALISED_EMBEDDINGS}") for name in tensors):
        reason = "normalises the embeddings as well (Encoder.layer_norm), §3.4 does not"
        raise UserError(f"{_NORMALISED_EMBEDDINGS}: attention-is-all-you-need-pytorch {reason}")
    if heads is None:
        raise UserError(
            "heads is missing: give the number of attention heads, which a state dictionary lacks"
        )


def _tokenizer(path: Path, settings: Fields, starts: bool) -> PreTrainedTokenizerBase:
    ids = {name.removesuffix("_id"): settings.get(name) for name in _USUAL_NAMES}
    return vocabularies.given_tokenizer(path, ids, starts)


def _notes_on_ids(tokenizer: PreTrainedTokenizerBase, settings: Fields, path: Path) -> list[str]:
    """A note on each special token that the vocabulary has under its usual name with another id."""
    vocabulary = tokenizer.get_vocab()
    notes = []
    for field, names in _USUAL_NAMES.items():
        known = {name: vocabulary[name] for name in names if name in vocabulary}
        if known and settings.get(field) not in known.values():
            listed = ", ".join(f"{name} with the id {number}" for name, number in known.items())
            notes.append(f"{field}={settings.get(field)}, but {path} has {listed}")
    return notes


@torch.no_grad()
def _check_forward(model: VanillaTransformerForConditionalGeneration) -> None:
    """Raise a UserError if the model does not compute finite numbers, as after a wrong guess of a tensor's role."""
    config = model.config
    ids = torch.arange(3)[None] % min(config.vocab_size, config.target_vocab_size)
    if not torch.isfinite(model(input_ids=ids, decoder_input_ids=ids).logits).all():
        raise UserError(
            "the model computes numbers that are not finite: the settings do not fit its weights"
        )


def _around(
    tensors: Tensors, width: int, modules: Sequence[str | None], positions: str | None
) -> Around:
    """The tensors around the layers: those of the named `modules`, and of the others those found by their names."""
    source, target, output = (None if name is None else f"{name}.weight" for name in modules)
    for name in (source, target, output):
        if name is not None and name not in tensors:
            raise UserError(f"there is no tensor {name}")
    around = around_layers(tensors, width, source, target or source, output)
    if positions is None or positions in POSITION_ENCODING_TYPES:
        return around
    if positions not in tensors:
        raise UserError(
            f"positions={positions}: neither a tensor nor one of {', '.join(POSITION_ENCODING_TYPES)}"
        )
    return around._replace(positions=[positions])


def _settings(
    around: Around, requested: Fields, positions: str | None, is_of_torch: bool
) -> tuple[Fields, list[str]]:
    """The requested settings, and likely ones with a note on each."""
    settings = {name: value for name, value in requested.items() if value is not None}
    for name in ("scale_embedding", "pad_token_id", "bos_token_id", "eos_token_id"):
        if name not in settings:
            raise UserError(f"{name} is missing: give it, because a state dictionary lacks it")
    notes = []
    if "activation_function" not in settings:
        settings["activation_function"] = "relu"
        notes.append("read with activation=relu; or give activation")
    if positions is None and not around.positions:
        notes.append("read with sinusoidal positions, because there is no table; or give positions")
    if "layer_norm_position" not in settings:
        position, reason = _likely_norm_position(around, is_of_torch)
        settings["layer_norm_position"] = position
        notes.append(f"read as {position}-norm, because {reason}; or give norm_first")
    return settings, notes


def _likely_norm_position(around: Around, is_of_torch: bool) -> tuple[str, str]:
    """The place of the normalisations, which a state dictionary lacks, and the reason to think so."""
    if is_of_torch:
        return "post", "this is the default of torch.nn.Transformer"
    if around.norms:
        return "pre", "a normalisation follows the stacks"
    return "post", "no normalisation follows the stacks"


def _build(
    tensors: Tensors,
    refs: dict[str, TensorRef],
    around: Around,
    fields: Fields,
    positions: str | None,
) -> tuple[VanillaTransformerForConditionalGeneration, list[str]]:
    """The model, and the names of tensors under another prefix."""
    refs = with_around(refs, around, tensors)
    fields["final_layer_norm"] = bool(around.norms)
    fields["attention_bias"] = any("_proj.bias" in name for name in refs)
    if any(ref.name.endswith(_GAINS_OF_UNBIASED_NORMS) for ref in refs.values()):
        fields.setdefault("layer_norm_eps", state_dicts.EPSILON_OF_UNBIASED_NORMS)
    tensors = _with_norms_and_biases(tensors, refs, fields)
    fields |= _position_fields(tensors, around, positions)
    used = {ref.name for ref in refs.values()}
    unused = {*around.positions}
    for stack, name in zip(STACKS, _TABLES, strict=True):
        refs[f"model.{stack}.embed_positions.weight"] = TensorRef(name)
        if fields["position_encoding_type"] != "learned":
            unused.add(name)
    modules = os.path.commonprefix([name.split(".")[:-1] for name in used])
    kept = "".join(f"{module}." for module in modules), *_TABLES, *used, *around.positions
    others = [name for name in tensors if not name.startswith(kept)]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in others}
    model = state_dicts.build_model(fields, tensors, lambda name: refs.get(name, name), unused)
    return model, others


def _with_norms_and_biases(tensors: Tensors, refs: dict[str, TensorRef], fields: Fields) -> Tensors:
    """The tensors with a bias for each weight that needs one here, and with PyTorch's formula of the normalisation.

    A gain that is one number becomes a vector. The Annotated Transformer divides by the unbiased standard deviation.
    """
    width = tensors[refs["model.encoder.embed_tokens.weight"].name].shape[1]
    filled = dict(tensors)
    for name, ref in list(refs.items()):
        is_norm = "layer_norm" in name
        if is_norm and tensors[ref.name].shape == (1,):
            filled[ref.name] = tensors[ref.name].expand(width)
        if is_norm and ref.name.endswith(_GAINS_OF_UNBIASED_NORMS):
            filled[ref.name] = state_dicts.gain_of_biased_variance(filled[ref.name])
        bias = name.replace("weight", "bias")
        needs_bias = is_norm or ".fc" in name or ("_proj" in name and fields["attention_bias"])
        if needs_bias and bias not in refs:
            weight = state_dicts.referred(filled[ref.name], ref)
            filled[bias] = weight.new_zeros(len(weight))
            refs[bias] = TensorRef(bias)
    return filled


def _position_fields(tensors: Tensors, around: Around, positions: str | None) -> Fields:
    """The fields of positions. Their tables get the names of `_TABLES` in `tensors`."""
    # (P, 1, D) or (1, P, D) to (P, D)
    tables = [tensors[name].flatten(0, -2) for name in around.positions]
    if not tables and positions == "learned":
        raise UserError("positions=learned: there is no table of positions")
    if not tables:
        return {"position_encoding_type": positions or "sinusoidal"}
    length = min(map(len, tables))
    for name, table in zip(_TABLES, (tables[0], tables[-1]), strict=True):
        tensors[name] = table[:length]
    layout = state_dicts.position_layout(tensors[name] for name in _TABLES)
    if positions in POSITION_ENCODING_TYPES and positions != layout:
        raise UserError(
            f"positions={positions}: {around.positions[0]} is a table of {layout} positions"
        )
    return {"position_encoding_type": layout, "max_position_embeddings": length}
