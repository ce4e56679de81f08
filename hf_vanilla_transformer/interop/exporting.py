"""Export of a model folder to a library's format: the table of formats, and the writing of the folder."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..inference.directions import Directions
from ..inference.loading import registered_class
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.source_form import form_note
from ..text.source_text import normalizing
from ..text.tokenizer_files import load_tokenizers, save_tokenizers
from ..utils.atomic_write import atomic_file, new_folder, require_apart
from ..utils.errors import UserError
from .converted import File, check_tokenizer_size
from .search_settings import LIBRARIES, search_differences
from .self_test import self_test
from .transformers_folders import check_generation_config, load_peer

#: The formats, and the modules of this package that write them.
FORMATS = {
    "argos": "argos",
    "ctranslate2": "ctranslate2",
    "marian": "marian",
    "onnx": "transformers_js",
}
#: The formats that have an option. "web" is of `web.site`.
OPTIONS = {
    "quantization": ("ctranslate2", "argos"),
    "vmap": ("ctranslate2",),
    "languages": ("argos",),
    "dtypes": ("onnx", "web"),
    "runtime": ("web",),
    "examples": ("web",),
}


def export(
    target_format: str,
    source: str | Path,
    output: str | Path,
    overwrite: bool = False,
    quantization: str | None = None,
    vmap: File = None,
    languages: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
) -> str:
    """Write a model folder in a library's format, with the tokenizer, and return one line about it.

    Args:
        target_format: a key of `FORMATS`.
        source: a model folder with its tokenizer.
        output: a new folder. It appears when it is complete.
        overwrite: replace a folder that exists already.
        languages: for argos, the codes of source and target. Its output is a file.
        quantization, vmap: see `ctranslate2.write_ctranslate2`.
        dtypes: for onnx, of the weights, keys of `transformers_js.DTYPES`. Default: fp32.
    """
    if target_format not in FORMATS:
        raise UserError(f"format: {target_format!r} is none of {', '.join(FORMATS)}")
    given = {"quantization": quantization, "vmap": vmap, "languages": languages, "dtypes": dtypes}
    refuse_options(target_format, given)
    dtypes = dtypes or ("fp32",)
    require_apart(output, source)
    module = import_module(f".{FORMATS[target_format]}", __package__)
    note = ""
    output = Path(output)
    writes = _new_file if target_format == "argos" else new_folder
    with writes(output, overwrite) as written:
        model = load_translator(source, target_format == "onnx")
        check_generation_config(model.generation_config)
        tokenizers = load_tokenizers(source)
        check_tokenizer_size(tokenizers[0], model.config.vocab_size)
        refuse_languages(target_format, tokenizers)
        match target_format:
            case "argos":
                module.write(model, source, written, languages, quantization)
            case "ctranslate2":
                module.write_ctranslate2(source, written, quantization, vmap)
                note = module.search_note(model, tokenizers[1])
            case "marian":
                module.write(model, written)
                save_tokenizers(written, *normalizing(*tokenizers))
            case "onnx":
                module.write(model.to(torch.float32), source, written, dtypes)
        exact = quantization in (None, "float32") and vmap is None and "fp32" in dtypes
        note += form_note(tokenizers[0])
        note += search_differences(model, LIBRARIES[target_format])
        note += self_test(target_format, model, tokenizers, written, exact)
        size = sum(path.stat().st_size for path in (written, *written.rglob("*")) if path.is_file())
    return f"{output}: {size / 1e6:.1f} MB{note}"


def refuse_options(target_format: str, options: Mapping[str, object]) -> None:
    """Raise a UserError for an option that is given but of another format."""
    for name, value in options.items():
        if value and target_format not in OPTIONS[name]:
            raise UserError(
                f"{name}={value}: this option is for {' and '.join(OPTIONS[name])} only"
            )


def load_translator(
    source: str | Path, subclass: bool = False
) -> VanillaTransformerForConditionalGeneration:
    """Load the model of a folder, with one line about damaged files, and about a subclass unless it is permitted."""
    model_class: Any = registered_class(Path(source))
    own = VanillaTransformerForConditionalGeneration
    if not (model_class and issubclass(model_class, own)):
        model_class = own  # the refusal of other model types
    if model_class is not own and not subclass:
        raise UserError(
            f"{source}: the format knows no {model_class.__name__}; onnx exports a subclass"
        )
    return load_peer(model_class, source)


def _new_file(output: Path, overwrite: bool) -> AbstractContextManager[Path]:
    if output.suffix != ".argosmodel" or output.is_dir():
        raise UserError(f"output {output}: name a file that ends with .argosmodel")
    if output.exists() and not overwrite:
        raise UserError(f"output {output} exists already: name a new file, or give --overwrite")
    output.parent.mkdir(parents=True, exist_ok=True)
    return atomic_file(output)


def refuse_languages(target_format: str, tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
    """Refuse a model of many languages for a format whose text or search has no place for their tokens."""
    directions = Directions(*tokenizers)
    languages = directions.source
    if languages is None or directions.unmarked:
        return
    source = languages.source_mark
    target = languages.target_mark
    in_text = not target and source != "source" and languages.in_text
    reasons = {
        "argos": source and "Argos puts no token of a language before a source",
        "onnx": not in_text and "its search adds no token of a language",
    }
    if reason := reasons.get(target_format):
        raise UserError(
            f"{target_format}: the model has {len(languages.ids)} languages, and {reason}"
        )
