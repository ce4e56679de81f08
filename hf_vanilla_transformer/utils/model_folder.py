"""The gate of a model folder: its files are whole, and their values are possible.

Libraries read such files without limits of memory and time, or fail with messages that name no file.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

from .errors import UserError, did_you_mean, shown
from .untrusted import check_files, read_json_object, read_safetensors_header

_NAMES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

# Sizes in config.json, and the most that they may be where the weights do not tell.
_LAYERS = re.compile(r"(num_)?((encoder|decoder|hidden)_)?layers")
_WIDTH = re.compile(
    r"d_model|hidden_size|((encoder|decoder)_)?ffn_dim|intermediate_size|num_labels"
)
_VOCABULARY = re.compile(r"\w*vocab_size")
_MAX_LAYERS = 1000
_MAX_WIDTH = 2**16
_MAX_VOCABULARY = 2**18
_IDS = re.compile(r"\w*_token_id|(begin_)?suppress_tokens|bad_words_ids")

# Fields with a test of their values, and what is needed. Libraries take other values, and fail at their first use or
# ignore them.
_Fields: TypeAlias = dict[str, tuple[Callable[[Any], bool], str]]


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _number(least: float, most: float, *kinds: type) -> tuple[Callable[[Any], bool], str]:
    """A number within an interval, of which NaN is no part."""
    name = "a number" if float in kinds else "a whole number"
    needed = f"{name} from {least:g} to {most:g}"
    return lambda value: type(value) in kinds and least <= value <= most, needed


def are_pairs(values: object) -> TypeGuard[list[list[str]]]:
    """Return whether a value of a file is a list of pairs of texts."""
    return isinstance(values, list) and all(
        isinstance(pair, list) and [type(code) for code in pair] == [str, str] for pair in values
    )


def _begins_with_ids(value: Any) -> bool:
    return isinstance(value, list) and value[:1] == ["input_ids"] and {*map(type, value)} == {str}


def _is_token(value: Any) -> bool:
    """A token is text, or an object with the text and with flags."""
    flags = value if isinstance(value, dict) else {"content": value}
    content = flags.get("content")
    return (
        isinstance(content, str)
        and content != ""
        and all(_of(bool)(flags[name]) for name in flags if name not in ("content", "__type"))
    )


def _are_tokens(value: Any) -> bool:
    tokens = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | dict) and all(map(_is_token, tokens))


def _are_numbered_tokens(value: Any) -> bool:
    return _of(dict)(value) and all(
        number.isdecimal() and isinstance(token, dict) and _is_token(token)
        for number, token in value.items()
    )


def _are_texts(value: Any) -> bool:
    """An object or a list of texts."""
    texts = value.values() if isinstance(value, dict) else value
    return all(isinstance(text, str) for text in texts)


def _is_template(value: Any) -> bool:
    """A template is text, or there are several by name: an object, or a list of their names and texts."""
    if isinstance(value, list):
        return all(_of(dict)(each) and _are_texts(each) for each in value)
    return _are_texts(value if isinstance(value, dict) else [value])


def _is_dtype(value: Any) -> bool:
    """A dtype is a name of PyTorch, or an object with one for each part of a model."""
    names = value.values() if isinstance(value, dict) else [value]
    return all(
        isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)
        for name in names
    )


def _are_marks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and value[0] in ("source", "target", None)
        and isinstance(value[1], bool)
    )


_TRUTH = _of(bool), "true or false"
_TEXT = _of(str), "text"
_LIST = _of(list), "a list"
_OBJECT = _of(dict), "an object"
_ID = (lambda value: type(value) is int and value >= 0), "the id of a token"
_SIDE = (lambda value: value in ("left", "right")), "left or right"
_SPECIAL: _Fields = {
    **dict.fromkeys(
        (f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]),
        (_is_token, "the text of a token"),
    ),
    **dict.fromkeys(
        ("extra_special_tokens", "additional_special_tokens"),
        (_are_tokens, "a list or an object of tokens"),
    ),
}
_OF_TOKENIZERS: _Fields = {
    **_SPECIAL,
    "model_input_names": (_begins_with_ids, "a list that begins with input_ids"),
    "model_max_length": (
        # 1e30 is no limit
        lambda value: (type(value) is int and value >= 1) or value == 1e30,
        "a whole number from 1",
    ),
    "padding_side": _SIDE,
    "truncation_side": _SIDE,
    "chat_template": (_is_template, "text or an object of texts"),
    "tokenizer_class": _TEXT,
    "tokens": _TEXT,
    "task": _TEXT,
    "normalize_source": _TRUTH,
    "clean_up_tokenization_spaces": _TRUTH,
    "split_special_tokens": _TRUTH,
    "directions": (are_pairs, "a list of pairs of codes"),
    "added_tokens_decoder": (_are_numbered_tokens, "an object of tokens by their ids"),
    "language_tokens": (lambda value: _of(dict)(value) and _are_texts(value), "an object of texts"),
    "language_marks": (_are_marks, 'a list such as ["target", false]'),
}
_OF_TOKENIZER_FILES = {"tokenizer_config.json": _OF_TOKENIZERS, "special_tokens_map.json": _SPECIAL}
_OF_CONFIGURATIONS: _Fields = {
    **dict.fromkeys(("dtype", "torch_dtype"), (_is_dtype, "a dtype, such as float32")),
    "model_type": _TEXT,
    "architectures": (lambda value: _of(list)(value) and _are_texts(value), "a list of texts"),
    "auto_map": _OBJECT,
}
# Of tokenizer.json: the tokenizers library names no field.
_STEP = (lambda step: isinstance(step, dict) and "type" in step), "an object with a type"
_OF_BACKENDS: _Fields = {
    "version": _TEXT,
    "truncation": _OBJECT,
    "padding": _OBJECT,
    "added_tokens": _LIST,
    **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"), _STEP),
    "model": _OBJECT,  # without a type in old files
}
# `generate` allocates memory for these numbers unchecked.
_BEAMS = _number(1, 256, int)
_TOKENS = _number(0, 100_000, int)
_FACTOR = _number(0, 1e6, int, float)
_SHARE = _number(0, 1, int, float)
_PENALTY = _number(1e-3, 1e3, int, float)
_EXPONENT = _number(-1e6, 1e6, int, float)
_FLAGS = (
    "do_sample use_cache renormalize_logits remove_invalid_values token_healing return_dict_in_generate output_scores "
    "output_logits output_attentions output_hidden_states"
)
_OF_SEARCHES: _Fields = {
    "num_beams": _BEAMS,
    "num_return_sequences": _BEAMS,
    "num_beam_groups": _number(1, 1, int),
    "max_length": _number(2, 100_000, int),
    "max_new_tokens": _number(1, 100_000, int),
    "max_length_over_source": _TOKENS,
    "min_length": _TOKENS,
    "min_new_tokens": _TOKENS,
    "no_repeat_ngram_size": _TOKENS,
    "encoder_no_repeat_ngram_size": _TOKENS,
    "repetition_penalty": _PENALTY,
    "encoder_repetition_penalty": _PENALTY,
    **dict.fromkeys(
        ("temperature", "diversity_penalty", "penalty_alpha", "guidance_scale"), _FACTOR
    ),
    **dict.fromkeys(
        ("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _SHARE
    ),
    "top_k": _TOKENS,
    "max_time": _FACTOR,
    "length_penalty": _EXPONENT,
    "paper_length_penalty": _EXPONENT,
    **dict.fromkeys(_FLAGS.split(), _TRUTH),
    "early_stopping": (
        lambda value: isinstance(value, bool) or value == "never",
        "true, false or never",
    ),
    "constraints": _LIST,
    "force_words_ids": _LIST,
    "exponential_decay_length_penalty": (_of(list, tuple), "a list"),
    "sequence_bias": (_of(list, dict), "a list or an object"),
    "stop_strings": (_of(str, list), "text or a list"),
    "cache_implementation": _TEXT,
    "watermarking_config": _OBJECT,
    "compile_config": _OBJECT,
}


def require_model_folder(folder: Path) -> None:
    """Raise a UserError if there is no such folder."""
    if not folder.is_dir():
        from .shipped_models import shipped_models

        hint = did_you_mean(str(folder), shipped_models()) or (
            "give the folder of a trained model "
            "(one on the Hub is fetched by: hf download NAME --local-dir FOLDER)"
        )
        raise UserError(f"{folder}: no such folder; {hint}")


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT.

    `from_pretrained` applies it to the weights in the folder, and so twice to merged ones.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: an adapter of PEFT is no whole model, and next to one it is applied, merged or not; "
            "model.merge_and_unload().save_pretrained(FOLDER) merges it into a new folder"
        )


def check_model_files(folder: Path) -> None:
    """Refuse a model folder with a damaged file, or with values that no model has.

    Files that are missing are left to the loader that needs them.

    Raises:
        UserError: one line with the file, the field, its value and the remedy.
    """
    for part in (folder, folder / "target_tokenizer"):
        files = sorted(part.glob("*"))
        check_files(files)
        for file in files:
            if file.name in _NAMES and not file.is_file():
                raise UserError(
                    f"{file}: a folder, or a link to nothing: put the file itself there"
                )
        for name, fields in _OF_TOKENIZER_FILES.items():
            if (file := part / name).is_file():
                _check_fields(file, read_json_object(file), fields)
        if (file := part / "added_tokens.json").is_file():
            added = read_json_object(file)
            _check_fields(file, added, dict.fromkeys(added, _ID))
    config = folder / "config.json"
    values = read_json_object(config) if config.is_file() else {}
    _check_sizes(config, values)
    _check_fields(config, values, _OF_CONFIGURATIONS)
    if (index := folder / "model.safetensors.index.json").is_file():
        read_shards(index)
    sizes = [values[name] for name in values if _VOCABULARY.fullmatch(name)]
    count = max((size for size in sizes if type(size) is int), default=_MAX_VOCABULARY)
    for file in (config, folder / "generation_config.json"):
        if file.is_file():
            settings = read_json_object(file)
            for name, value in settings.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise _refusal(file, name, value, "a finite number is needed")
            check_search(file, settings)
            _check_ids(file, settings, count)


def check_tokenizer_file(file: Path) -> None:
    """Refuse a tokenizer.json with a field of a wrong type. Large ones are slow to read: call it after a failure."""
    if file.is_file():
        _check_fields(file, read_json_object(file), _OF_BACKENDS)


def check_search(where: object, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a search that `generate` would use without checking them."""
    _check_fields(where, settings, _OF_SEARCHES)


def _check_fields(where: object, values: Mapping[str, Any], fields: _Fields) -> None:
    for name, (is_right, needed) in fields.items():
        value = values.get(name)
        if value is not None and not is_right(value):
            raise _refusal(where, name, value, f"{needed} is needed")


def _check_sizes(file: Path, values: Mapping[str, Any]) -> None:
    """Refuse sizes in config.json beyond those of the weights: memory is allocated before they are compared."""
    shapes = [
        tensor["shape"]
        for weights in file.parent.glob("*.safetensors")
        if weights.is_file()
        for tensor in read_safetensors_header(weights).values()
    ]
    if values.get("quantization_config"):  # which packs several numbers into one
        shapes = []
    widest = max((max(shape, default=1) for shape in shapes), default=_MAX_WIDTH)
    limits = {
        _LAYERS: len(shapes) or _MAX_LAYERS,
        _WIDTH: widest,
        _VOCABULARY: max(widest, _MAX_VOCABULARY),
    }
    for name, value in values.items():
        for pattern, most in limits.items():
            if pattern.fullmatch(name) and isinstance(value, int) and value > most:
                raise _refusal(file, name, value, f"its weights allow {most:,} at most")
        if name in ("is_encoder_decoder", "return_dict") and value is not True:
            raise _refusal(file, name, value, "true is needed")
        if name.endswith("attn_implementation") and "/" in str(value):
            raise _refusal(file, name, value, "code of the Hub is not run: remove the field")


def read_shards(file: Path) -> set[str]:
    """Return the names of files in an index of weights. Files outside its folder are refused."""
    names = read_json_object(file).get("weight_map")
    if not isinstance(names, dict) or not _are_texts(names):
        raise _refusal(file, "weight_map", names, "an object of file names is needed")
    shards = {*names.values()}
    for name in sorted(shards):
        if name != Path(name).name:
            raise _refusal(file, "weight_map", name, "a file of this folder is needed")
    return shards


def _check_ids(file: Path, settings: Mapping[str, Any], count: int) -> None:
    for name, value in settings.items():
        is_needed = name == "decoder_start_token_id" and file.name == "config.json"
        if not _IDS.fullmatch(name) or (value is None and not is_needed):
            continue
        rows = value if isinstance(value, list) else [value]
        if name == "bad_words_ids":
            ids = [each for row in rows for each in (row if isinstance(row, list) else [None])]
        else:
            ids = rows
        if not all(type(each) is int and -1 <= each < count for each in ids):
            raise _refusal(file, name, value, f"ids of tokens below {count:,} are needed")


def _refusal(where: object, name: str, value: object, reason: str) -> UserError:
    return UserError(f"{where}: {name}={shown(value)}: {reason}")
