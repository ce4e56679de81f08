"""Marian's own checkpoints: an .npz with weights and options, and the vocabularies beside it."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig

from ..errors import UserError
from ..layers_vanilla_transformer import sinusoidal_positions
from .converting import Converted
from .state_dicts import Place, build_model, require_tensors, width_and_depth, word_matrices
from .transformers_folders import decode_as
from .vocabularies import pieces_tokenizer, read_lines, sentencepiece_pieces, sentencepiece_tokenizer

OPTIONS = "special:model.yml"
EPSILON = 1e-6  # `layerNorm` of its Transformer
LONGEST = 1024  # positions, where the formula has no end
NEVER = -1e4  # the bias of a word that Marian does not have
PAD = "<pad>"
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": PAD}

ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "quick_gelu"}  # its gelu is x · sigmoid(1.702 x)

# Options that make another architecture: the values with which they do not, and what the others do.
REFUSED: dict[str, tuple[tuple, str]] = {
    "type": (("transformer",), "is another kind of model"),
    "transformer-preprocess": (
        ("", "d"),
        "normalises before each sub-layer (pre-norm), this architecture after (§3.1)",
    ),
    "transformer-postprocess": (("dan", "an"), "is not LayerNorm(x + Sublayer(x)) (§3.1)"),
    "transformer-postprocess-emb": (("", "d"), "normalises the embeddings, §3.4 does not"),
    "transformer-postprocess-top": (("", "d"), "has one more step after each stack, without a bias of its own here"),
    "transformer-decoder-autoreg": (("self-attention",), "has a decoder without self-attention (§3.2.3)"),
    "transformer-no-projection": ((False,), "leaves out W^O (§3.2.2)"),
    "transformer-ffn-depth": ((2,), "has another number of matrices in a feed-forward network than Eq. 2"),
    "transformer-decoder-ffn-depth": ((0, 2), "has another number of matrices in a feed-forward network than Eq. 2"),
    "transformer-aan-only": ((False,), "has average attention"),
    "transformer-tied-layers": (([],), "uses layers of the decoder more than once"),
    "ulr": ((False,), "has universal language representations"),
    "lemma-dim-emb": ((0,), "has factored words"),
    "input-types": (([],), "reads something besides words"),
}

# Within a layer: where it keeps our parameters.
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
    """A post-norm Transformer that Marian trained.

    Its sinusoids have fairseq's wavelengths and start at 0, which no other program has; they become `LONGEST` rows of
    "learned" positions. (transformers' `MarianMTModel` and CTranslate2 put slightly others in their place.) The first
    word that its decoder reads is a zero: the embedding of a padding, which is added behind the vocabulary.

    Args:
        source: model.npz, or a folder with one or with a decoder.yml that names it.
        source_vocabulary, target_vocabulary: .yml or .spm; where None, the files that the options name, if they are
            beside the model.
        source_sentencepiece, target_sentencepiece: what made the pieces of a .yml vocabulary; where None, source.spm
            and target.spm, if they are beside the model. Without them the tokenizer takes text in pieces.

    Raises:
        UserError: an option that cannot be expressed here, damaged or missing files.
    """
    path, decoder = _model_file(Path(source))
    arrays, options = _read(path)
    _refuse(options, path)
    tensors = require_tensors({name: _tensor(name, array) for name, array in arrays.items()}, str(path))
    layers = {"encoder_layers": "encoder_l", "decoder_layers": "decoder_l"}
    tensors, pad = _with_padding(tensors)
    words = word_matrices(tensors, "encoder_Wemb", "decoder_Wemb", "output")
    # Marian counts layers from 1
    sizes = width_and_depth(tensors, "encoder_Wemb", layers)
    sizes |= {field: sizes[field] - 1 for field in layers}
    tensors, positions = _positions(tensors, options, sizes["d_model"])
    heads = options.get("transformer-heads", 8)
    fields = {
        **sizes,
        **words.fields,
        **positions,
        **{f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": _width(tensors, f"{stack}_l1_ffn_W1") for stack in ("encoder", "decoder")},
        "activation_function": ACTIVATIONS.get(str(options.get("transformer-ffn-activation", "swish")), "?"),
        "dropout": options.get("transformer-dropout", 0.0),
        "layer_norm_eps": EPSILON,
        "lm_head_bias": True,
    }
    paths = _vocabulary_files(path, options, decoder, source_vocabulary, target_vocabulary)
    sides = [_words(each) for each in paths]
    ids = _special_numbers(sides, words.fields, pad)
    model = build_model({**fields, **ids}, tensors, _place, words.copies)
    if "beam-size" in decoder:
        search = {"num_beams": decoder["beam-size"], "length_penalty": float(decoder.get("normalize", 0.0))}
        decode_as(model, GenerationConfig(**search, **{k: v for k, v in ids.items() if k != "unk_token_id"}))
    pieces = source_sentencepiece, target_sentencepiece
    return _with_tokenizers(Converted(model), paths, [_filled(side, pad) for side in sides], pieces)


def _model_file(source: Path) -> tuple[Path, dict[str, Any]]:
    """The .npz, and the options of decoding that stand beside it."""
    folder = source if source.is_dir() else source.parent
    decoder = _read_yaml(folder / "decoder.yml") if (folder / "decoder.yml").is_file() else {}
    if not source.is_dir():
        if not source.is_file():
            raise UserError(f"{source}: no such file")
        return source, decoder
    named = [folder / Path(str(name)).name for name in decoder.get("models", [])]
    found = named or sorted(folder.glob("*.npz"))
    if len(found) != 1 or not found[0].is_file():
        raise UserError(f"{source}: {len(found)} models there; name the .npz file")
    return found[0], decoder


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays, and the options that Marian keeps among them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:120]
        if "pickle" in reason:  # numpy's own advice would be to run it
            reason = "it holds Python objects; nothing of it was run"
        raise UserError(f"{path}: no .npz of Marian, or a damaged one ({reason})") from None
    except AttributeError:
        raise UserError(f"{path}: one array, not the .npz of Marian") from None
    stored, beside = arrays.pop(OPTIONS, None), path.with_name(f"{path.name}.yml")
    if stored is None:
        if not beside.is_file():
            raise UserError(f"{path}: there is neither {OPTIONS} in it nor {beside.name} beside it")
        return arrays, _read_yaml(beside)
    return arrays, _parsed(stored.tobytes().rstrip(b"\0"), f"{path}: {OPTIONS}")


def _read_yaml(path: Path) -> dict[str, Any]:
    return _parsed(path.read_bytes(), str(path))


def _parsed(text: bytes, origin: str) -> dict[str, Any]:
    try:
        options = yaml.safe_load(text.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{origin}: no options of Marian ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(options, dict):
        raise UserError(f"{origin}: no options of Marian")
    return options


def _refuse(options: Mapping[str, Any], path: Path) -> None:
    for name, (harmless, reason) in REFUSED.items():
        value = options.get(name, harmless[0])
        if value not in harmless and value is not None:
            raise UserError(f"{path}: --{name} {value!r}: such a model {reason}")
    activation = options.get("transformer-ffn-activation", "swish")
    if activation not in ACTIVATIONS:
        raise UserError(f"{path}: --transformer-ffn-activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    for vocabulary in options.get("vocabs") or []:
        if str(vocabulary).endswith(".fsv"):
            raise UserError(f"{path}: --vocabs {vocabulary}: such a model has factored words")


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind != "f":
        raise UserError(f"{name} is {array.dtype}: quantised weights cannot be converted")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]  # (1, n) to (n,)
    return torch.from_numpy(np.ascontiguousarray(array))


def _with_padding(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The matrices of words under one name each, with rows of 0 behind their words up to that of the padding."""
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


def _positions(
    tensors: dict[str, Tensor], options: Mapping[str, Any], width: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    learned = bool(options.get("transformer-train-positions", False))
    if learned:
        if "Wpos" not in tensors:
            raise UserError("Wpos is missing, the table of --transformer-train-positions")
        table = tensors.pop("Wpos")
    else:
        # fairseq's formula: sin(p · 10000^(-i / (D/2 - 1))), then the cosines; p from 0
        table = sinusoidal_positions(torch.arange(LONGEST)[None], width, "sinusoidal_fairseq")[0]  # (P, D)
    tensors = {**tensors, "encoder positions": table, "decoder positions": table}
    fields = {"position_encoding_type": "learned", "max_position_embeddings": len(table)}
    return tensors, {**fields, "scale_embedding": not learned}


def _width(tensors: Mapping[str, Tensor], name: str) -> int:
    if name not in tensors:
        raise UserError(f"there is no tensor {name}")
    return tensors[name].shape[-1]


def _place(name: str) -> str | Place:
    if name.startswith("lm_head"):
        return "output" if name.endswith("weight") else "output bias"
    stack, rest = name.removeprefix("model.").split(".", 1)
    if rest == "embed_tokens.weight":
        return f"{stack}_Wemb"
    if rest == "embed_positions.weight":
        return f"{stack} positions"
    _, number, module = rest.split(".", 2)
    module, kind = module.rsplit(".", 1)
    theirs = f"{stack}_l{int(number) + 1}_{_IN_LAYER[module][kind == 'bias']}"
    return Place(theirs, transposed=kind == "weight" and "norm" not in module)


def _vocabulary_files(
    path: Path, options: Mapping[str, Any], decoder: Mapping[str, Any], *given: str | Path | None
) -> list[Path]:
    """The files of both sides, the ones given or the ones that the options name; none where they are not there."""
    if any(given):
        source, target = given
        return [Path(source or target or ""), Path(target or source or "")]
    named = [path.parent / Path(str(name)).name for name in decoder.get("vocabs") or options.get("vocabs") or []]
    if not named or not all(file.is_file() for file in named):
        return []
    return [named[0], named[-1]]


def _words(path: Path) -> list[str]:
    """The words of a vocabulary in the order of their numbers."""
    if path.suffix == ".spm":
        return sentencepiece_pieces(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix not in (".yml", ".yaml", ".json"):
        return read_lines(path)
    try:
        # every scalar is text here, also `yes`, `null` and `1`; such a loader makes no objects
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        numbers = yaml.load(path.read_bytes().decode("utf-8"), Loader=loader)
        by_number = sorted((int(number), word) for word, number in numbers.items())
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no vocabulary of Marian ({' '.join(str(error).split())[:120]})") from None
    if [number for number, _ in by_number] != list(range(len(by_number))):
        raise UserError(f"{path}: no vocabulary of Marian: its numbers do not count from 0")
    return [str(word) for _, word in by_number]


def _special_numbers(sides: list[list[str]], sizes: Mapping[str, Any], pad: int) -> dict[str, int | None]:
    """Marian's own numbers, 0 and 1, unless the vocabularies have others."""
    ids = {"eos_token_id": 0, "unk_token_id": 1}
    for side in sides:
        if len(side) > pad:
            raise UserError(f"a vocabulary has {len(side)} words, but the model has {pad}")
    if sides:
        for name, word in (("eos_token_id", "</s>"), ("unk_token_id", "<unk>")):
            numbers = {side.index(word) if word in side else None for side in sides}
            number = numbers.pop()
            if numbers or number is None:
                raise UserError(f"{word} has to be in both vocabularies, with one number")
            ids[name] = number
    return {**ids, "bos_token_id": None, "pad_token_id": pad, "decoder_start_token_id": pad}


def _filled(side: list[str], pad: int) -> list[str]:
    """Names for the rows between the last word and the padding, and for the padding."""
    if PAD in side:
        raise UserError(f"{PAD} is a word of the vocabulary; the padding that is added needs this name")
    return [*side, *(f"<unused_{number}>" for number in range(len(side), pad)), PAD]


def _with_tokenizers(
    converted: Converted,
    paths: list[Path],
    sides: list[list[str]],
    pieces: tuple[str | Path | None, str | Path | None],
) -> Converted:
    if not sides:
        if any(pieces):
            raise UserError("there are no vocabularies beside the model: give source_vocabulary and target_vocabulary")
        return converted
    folder, (source, target) = paths[0].parent, sides
    if any(pieces):
        models = [Path(pieces[0] or pieces[1] or ""), Path(pieces[1] or pieces[0] or "")]
    elif paths[0].suffix == paths[1].suffix == ".spm":
        models = paths
    else:
        models = [folder / "source.spm", folder / "target.spm"]
    if any(pieces) or all(model.is_file() for model in models):
        tokenizer = sentencepiece_tokenizer(models[0], models[1], source, target, _SPECIAL, "the vocabularies")
        return Converted(converted.model, tokenizer)
    in_pieces = pieces_tokenizer(source, _SPECIAL, str(paths[0]))
    for_target = in_pieces if source == target else pieces_tokenizer(target, _SPECIAL, str(paths[1]))
    return Converted(converted.model, in_pieces, for_target, note="it takes text in pieces, with spaces between")
