"""State dictionaries of models around `torch.nn.Transformer`.

Such a file contains weights under module names, but neither the number of heads nor the activation. The names give the
role of each tensor (`torch_roles`). The caller gives the rest.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import POSITION_ENCODING_TYPES
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from . import state_dicts, vocabularies
from .converted import Converted, Fields, File, Tensors
from .torch_roles import (
    Around,
    around_stacks,
    is_transformer,
    locate_in_stacks,
    one_model,
    paths_of_stacks,
    stack_paths,
)

# The usual names of special tokens.
_USUAL_NAMES = {
    "unk_token_id": ("<unk>", "[UNK]"),
    "pad_token_id": ("<pad>", "[PAD]", "<blank>"),
    "bos_token_id": ("<bos>", "<s>", "<sos>", "[BOS]", "[SOS]"),
    "eos_token_id": ("<eos>", "</s>", "[EOS]"),
}
_TABLES = ("the source's table of positions", "the target's table of positions")


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
    """A model around `torch.nn.Transformer`, or around its encoder and decoder.

    Args:
        source: a file of `torch.save` or safetensors, or a state dictionary. It may be part of what a trainer saved,
            or a whole module. Wrappers and prefixes ("state_dict", "module." …) are removed.
        heads: the number of heads of every attention. A state dictionary lacks it.
        activation: "relu" or "gelu". A state dictionary lacks it. Default: "relu", with a note.
        norm_first: `torch.nn.Transformer`'s option: True for pre-norm. A state dictionary lacks it. Default: False,
            with a note.
        layer_norm_eps: default: 1e-5.
        positions: the name of a tensor, or one of the sinusoidal `POSITION_ENCODING_TYPES`.
        scale_embedding: multiply embeddings by sqrt(d_model).
        source_embedding, target_embedding, output_layer: names of modules. Default: found by the words in their names.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: special tokens. The decoder starts from `bos`.
        tokenizer, target_tokenizer: a tokenizer.json of the tokenizers library, or a folder of one of transformers.
            One may serve both sides.
            As in the tutorials, a source starts with `bos` and ends with `eos`, unless a folder says otherwise.
    """
    if heads is None:
        raise UserError(
            "heads is missing: give the number of attention heads, which a state dictionary lacks"
        )
    state = source if isinstance(source, Mapping) else state_dicts.read_torch_file(source)
    where = str(source) if isinstance(source, str | Path) else "the state dictionary"
    siblings: list[str] = []
    weights = state_dicts.find_weights(state, is_transformer, where, siblings)
    tensors = one_model(weights)
    paths = stack_paths(tensors, where)
    width = tensors[f"{paths['encoder']}.layers.0.self_attn.in_proj_weight"].shape[-1]
    modules = source_embedding, target_embedding, output_layer
    around = _around(tensors, paths, width, modules, positions)
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
    settings, notes = _settings(requested, bool(around.positions), positions)
    fields = settings | {
        "decoder_start_token_id": settings["bos_token_id"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }
    fields |= _position_fields(tensors, around, positions)
    model, others = _build(tensors, paths, around, fields)
    others += siblings
    if len(paths_of_stacks(weights)["decoder"]) > 1:
        others.append("copies of it, such as an average")
    if others:
        notes.append(f"not part of the model, and left out: {', '.join(others)}")
    files = vocabularies.both_sides(tokenizer, target_tokenizer)
    if not files:
        return Converted(model, notes=notes)
    source_tokenizer = _tokenizer(files[0], settings, starts=True)
    for_target = _tokenizer(files[1], settings, starts=False)
    for path, each in zip(files, (source_tokenizer, for_target), strict=True):
        notes += _notes_on_ids(each, settings, path)
    return Converted(model, source_tokenizer, for_target, notes)


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


def _around(
    tensors: Tensors,
    paths: dict[str, str],
    width: int,
    modules: Sequence[str | None],
    positions: str | None,
) -> Around:
    """The tensors around the stacks: those of the named `modules`, and of the others those found by their names."""
    source, target, output = (None if name is None else f"{name}.weight" for name in modules)
    for name in (source, target, output):
        if name is not None and name not in tensors:
            raise UserError(f"there is no tensor {name}")
    around = around_stacks(tensors, paths, width, source, target or source, output)
    if positions is None or positions in POSITION_ENCODING_TYPES:
        return around
    if positions not in tensors:
        raise UserError(
            f"positions={positions}: neither a tensor nor one of {', '.join(POSITION_ENCODING_TYPES)}"
        )
    return around._replace(positions=[positions])


def _settings(
    requested: Fields, has_table: bool, positions: str | None
) -> tuple[Fields, list[str]]:
    """The requested settings, and PyTorch's defaults with a note on each."""
    settings = {name: value for name, value in requested.items() if value is not None}
    for name in ("scale_embedding", "pad_token_id", "bos_token_id", "eos_token_id"):
        if name not in settings:
            raise UserError(f"{name} is missing: give it, because a state dictionary lacks it")
    notes = []
    if "activation_function" not in settings:
        settings["activation_function"] = "relu"
        notes.append("read with activation=relu; or give activation")
    if positions is None and not has_table:
        notes.append("read with sinusoidal positions, because there is no table; or give positions")
    if "layer_norm_position" not in settings:
        settings["layer_norm_position"] = "post"
        notes.append("read as post-norm, PyTorch's default; or give norm_first")
    return settings, notes


def _build(
    tensors: Tensors, paths: dict[str, str], around: Around, fields: Fields
) -> tuple[VanillaTransformerForConditionalGeneration, list[str]]:
    """The model, and the names of tensors under another prefix."""
    names = {
        "model.encoder.embed_tokens.weight": around.source,
        "model.decoder.embed_tokens.weight": around.target,
        "lm_head.weight": around.output,
        "lm_head.bias": around.output.replace("weight", "bias"),
        "model.encoder.embed_positions.weight": _TABLES[0],
        "model.decoder.embed_positions.weight": _TABLES[1],
    }
    parts = [*list(names.values())[:3], *paths.values()]
    root = os.path.commonprefix([name.split(".")[:-1] for name in parts])
    kept = "".join(f"{module}." for module in root), *around.positions, *_TABLES
    others = [name for name in tensors if not name.startswith(kept)]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in others}
    fields["final_layer_norm"] = f"{paths['encoder']}.norm.weight" in tensors
    is_learned = fields["position_encoding_type"] == "learned"
    unused = [*around.positions, *(() if is_learned else _TABLES)]
    width = tensors[around.source].shape[1]
    in_stacks = locate_in_stacks(paths, width)

    def locate(name: str) -> str | state_dicts.TensorRef:
        return names.get(name) or in_stacks(name)

    stacks = "|".join(map(re.escape, paths.values()))
    # but for those of attention, which stacks with `bias=False` lack here, too
    biased = re.compile(rf"(?:{stacks})\..*\b(?:linear[12]|norm\d?)\.weight")
    tensors = state_dicts.with_zero_biases(tensors, biased)
    return state_dicts.build_model(fields, tensors, locate, unused), others


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
