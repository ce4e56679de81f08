"""Marian's own checkpoints: an .npz with weights and options, and the vocabularies in the same folder."""

import math
import re
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..layers_vanilla_transformer import sinusoidal_positions
from ..untrusted import one_line, parse_yaml_mapping, require_file, shown
from . import state_dicts, vocabularies
from .converting import Converted
from .options import Options
from .state_dicts import STACKS, TensorRef
from .transformers_folders import set_generation_config

OPTIONS = "special:model.yml"
EPSILON = 1e-6  # `layerNorm` of its Transformer
MAX_POSITIONS = 1024  # rows of the table that replaces Marian's formula
NEVER = -1e4  # output bias of the tokens that Marian does not have
PAD = "<pad>"
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": PAD}

# Seen in 1.12.42: with the keys and values of later steps unnormalised, its log-probabilities are found again.
PRE_NORM_NOTE = (
    "its scores are those of Marian's training and scorer; marian-decoder leaves the self-attention's keys and values "
    "unnormalised from the second token on, so its translations differ"
)

ACTIVATIONS = {"relu": "relu", "swish": "silu"}
_LAST_WITH_APPROXIMATE_GELU = (1, 12, 0)  # whose "gelu" is x · sigmoid(1.702 x); in March 2023 it became exact
_MAX_EXPANSION = 10  # of a compressed .npz: floats hardly shrink
_FILES_OF_TRAINING = (".optimizer.npz", ".orig.npz")

# Options of other architectures: the supported values, and what others mean.
REFUSED: dict[str, tuple[tuple, str]] = {
    "type": (("transformer",), "is another kind of model"),
    "transformer-postprocess-emb": (("", "d"), "normalises the embeddings, §3.4 does not"),
    "transformer-decoder-autoreg": (("self-attention",), "has a decoder without self-attention (§3.2.3)"),
    "transformer-no-projection": ((False,), "leaves out W^O (§3.2.2)"),
    "transformer-ffn-depth": ((2,), "has another number of matrices in a feed-forward network than Eq. 2"),
    "transformer-decoder-ffn-depth": ((0, 2), "has another number of matrices in a feed-forward network than Eq. 2"),
    "transformer-aan-only": ((False,), "has average attention"),
    "transformer-tied-layers": (([],), "uses layers of the decoder more than once"),
    "ulr": ((False,), "has universal language representations"),
    "lemma-dim-emb": ((0,), "has factored tokens"),
    "input-types": (([],), "has inputs other than tokens"),
    "input-reorder": (([],), "reads its inputs in another order"),
    "right-left": ((False,), "reads and writes sentences from right to left"),
    "transformer-disable-position-embeddings": ((False,), "leaves out the positions of §3.5"),
    "transformer-pool": ((False,), "pools the encoder's states"),
}

# Options that place the normalisations: before and after each sub-layer, and after each stack.
_NORMALISATIONS = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
_POSITIONS: dict[tuple[str, ...], str] = {("", "an", ""): "post", ("n", "a", "n"): "pre"}

# Within a layer: our modules, and Marian's names of their weight and bias.
_IN_LAYER = {
    "fc1": ("ffn_W1", "ffn_b1"),
    "fc2": ("ffn_W2", "ffn_b2"),
    "final_layer_norm": ("ffn_ffn_ln_scale", "ffn_ffn_ln_bias"),
}
for _ours, _theirs in (("self_attn", "self"), ("cross_attn", "context")):
    _IN_LAYER[f"{_ours}_layer_norm"] = (f"{_theirs}_Wo_ln_scale", f"{_theirs}_Wo_ln_bias")
    for _part, _letter in zip(("q_proj", "k_proj", "v_proj", "out_proj"), "qkvo", strict=True):
        _IN_LAYER[f"{_ours}.{_part}"] = (f"{_theirs}_W{_letter}", f"{_theirs}_b{_letter}")


def from_marian_npz(
    source: str | Path,
    *,
    source_vocabulary: str | Path | None = None,
    target_vocabulary: str | Path | None = None,
    source_sentencepiece: str | Path | None = None,
    target_sentencepiece: str | Path | None = None,
) -> Converted:
    """A Transformer that Marian trained, post-norm or pre-norm.

    Its sinusoids have fairseq's wavelengths but start at position 0, so they become `MAX_POSITIONS` rows of "learned"
    positions. (transformers' `MarianMTModel` and CTranslate2 use slightly different ones.) Its decoder starts from a
    zero vector instead of an embedding: here from a padding token, which is added to the vocabulary with a zero row.

    Args:
        source: model.npz, or a folder with one .npz, or one that its decoder.yml or NAME.npz.decoder.yml names.
        source_vocabulary, target_vocabulary: .yml or .spm; default: the files that the options name, if they are in
            the model's folder.
        source_sentencepiece, target_sentencepiece: the models that tokenize for a .yml vocabulary; default: source.spm
            and target.spm, if they are in the model's folder. Without them the tokenizer takes tokenized text.

    Returns:
        The model, with the settings of Marian's search as far as `generate` has them, and its tokenizer.

    Raises:
        UserError: an option that cannot be expressed here, damaged or missing files.
    """
    path, decoder = _model_file(Path(source))
    arrays, options = _read(path)
    _refuse(options, path)
    tensors = state_dicts.require_tensors({name: _tensor(name, array) for name, array in arrays.items()}, str(path))
    tensors, pad = _with_padding(tensors)
    tying = state_dicts.find_tying(tensors, "encoder_Wemb", "decoder_Wemb", "output")
    sizes = state_dicts.width_and_depth(tensors, "encoder_Wemb", ("encoder_l", "decoder_l"))
    tensors, positions = _positions(tensors, options, sizes["d_model"])
    fields = {
        **sizes,
        **{f"{stack}_layers": sizes[f"{stack}_layers"] - 1 for stack in STACKS},  # Marian counts layers from 1
        **tying.fields,
        **positions,
        **{f"{stack}_attention_heads": options.integer("transformer-heads", 8, 1) for stack in STACKS},
        **{f"{stack}_ffn_dim": state_dicts.require_matrix(tensors, f"{stack}_l1_ffn_W1").shape[1] for stack in STACKS},
        "activation_function": _activation(options),
        "layer_norm_position": _POSITIONS[_normalisations(options)],
        "dropout": options.number("transformer-dropout", 0.0, 0.0),
        "layer_norm_eps": EPSILON,
        "lm_head_bias": True,
    }
    paths = _vocabulary_files(path, options, decoder, source_vocabulary, target_vocabulary)
    sides = [_tokens(each) for each in paths]
    ids = _special_ids(sides, pad)
    locate = partial(_locate, pre_norm=fields["layer_norm_position"] == "pre")
    model = state_dicts.build_model({**fields, **ids}, tensors, locate, tying.copies)
    special = {name: number for name, number in ids.items() if name != "unk_token_id"}
    set_generation_config(model, special | _search(decoder, ids["unk_token_id"]))
    spm_models = source_sentencepiece, target_sentencepiece
    converted = _with_tokenizers(model, paths, [_with_unused(side, pad) for side in sides], spm_models)
    dropped = [f"--{name}" for name in ("word-penalty",) if decoder.number(name, 0.0)]
    notes = [converted.note, *(f"`generate` has no {name}, so it is dropped" for name in dropped)]
    if fields["layer_norm_position"] == "pre":
        notes.append(PRE_NORM_NOTE)
    if converted.tokenizer is None and (named := _vocabulary_names(options, decoder)):
        notes.append(f"its vocabularies {' and '.join(map(shown, named))} are not in its folder")
    converted.note = "; ".join(filter(None, notes))
    return converted


def _search(decoder: Options, unk: int | None) -> dict[str, Any]:
    """The options of marian-decoder under the names of `generate`, with Marian's defaults."""
    normalize = decoder.values.get("normalize")
    search: dict[str, Any] = {
        "num_beams": decoder.integer("beam-size", 12, 1),
        "length_penalty": float(normalize) if isinstance(normalize, bool) else decoder.number("normalize", 0.0),
    }
    return search if decoder.flag("allow-unk") else {**search, "suppress_tokens": [unk]}


def _activation(options: Options) -> str:
    name = options.text("transformer-ffn-activation", "swish")
    if name != "gelu":
        return ACTIVATIONS[name]
    version = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", options.text("version"))
    is_exact = version is not None and tuple(map(int, version.groups())) > _LAST_WITH_APPROXIMATE_GELU
    return "gelu" if is_exact else "quick_gelu"


def _model_file(source: Path) -> tuple[Path, Options]:
    """The .npz, and the options of decoding: of NAME.npz.decoder.yml, which training writes, or of decoder.yml."""
    folder = source if source.is_dir() else source.parent
    if not source.is_dir():
        beside = [source.with_name(f"{source.name}.decoder.yml"), folder / "decoder.yml"]
        written = next((path for path in beside if path.is_file()), None)
        return require_file(source), Options({}) if written is None else _read_options(written)
    found = [path for path in sorted(folder.glob("*.npz")) if not path.name.endswith(_FILES_OF_TRAINING)]
    for path in [folder / "decoder.yml", folder / "model.npz.decoder.yml", *sorted(folder.glob("*.npz.decoder.yml"))]:
        if path.is_file() and "models" in (decoder := _read_options(path)):
            named = [folder / Path(name).name for name in decoder.texts("models")]
            if len(named) != 1 or not named[0].is_file():
                raise UserError(f"{path}: it names {len(named)} models; name the .npz file to convert")
            return named[0], decoder
    if len(found) != 1:
        raise UserError(f"{source}: {len(found)} models there; name the .npz file")
    return _model_file(found[0])


def _read(path: Path) -> tuple[dict[str, np.ndarray], Options]:
    """The arrays, and the options that Marian stores as one of them."""
    try:
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = one_line(error)
        if "pickle" in reason:  # numpy advises to allow it, which would run code
            reason = "it holds Python objects; nothing of it was run"
        raise UserError(f"{path}: no .npz of Marian, or a damaged one ({reason})") from None
    stored, separate = arrays.pop(OPTIONS, None), path.with_name(f"{path.name}.yml")
    if stored is not None:
        content = stored.tobytes().rstrip(b"\0")
        return arrays, Options(parse_yaml_mapping(content, f"{path}: {OPTIONS}: no options of Marian"), f"{path}: --")
    if not separate.is_file():
        raise UserError(f"{path}: it lacks {OPTIONS}, and its folder {separate.name}")
    return arrays, _read_options(separate)


def _check_sizes(path: Path) -> None:
    """Raise a ValueError for an archive whose arrays are larger than its file can hold."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > _MAX_EXPANSION * path.stat().st_size:
            raise ValueError("its arrays are far larger than the file")
        for member in members:
            with archive.open(member) as file:
                formats = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, _, dtype = formats[np.lib.format.read_magic(file)](file)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"{shown(member.filename)} is larger than what the file holds of it")


def _read_options(path: Path) -> Options:
    return Options(parse_yaml_mapping(path.read_bytes(), f"{path}: no options of Marian"), f"{path}: --")


def _normalisations(options: Options) -> tuple[str, ...]:
    """The three options without "d", which is dropout."""
    defaults = ("", "dan", "")
    return tuple(
        options.text(name, default).replace("d", "") for name, default in zip(_NORMALISATIONS, defaults, strict=True)
    )


def _refuse(options: Options, path: Path) -> None:
    for name, (supported, reason) in REFUSED.items():
        value = options.values.get(name, supported[0])
        if value not in supported and value is not None:
            raise UserError(f"{path}: --{name} {shown(value)!r}: such a model {reason}")
    if _normalisations(options) not in _POSITIONS:
        given = ", ".join(f"--{name} {shown(options.text(name))!r}" for name in _NORMALISATIONS)
        raise UserError(f"{path}: {given}: such a model is neither post-norm (§3.1) nor pre-norm")
    activation = options.text("transformer-ffn-activation", "swish")
    if activation not in (*ACTIVATIONS, "gelu"):
        known = ", ".join((*ACTIVATIONS, "gelu"))
        raise UserError(f"{path}: --transformer-ffn-activation {shown(activation)!r} is none of {known}")
    for vocabulary in options.texts("vocabs"):
        if vocabulary.endswith(".fsv"):
            raise UserError(f"{path}: --vocabs {shown(vocabulary)}: such a model has factored tokens")


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind != "f":
        raise UserError(f"{name} is {array.dtype}: quantised weights cannot be converted")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]  # (1, n) to (n,)
    return torch.from_numpy(np.ascontiguousarray(array))


def _with_padding(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Both embeddings and the output matrix under one name each, zero-padded up to the row of the padding; its id."""
    rest = dict(tensors)
    shared = rest.pop("Wemb", None)
    found: dict[str, Tensor] = {}
    for name in ("encoder_Wemb", "decoder_Wemb"):
        matrix = rest.pop(name, shared)
        if matrix is None or matrix.ndim != 2:
            raise UserError(f"there is no matrix {name} or Wemb: this is no encoder-decoder Transformer of Marian")
        found[name] = matrix
    found["output"] = rest.pop("decoder_ff_logit_out_Wt", found["decoder_Wemb"])
    if "decoder_ff_logit_out_W" in rest:
        found["output"] = rest.pop("decoder_ff_logit_out_W").T
    pad = max(len(matrix) for matrix in found.values())
    bias = rest.pop("decoder_ff_logit_out_b", torch.zeros(len(found["output"]), dtype=found["output"].dtype))
    rest |= {name: F.pad(matrix, (0, 0, 0, pad + 1 - len(matrix))) for name, matrix in found.items()}
    rest["output bias"] = F.pad(bias, (0, pad + 1 - len(bias)), value=NEVER)
    return rest, pad


def _positions(tensors: dict[str, Tensor], options: Options, width: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    # its option has a longer name than the one under which old versions stored it
    learned = any(options.flag(f"transformer-train-{name}") for name in ("positions", "position-embeddings"))
    if learned:
        if "Wpos" not in tensors:
            raise UserError("Wpos is missing, the table of --transformer-train-positions")
        table = tensors.pop("Wpos")
    else:
        # fairseq's formula: sin(p · 10000^(-i / (D/2 - 1))), then the cosines; p from 0
        table = sinusoidal_positions(torch.arange(MAX_POSITIONS)[None], width, "sinusoidal_fairseq")[0]  # (P, D)
    tensors = {**tensors, "encoder positions": table, "decoder positions": table}
    fields = {"position_encoding_type": "learned", "max_position_embeddings": len(table)}
    return tensors, {**fields, "scale_embedding": not learned}


def _locate(name: str, pre_norm: bool) -> str | TensorRef:
    if name.startswith("lm_head"):
        return "output" if name.endswith("weight") else "output bias"
    stack, rest = name.removeprefix("model.").split(".", 1)
    if rest.startswith("layer_norm."):
        return f"{stack}_top_ln_{'scale' if rest.endswith('weight') else 'bias'}"
    if rest.startswith("embed_"):
        return f"{stack}_Wemb" if rest == "embed_tokens.weight" else f"{stack} positions"
    _, number, module = rest.split(".", 2)
    module, kind = module.rsplit(".", 1)
    theirs = f"{stack}_l{int(number) + 1}_{_IN_LAYER[module][kind == 'bias']}"
    if pre_norm and "norm" in module:
        theirs += "_pre"
    return TensorRef(theirs, transposed=kind == "weight" and "norm" not in module)


def _vocabulary_files(path: Path, options: Options, decoder: Options, *given: str | Path | None) -> list[Path]:
    """The vocabularies of source and target, given or named by the options; none if these do not exist."""
    if any(given):
        source, target = given
        return [Path(source or target or ""), Path(target or source or "")]
    named = [path.parent / Path(name).name for name in _vocabulary_names(options, decoder)]
    return [named[0], named[-1]] if named and all(file.is_file() for file in named) else []


def _vocabulary_names(options: Options, decoder: Options) -> list[str]:
    return decoder.texts("vocabs") or options.texts("vocabs")


def _tokens(path: Path) -> list[str]:
    """The tokens of a vocabulary, by id."""
    if path.suffix == ".spm":
        return vocabularies.sentencepiece_pieces(path)
    if require_file(path).suffix not in (".yml", ".yaml", ".json"):
        return vocabularies.read_lines(path)
    refusal = f"{path}: no vocabulary of Marian"
    ids = parse_yaml_mapping(path.read_bytes(), refusal, as_text=True)
    try:
        by_id = sorted((int(number), str(token)) for token, number in ids.items())
    except (ValueError, TypeError) as error:
        raise UserError(f"{refusal} ({one_line(error)})") from None
    if [number for number, _ in by_id] != list(range(len(by_id))):
        raise UserError(f"{refusal}: its ids do not count from 0")
    return [token for _, token in by_id]


def _special_ids(sides: list[list[str]], pad: int) -> dict[str, int | None]:
    """Marian's own ids, 0 and 1, unless the vocabularies have others."""
    ids = {"eos_token_id": 0, "unk_token_id": 1}
    for side in sides:
        if len(side) > pad:
            raise UserError(f"a vocabulary has {len(side)} tokens, but the model has {pad}")
    if sides:
        for name, token in (("eos_token_id", "</s>"), ("unk_token_id", "<unk>")):
            found = {side.index(token) if token in side else None for side in sides}
            number = found.pop()
            if found or number is None:
                raise UserError(f"{token} has to be in both vocabularies, with one id")
            ids[name] = number
    return {**ids, "bos_token_id": None, "pad_token_id": pad, "decoder_start_token_id": pad}


def _with_unused(side: list[str], pad: int) -> list[str]:
    """The tokens, then a name for each row up to the padding, then the padding."""
    if PAD in side:
        raise UserError(f"{PAD} is a token of the vocabulary; the padding that is added needs this name")
    return [*side, *(f"<unused_{number}>" for number in range(len(side), pad)), PAD]


def _with_tokenizers(
    model: Any, paths: list[Path], sides: list[list[str]], given: tuple[str | Path | None, str | Path | None]
) -> Converted:
    if not sides:
        if any(given):
            raise UserError("no vocabularies in the model's folder: give source_vocabulary and target_vocabulary")
        return Converted(model)
    if any(given):
        spm_models = [Path(given[0] or given[1] or ""), Path(given[1] or given[0] or "")]
    elif paths[0].suffix == paths[1].suffix == ".spm":
        spm_models = paths
    else:
        spm_models = [paths[0].with_name(f"{side}.spm") for side in ("source", "target")]
    if any(given) or all(path.is_file() for path in spm_models):
        return Converted(model, vocabularies.sentencepiece_tokenizer(spm_models, sides, _SPECIAL))
    tokenizers = vocabularies.whitespace_tokenizers(sides, (_SPECIAL,) * 2, paths)
    return Converted(model, *tokenizers, note=vocabularies.PRETOKENIZED)
