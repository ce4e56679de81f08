"""Marian's checkpoints: an .npz with weights and options, and the vocabularies in the same folder."""

import re
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers_vanilla_transformer import sinusoidal_positions
from ..utils.errors import UserError, shown
from ..utils.untrusted import parse_yaml_mapping, reading_weights, require_file
from . import state_dicts, vocabularies
from .checkpoint import Checkpoint
from .converted import Converted, Fields, File, Tensors
from .options import Options, Unsupported
from .state_dicts import TensorRef

OPTIONS = "special:model.yml"
EPSILON = 1e-6  # `layerNorm` of its Transformer
MAX_POSITIONS = 1024  # rows of the table that replaces Marian's formula
NEVER = -1e4  # output bias of the tokens that Marian does not have
PAD = "<pad>"
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": PAD}
_SPM_MODELS = ("source.spm", "target.spm")

# Seen in 1.12.42, and reproduced by leaving the keys and values of later steps unnormalised.
PRE_NORM_NOTE = (
    "its scores are those of Marian's training and scorer; marian-decoder leaves the self-attention's keys and values "
    "unnormalised from the second token on, so its translations differ"
)

TRUECASING_NOTE = "text is tokenized by Moses and split by the codes, but not truecased"

ACTIVATIONS = {"relu": "relu", "swish": "silu"}
# "gelu" is x · sigmoid(1.702 x) up to this version. In March 2023 it became exact.
_LAST_WITH_APPROXIMATE_GELU = (1, 12, 0)
_MAX_EXPANSION = 10  # of a compressed .npz: floats hardly shrink
_BARE = ("\x7f", *map(chr, range(0x80, 0xA0)), "\u2028", "\u2029", "\ufffe", "\uffff")
_FILES_OF_TRAINING = (".optimizer.npz", ".orig.npz")

# Options of other architectures.
REFUSED: Unsupported = {
    "type": (("transformer",), "is another kind of model"),
    "transformer-postprocess-emb": (("", "d"), "normalises the embeddings, §3.4 does not"),
    "transformer-decoder-autoreg": (
        ("self-attention",),
        "has a decoder without self-attention (§3.2.3)",
    ),
    "transformer-no-projection": ((False,), "leaves out W^O (§3.2.2)"),
    "transformer-ffn-depth": (
        (2,),
        "has another number of matrices in a feed-forward network than Eq. 2",
    ),
    "transformer-decoder-ffn-depth": (
        (0, 2),
        "has another number of matrices in a feed-forward network than Eq. 2",
    ),
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

# Options of marian-decoder without a counterpart in `generate`, with the values that do nothing.
DROPPED = {
    "word-penalty": 0,
    "max-length-factor": 3,
    "max-length": 1000,
    "max-length-crop": False,
    "shortlist": [],
    "output-sampling": [],
    "output-approx-knn": [],
    "force-decode": False,
    "no-spm-encode": False,
}

# Options that place normalisations before each sub-layer, after it, and after each stack, with their defaults.
_NORMALISATIONS = {
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-top": "",
}
_POSITIONS: dict[tuple[str, ...], str] = {("", "an", ""): "post", ("n", "a", "n"): "pre"}

#: Within a layer: our modules, and Marian's names of their weight and bias.
IN_LAYER = {
    "fc1": ("ffn_W1", "ffn_b1"),
    "fc2": ("ffn_W2", "ffn_b2"),
    "final_layer_norm": ("ffn_ffn_ln_scale", "ffn_ffn_ln_bias"),
}
for _ours, _theirs in (("self_attn", "self"), ("cross_attn", "context")):
    IN_LAYER[f"{_ours}_layer_norm"] = (f"{_theirs}_Wo_ln_scale", f"{_theirs}_Wo_ln_bias")
    for _part, _letter in zip(("q_proj", "k_proj", "v_proj", "out_proj"), "qkvo", strict=True):
        IN_LAYER[f"{_ours}.{_part}"] = (f"{_theirs}_W{_letter}", f"{_theirs}_b{_letter}")


def from_marian_npz(
    source: str | Path,
    *,
    source_vocabulary: File = None,
    target_vocabulary: File = None,
    source_sentencepiece: File = None,
    target_sentencepiece: File = None,
    codes: File = None,
    target_codes: File = None,
    source_language: str = "en",
    target_language: str = "en",
) -> Converted:
    """A Transformer that Marian trained, post-norm or pre-norm.

    Its sinusoids have fairseq's wavelengths but start at position 0, so they become `MAX_POSITIONS` rows of "learned"
    positions. (transformers' `MarianMTModel` and CTranslate2 use slightly different ones.) Its decoder starts from a
    zero vector instead of an embedding: here from a padding token. It is added to the vocabulary with a zero row.

    Args:
        source: model.npz, or a folder with one .npz or with a decoder.yml or NAME.npz.decoder.yml that names one.
        source_vocabulary, target_vocabulary: .yml or .spm. Default: the files that the options name, if they are in
            the model's folder.
        source_sentencepiece, target_sentencepiece: the models that tokenize for a .yml vocabulary. Default: source.spm
            and target.spm, if they are in the model's folder. Without them the tokenizer takes tokenized text.
        codes, target_codes: files of subword-nmt, as in the BPE releases of OPUS-MT. The tokenizer then takes raw
            text, through Moses for these languages. One may serve both sides.

    Returns:
        The model with the settings of Marian's search that `generate` has, and its tokenizer.
    """
    path, decoder = _model_file(Path(source))
    arrays, options = _read(path)
    _refuse(options)
    tensors = state_dicts.require_tensors(
        {name: _tensor(name, array) for name, array in arrays.items()}, str(path)
    )
    tensors, pad = _with_padding(tensors)
    named = decoder.texts("vocabs") or options.texts("vocabs")
    paths = vocabularies.both_sides(source_vocabulary, target_vocabulary) or _existing(
        path.parent, named
    )
    sides = [_tokens(vocabulary) for vocabulary in paths]
    ids = _special_ids(sides, pad)
    is_pre_norm = _POSITIONS[_normalisations(options)] == "pre"
    spm_models = vocabularies.both_sides(source_sentencepiece, target_sentencepiece)
    codes_of_sides = vocabularies.both_sides(codes, target_codes)
    texts = []
    notes = decoder.dropped(DROPPED) + [PRE_NORM_NOTE] * is_pre_norm
    if sides:
        if not spm_models and not codes_of_sides:
            has_pieces = paths[0].suffix == paths[1].suffix == ".spm"
            names = [path.name for path in paths] if has_pieces else _SPM_MODELS
            spm_models = _existing(paths[0].parent, names)
        languages = source_language, target_language
        raw_text = vocabularies.raw_text(spm_models, codes_of_sides)
        texts = [
            vocabularies.TextSide(
                _with_unused(side, pad), _SPECIAL, origin=path, language=language, **raw
            )
            for side, path, language, raw in zip(sides, paths, languages, raw_text, strict=True)
        ]
        notes += [TRUECASING_NOTE] * bool(codes_of_sides)
    elif spm_models or codes_of_sides:
        raise UserError(
            "no vocabularies in the model's folder: give source_vocabulary and target_vocabulary"
        )
    elif named:
        notes.append(f"its vocabularies {' and '.join(map(shown, named))} are not in its folder")
    tensors, positions = _positions(tensors, options)
    return Checkpoint(
        tensors,
        partial(_locate, pre_norm=is_pre_norm),
        ids | positions | _fields(options, is_pre_norm),
        ids | _search(decoder, ids["unk_token_id"]),
        sides=texts,
        notes=notes,
    ).converted()


def _fields(options: Options, is_pre_norm: bool) -> Fields:
    heads = options.integer("transformer-heads", 8, 1)
    return {
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "activation_function": _activation(options),
        "layer_norm_position": "pre" if is_pre_norm else "post",
        "dropout": options.number("transformer-dropout", 0.0, 0.0),
        "attention_dropout": options.number("transformer-dropout-attention", 0.0, 0.0),
        "activation_dropout": options.number("transformer-dropout-ffn", 0.0, 0.0),
        "layer_norm_eps": EPSILON,
    }


def _search(decoder: Options, unk: int | None) -> Fields:
    """The options of marian-decoder under the names of `generate`, with Marian's defaults."""
    is_flag = isinstance(decoder.values.get("normalize"), bool)
    normalize = decoder.flag("normalize") if is_flag else decoder.number("normalize")
    return {
        "num_beams": decoder.integer("beam-size", 12, 1),
        "length_penalty": float(normalize),
        "suppress_tokens": None if decoder.flag("allow-unk") else [unk],
    }


def _activation(options: Options) -> str:
    name = options.text("transformer-ffn-activation", "swish")
    if name != "gelu":
        return ACTIVATIONS[name]
    version = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", options.text("version"))
    is_exact = (
        version is not None and tuple(map(int, version.groups())) > _LAST_WITH_APPROXIMATE_GELU
    )
    return "gelu" if is_exact else "quick_gelu"


def _model_file(source: Path) -> tuple[Path, Options]:
    """The .npz, and the options of decoding: NAME.npz.decoder.yml, as training writes it, or decoder.yml."""
    if not source.is_dir():
        files = source.with_name(f"{source.name}.decoder.yml"), source.with_name("decoder.yml")
        options = next((_read_options(path) for path in files if path.is_file()), Options({}))
        return require_file(source), options
    written = sorted(source.glob("*.npz.decoder.yml"))
    for path in (source / "decoder.yml", source / "model.npz.decoder.yml", *written):
        if path.is_file() and "models" in (decoder := _read_options(path)):
            named = [source / Path(name).name for name in decoder.texts("models")]
            if len(named) != 1 or not named[0].is_file():
                raise UserError(
                    f"{path}: it names {len(named)} models; name the .npz file to convert"
                )
            return named[0], decoder
    models = [path for path in source.glob("*.npz") if not path.name.endswith(_FILES_OF_TRAINING)]
    if len(models) != 1:
        raise UserError(f"{source}: {len(models)} models there; name the .npz file")
    return _model_file(models[0])


def _read(path: Path) -> tuple[dict[str, np.ndarray], Options]:
    """The arrays and the options. Marian stores these as one of the arrays, or in a file."""
    with reading_weights(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_EXPANSION * path.stat().st_size:
            raise UserError(f"{path}: its arrays are far larger than the file")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        except ValueError as error:
            if "pickle" not in str(error):  # numpy advises to allow it, but that would run code
                raise
            raise UserError(f"{path}: it holds Python objects; nothing of it was run") from None
    stored = arrays.pop(OPTIONS, None)
    if stored is not None:
        refusal = f"{path}: {OPTIONS}: no options of Marian"
        content = stored.tobytes().rstrip(b"\0")
        return arrays, Options(parse_yaml_mapping(content, refusal), f"{path}: --")
    separate = path.with_name(f"{path.name}.yml")
    if not separate.is_file():
        raise UserError(f"{path}: it lacks {OPTIONS}, and its folder {separate.name}")
    return arrays, _read_options(separate)


def _read_options(path: Path) -> Options:
    return Options(
        parse_yaml_mapping(path.read_bytes(), f"{path}: no options of Marian"), f"{path}: --"
    )


def _normalisations(options: Options) -> tuple[str, ...]:
    """The three options without "d" (dropout)."""
    return tuple(
        options.text(name, default).replace("d", "") for name, default in _NORMALISATIONS.items()
    )


def _refuse(options: Options) -> None:
    options.refuse(REFUSED)
    if _normalisations(options) not in _POSITIONS:
        chosen = ", ".join(f"--{name}={shown(options.text(name))}" for name in _NORMALISATIONS)
        where = options.where.removesuffix("--")
        raise UserError(f"{where}{chosen}: such a model is neither post-norm (§3.1) nor pre-norm")
    known = (*ACTIVATIONS, "gelu")
    if options.text("transformer-ffn-activation", "swish") not in known:
        raise options.error("transformer-ffn-activation", f"it is none of {', '.join(known)}")
    if any(vocabulary.endswith(".fsv") for vocabulary in options.texts("vocabs")):
        raise options.error("vocabs", "such a model has factored tokens")


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind != "f":
        raise UserError(f"{name} is {array.dtype}: quantised weights cannot be converted")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]  # (1, n) to (n,)
    return torch.from_numpy(np.ascontiguousarray(array))


def _with_padding(tensors: Tensors) -> tuple[Tensors, int]:
    """Name embeddings and output matrix uniformly, with zero rows up to the padding token. Return its id too."""
    rest = dict(tensors)
    shared = rest.pop("Wemb", None)
    matrices = {}
    for name in ("encoder_Wemb", "decoder_Wemb"):
        matrix = rest.pop(name, shared)
        if matrix is None or matrix.ndim != 2:
            raise UserError(
                f"there is no matrix {name} or Wemb: this is no encoder-decoder Transformer of Marian"
            )
        matrices[name] = matrix
    transposed = rest.pop("decoder_ff_logit_out_W", None)
    tied = matrices["decoder_Wemb"] if transposed is None else transposed.T
    output = matrices["output"] = rest.pop("decoder_ff_logit_out_Wt", tied)
    bias = rest.pop("decoder_ff_logit_out_b", torch.zeros(len(output), dtype=output.dtype))
    pad = max(map(len, matrices.values()))
    for name, matrix in matrices.items():
        rest[name] = F.pad(matrix, (0, 0, 0, pad + 1 - len(matrix)))
    rest["output bias"] = F.pad(bias, (0, pad + 1 - len(bias)), value=NEVER)
    return rest, pad


def _positions(tensors: Tensors, options: Options) -> tuple[Tensors, Fields]:
    # old versions stored the option under the shorter name
    learned = any(
        options.flag(f"transformer-train-{name}") for name in ("positions", "position-embeddings")
    )
    if learned and "Wpos" not in tensors:
        raise UserError("Wpos is missing, the table of --transformer-train-positions")
    width = tensors["encoder_Wemb"].shape[1]
    # its sinusoids are fairseq's, sin(p · 10000^(-i / (D/2 - 1))), then the cosines, but with p from 0
    rows = torch.arange(MAX_POSITIONS)[None]
    sinusoids = sinusoidal_positions(rows, width, "sinusoidal_fairseq")[0]
    table = tensors.pop("Wpos") if learned else sinusoids
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
    is_norm = "norm" in module
    marian_name = f"{stack}_l{int(number) + 1}_{IN_LAYER[module][kind == 'bias']}" + "_pre" * (
        pre_norm and is_norm
    )
    return TensorRef(marian_name, transposed=kind == "weight" and not is_norm)


def _existing(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files of source and target by the names of two or of one, or none if one is missing."""
    files = [folder / Path(name).name for name in names]
    return [files[0], files[-1]] if files and all(file.is_file() for file in files) else []


def _tokens(path: Path) -> list[str]:
    """The tokens of a vocabulary, by id."""
    if path.suffix == ".spm":
        return vocabularies.sentencepiece_pieces(path)
    if require_file(path).suffix not in (".yml", ".yaml", ".json"):
        return vocabularies.vocabulary_lines(path)
    refusal = f"{path}: no vocabulary of Marian"
    text = "\n".join(vocabularies.vocabulary_lines(path))
    # Marian's YAML library writes these characters bare, and others take them for line ends or refuse them
    unused = (character for character in map(chr, range(0xE000, 0xF900)) if character not in text)
    replaced = dict(zip(sorted({*text} & {*_BARE}), unused, strict=False))
    ids = parse_yaml_mapping(
        text.translate(str.maketrans(replaced)).encode(), refusal, as_text=True
    )
    original = str.maketrans({new: old for old, new in replaced.items()})
    return [token.translate(original) for token in vocabularies.tokens_by_id(ids, refusal)]


def _special_ids(sides: list[list[str]], pad: int) -> dict[str, int | None]:
    """Marian's ids, 0 and 1, unless the vocabularies have others."""
    ids: dict[str, int | None] = {"eos_token_id": 0, "unk_token_id": 1}
    for name in ids if sides else ():
        token = _SPECIAL[name.removesuffix("_id")]
        numbers = {side.index(token) if token in side else None for side in sides}
        if len(numbers) > 1 or None in numbers:
            raise UserError(f"{token} has to be in both vocabularies, with one id")
        ids[name] = numbers.pop()
    return {**ids, "bos_token_id": None, "pad_token_id": pad, "decoder_start_token_id": pad}


def _with_unused(side: list[str], pad: int) -> list[str]:
    """The tokens, then a name for each row up to the padding, then the padding."""
    if PAD in side:
        raise UserError(
            f"{PAD} is a token of the vocabulary; the padding that is added needs this name"
        )
    return [*side, *(f"<unused_{number}>" for number in range(len(side), pad)), PAD]
