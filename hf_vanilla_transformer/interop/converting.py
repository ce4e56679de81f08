"""Conversion of a toolkit's checkpoint to a model folder: the table of formats, and the writing of the folder."""

import math
from contextlib import suppress
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

from ..text.tokenizer_files import save_tokenizers
from ..utils.atomic_write import new_folder, require_apart, require_new
from ..utils.errors import UserError, shown
from ..utils.model_folder import refuse_adapter
from .sources import local_files
from .transformers_folders import make_savable

#: The module of this package, and its function, that reads each format.
FORMATS = {
    "marian": "marian:from_marian",
    "fsmt": "fairseq_folders:from_fsmt",
    "m2m100": "fairseq_folders:from_m2m100",
    "marian-npz": "marian_npz:from_marian_npz",
    "torch": "torch_transformer:from_torch",
    "fairseq": "fairseq:from_fairseq",
    "joeynmt": "joeynmt:from_joeynmt",
    "opennmt": "opennmt:from_opennmt",
    "eole": "eole:from_eole",
}
# The types of options.
_NEEDED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(
    source_format: str,
    source: str | Path,
    output: str | Path,
    overwrite: bool = False,
    /,
    **options: Any,
) -> str:
    """Read a toolkit's checkpoint, write it as a model folder and return one line about it.

    Args:
        source_format: a key of `FORMATS`.
        source: a file or a folder as the toolkit writes it, or a name on the Hub.
        output: a new folder. It appears when it is complete.
        overwrite: replace a folder that exists already.
        **options: keyword arguments of the format's function, for settings that the checkpoint lacks. Text is parsed
            as the type of the argument.
    """
    if source_format not in FORMATS:
        raise UserError(f"format: {source_format!r} is none of {', '.join(FORMATS)}")
    read = resolve_name(f"{__package__}.{FORMATS[source_format]}")
    known = list(signature(read).parameters)[1:]
    types = get_type_hints(read)
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f"{name}: {source_format} has no such option; it has {', '.join(known) or 'none'}"
            )
        options[name] = _parsed(name, value, get_args(types[name]) or (types[name],))
    output = Path(output)
    require_new(output, overwrite)
    require_apart(output, source)
    files = local_files(source)
    # PEFT saves a second adapter in a folder of its own
    places = [files] if (files / "config.json").is_file() else [files, *files.glob("*/")]
    try:
        for place in places:
            refuse_adapter(place)
        converted = read(files, **options)
    except UserError as error:
        message = str(error).replace(str(files), str(source))
        raise UserError(message if str(source) in message else f"{source}: {message}") from None
    make_savable(converted.model.generation_config)
    with new_folder(output, overwrite) as folder:
        converted.model.save_pretrained(folder)
        if converted.tokenizer is not None:
            save_tokenizers(folder, converted.tokenizer, converted.target_tokenizer)
    parameters = f"{output}: {converted.model.num_parameters():,} parameters"
    missing = "without a tokenizer: the files have none"
    tokenizer = "with its tokenizer" if converted.tokenizer else missing
    notes = f" ({'; '.join(converted.notes)})" if converted.notes else ""
    return f"{parameters}, {tokenizer}{notes}"


def _parsed(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """The value of an option as one of its types. Raises a UserError if it is none of them."""
    kind = next(kind for kind in _NEEDED if kind in kinds)
    if isinstance(value, str):
        with suppress(ValueError):
            value = _FLAGS.get(value.lower(), value) if kind is bool else kind(value)
    is_flag = isinstance(value, bool)
    is_kind = isinstance(value, (*kinds, int) if kind is float else kinds)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not is_kind or not is_finite or (is_flag and kind is not bool):
        raise UserError(f"{name}={shown(value)}: {_NEEDED[kind]} is needed")
    return value
