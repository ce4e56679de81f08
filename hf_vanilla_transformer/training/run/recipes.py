"""Parse recipes: YAML files of argument names and values, with command-line flags that override them."""

import argparse
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from ...utils.errors import UserError, did_you_mean, missing_extra
from ..state.distributed import require_first_rank
from .arguments import Choice, DataArguments, ModelArguments, ParsedArguments, RunArguments

_ARGUMENTS = (ModelArguments, DataArguments, RunArguments)
_NULL = "null"  # None, in a recipe and as the value of a flag
_NULL_TAG = "tag:yaml.org,2002:null"


def _kinds(hint: Any) -> set[Any]:
    """The types of a union, or the one type. A list counts as the type of its items."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(_kinds, get_args(hint)))
    return _kinds(get_args(hint)[0]) if get_origin(hint) is list else {hint}


def _is_text(kind: Any) -> bool:
    # Python 3.10 takes `dict[str, str]` for a class, and then refuses it in `issubclass`
    is_class = get_origin(kind) is None and isinstance(kind, type)
    return is_class and issubclass(kind, str | Enum)


_KINDS = {name: _kinds(hint) for each in _ARGUMENTS for name, hint in get_type_hints(each).items()}
_LISTS = {
    name
    for each in _ARGUMENTS
    for name, hint in get_type_hints(each).items()
    if any(get_origin(part) is list for part in (hint, *get_args(hint)))
}
_DEFAULTS = {
    field.name: field.default for each in _ARGUMENTS for field in fields(each) if field.init
}
_OPTIONAL = {name for name in _DEFAULTS if type(None) in _KINDS[name] or _DEFAULTS[name] is None}
# Fields that take the text of a recipe as written: YAML 1.1 reads `no` as false and 1.10 as 1.1.
_TEXT = {
    name for name in _DEFAULTS if bool not in _KINDS[name] and any(map(_is_text, _KINDS[name]))
} - {"resume_from_checkpoint"}  # a path or true

BY_PAIRS = "by_pairs"
_WHY = "why"
# Fields that are read before the number of pairs is known.
_BEFORE_PAIRS = {field.name for field in fields(DataArguments)} - {
    "augment",
    "min_frequency",
} | {
    "output_dir",
    "seed",
    "resume_from_checkpoint",
    "model_name_or_path",
    "model_class",
    "teacher",
    "lora_r",
}

# Names in other toolkits that are spelled very differently.
_OTHER_NAMES = {
    "batch_size": "per_device_train_batch_size",
    "beam_size": "test_num_beams",
    "dataset_name": "train",
    "epochs": "num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    "max_epochs": "num_train_epochs",
    "max_predict_samples": "max_test_samples",
    "max_tokens": "max_tokens_per_batch",
    "max_updates": "max_steps",
    "model": "model_name_or_path",
    "num_beams": "test_num_beams",
    "output": "output_dir",
    "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint",
    "src_lang": "source_lang",
    "steps": "max_steps",
    "tgt_lang": "target_lang",
    "tokenize": "bleu_tokenize",
    "tokenizer": "tokenizer_name",
    "train_batch_size": "per_device_train_batch_size",
    "train_file": "train",
    "update_freq": "tokens_per_update",
    "warmup": "warmup_steps",
}


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a wrong value in one line, without the usage of three hundred flags."""
        raise UserError(f"{' '.join(message.split())} (--help lists all arguments)")

    def add_argument(self, *flags: str, **settings: Any) -> argparse.Action:
        """Let optional arguments take `null`."""
        if flags[0].removeprefix("--") in _OPTIONAL and "type" in settings:
            convert: Callable[[str], Any] = settings["type"]

            def or_none(text: str) -> Any:
                return None if text == _NULL else convert(text)

            # argparse: "invalid int value".
            or_none.__name__ = getattr(convert, "__name__", "value")
            settings["type"] = or_none
            if "choices" in settings:
                settings["choices"] = [*settings["choices"], None]
        return super().add_argument(*flags, **settings)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Read a list of one `null` as None. Refuse a value that follows no field."""
        namespace, rest = super().parse_known_args(*args, **kwargs)
        if rest:
            raise UserError(
                f"{rest[0]}: it follows no field; write --FIELD VALUE, such as --train train.en train.de"
            )
        for name, value in vars(namespace).items():
            if value == [None]:
                setattr(namespace, name, None)
        return namespace, rest


def training_parser() -> HfArgumentParser:
    """The parser of all fields of a run."""
    return _Parser(
        _ARGUMENTS, allow_abbrev=False, description="Train a translation model from a recipe."
    )


def parse_recipe(arguments: Sequence[str]) -> ParsedArguments:
    """Parse a recipe and the flags after it.

    Args:
        arguments: the command line: optionally the path of a YAML file, then `--field value` flags, which override it.

    Returns:
        The arguments of model, data and run.

    Raises:
        UserError: no such file, not YAML, an unknown field (the message names the closest one), a repeated field, or a
            wrong value.

    With `by_pairs` in the recipe, `choices` of the run arguments has the arguments for each size of the training text.
    """
    arguments = list(arguments)
    parser = training_parser()
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    values = _read(recipe) if recipe else {}
    rows = values.pop(BY_PAIRS, {})
    from_file = list(_as_flags(values, recipe)) if recipe else []
    given = _named(arguments)
    for name in sorted(given - {"help", ""}):
        _require_field(name, "the command line")
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        sys.exit(0)
    require_first_rank()
    parsed = _parse(parser, from_file, arguments)
    for pairs, row in sorted(rows.items()):
        where = f"{recipe}: {BY_PAIRS}: {pairs}"
        for name in row.keys() & (_BEFORE_PAIRS | values.keys()):
            reason = (
                "is outside by_pairs too: keep one"
                if name in values
                else "cannot depend on the pairs"
            )
            raise UserError(f"{where}: {name} {reason}")
        why = row.pop(_WHY, "")
        arguments_of_row = _parse(parser, [*from_file, *_as_flags(row, where)], arguments)
        row_fields = {name: value for name, value in row.items() if name not in given}
        parsed[-1].choices[pairs] = Choice(row_fields, why, arguments_of_row)
    return parsed


def _parse(parser: HfArgumentParser, recipe: list[str], given: list[str]) -> ParsedArguments:
    flags = [*recipe, *given]
    try:
        model, data, run = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)
    # The argument classes of transformers raise these for contradicting values or a missing package.
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        ImportError,
        OSError,
    ) as error:
        if "Unable to find address for: " in str(error):
            name = str(error).split()[-1]
            raise UserError(
                f"GLOO_SOCKET_IFNAME: this host has no interface {name}; `ip address` lists them"
            ) from None
        line = " ".join(str(error).split()) or repr(error)
        raise missing_extra(error) or UserError(_with_field(line, flags)) from None
    run.named = sorted(_named(flags))
    run.of_recipe = sorted(_named(recipe) - _named(given))
    return model, data, run


def _with_field(line: str, flags: Sequence[str]) -> str:
    """Put the field before the message of an enumeration of transformers, which gives only the wrong value."""
    wrong = re.match(r"(\S+) is not a valid \w+, please select one of ", line)
    if wrong is None:
        return line
    # `--name=value`, or `--name` and then `value`
    given = re.findall(r"^--(\w+)(?:=|\n)(.*)$", "\n".join(flags), re.MULTILINE)
    names = [name for name, value in given if value == wrong[1]]
    return f"{names[-1]}: {line}" if names else line


def _named(flags: Sequence[str]) -> set[str]:
    """The names of the fields among flags and their values."""
    return {
        flag.removeprefix("--").split("=")[0].replace("-", "_")
        for flag in flags
        if flag.startswith("--")
    }


def _read(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    if not path.is_file():
        raise UserError(
            f"there is no recipe {recipe}; `vanilla-transformer recipes` lists those that have a name"
        )
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{recipe} must contain lines `field: value`")
        return _values(root, loader, recipe)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{recipe} is not YAML: {' '.join(str(error).split())}") from None


def _values(root: yaml.MappingNode, loader: yaml.SafeLoader, recipe: str) -> dict[str, Any]:
    """Read the fields of a recipe, and refuse unknown and repeated ones."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in root.value:
        name = str(key.value)
        line = key.start_mark.line + 1
        if name not in (BY_PAIRS, _WHY):
            _require_field(name, recipe)
        if name in values:
            raise UserError(
                f"{recipe} gives {name} in the lines {lines[name]} and {line}: keep one"
            )
        value = (
            _rows(value, loader, recipe)
            if name == BY_PAIRS
            else _value(value, loader, name in _TEXT | {_WHY})
        )
        values[name], lines[name] = value, line
    return values


def _rows(node: yaml.Node, loader: yaml.SafeLoader, recipe: str) -> dict[int, dict[str, Any]]:
    """Read `by_pairs`: limits of the number of training pairs, and for each the fields and optionally `why`."""
    rows: dict[int, dict[str, Any]] = {}
    for pairs, row in node.value if isinstance(node, yaml.MappingNode) else [(node, node)]:
        if not (
            isinstance(row, yaml.MappingNode) and str(pairs.value).isdecimal() and int(pairs.value)
        ):
            raise UserError(
                f"{recipe}: {BY_PAIRS} needs rows such as `20000: {{dropout: 0.3, why: few words}}`"
            )
        rows[int(pairs.value)] = _values(row, loader, f"{recipe}: {BY_PAIRS}: {pairs.value}")
    return rows


def _value(node: yaml.Node, loader: yaml.SafeLoader, as_text: bool) -> Any:
    if isinstance(node, yaml.ScalarNode) and as_text:
        return None if node.tag == _NULL_TAG else node.value
    if isinstance(node, yaml.SequenceNode) and as_text:
        return [_value(each, loader, as_text) for each in node.value]
    return loader.construct_object(node, deep=True)


def _as_flags(values: dict[str, Any], recipe: str) -> Iterator[str]:
    """The recipe as command-line flags, so that both get the same conversions and checks."""
    for name, value in values.items():
        if value is None and name not in _OPTIONAL:
            raise UserError(
                f"{recipe} has no value for {name}; leave the line out for the default, {_DEFAULTS[name]}"
            )
        if isinstance(value, list):
            if name not in _LISTS:
                raise UserError(f"{recipe}: {name}: {value}: give one value, not a list")
            yield f"--{name}"
            yield from (str(each) for each in value)
        elif isinstance(value, dict) and name in _LISTS:
            yield from (f"--{name}", *(f"{key}={each}" for key, each in value.items()))
        else:
            text = (
                json.dumps(value)
                if isinstance(value, dict)
                else _NULL
                if value is None
                else str(value)
            )
            yield f"--{name}={text}"  # a text may start with a dash


def _require_field(name: str, where: str) -> None:
    if name in _DEFAULTS or name.removeprefix("no_") in _DEFAULTS:
        return
    hint = did_you_mean(_OTHER_NAMES.get(name, name), _DEFAULTS, cutoff=0.5)
    raise UserError(f"{where} has an unknown field {name}" + (f"; {hint}" if hint else ""))
