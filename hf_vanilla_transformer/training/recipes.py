"""Parse recipes: YAML files of argument names and values, each of which a command-line flag can override."""

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from ..errors import UserError
from .arguments import DataArguments, ModelArguments, RunArguments

_ARGUMENTS = (ModelArguments, DataArguments, RunArguments)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a wrong value in one line, without the usage of three hundred flags."""
        raise UserError(f"{message} (--help lists all arguments)")


def parse_recipe(arguments: Sequence[str]) -> tuple[Any, DataArguments, RunArguments]:
    """Parse a recipe and the flags after it.

    Args:
        arguments: the command line: optionally the path of a YAML file, then `--field value` flags, which win.

    Returns:
        The arguments of model, data and run.

    Raises:
        UserError: no such file, not YAML, an unknown field (the message names the closest one), a wrong value.
    """
    arguments = list(arguments)
    parser = _Parser(_ARGUMENTS, allow_abbrev=False, description="Train a translation model from a recipe.")
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    from_file = list(_as_flags(_read(recipe), recipe)) if recipe else []
    for flag in arguments:
        if flag.startswith("--") and flag not in ("--help", "--"):
            _require_field(flag.removeprefix("--").split("=")[0].replace("-", "_"), "the command line")
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        sys.exit(0)
    try:
        model, data, run = parser.parse_args_into_dataclasses(args=from_file + arguments, look_for_args_file=False)
    except ValueError as error:  # values that contradict each other
        raise UserError(" ".join(str(error).split())) from None
    return model, data, run


def _read(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    if not path.is_file():
        raise UserError(f"there is no recipe {recipe}; `vanilla-transformer recipes` lists those that have a name")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{recipe} must hold lines `field: value`")
    return values


def _as_flags(values: dict[str, Any], recipe: str) -> Iterator[str]:
    """The recipe as command-line flags, so that both get the same conversions and checks."""
    for name, value in values.items():
        _require_field(str(name), recipe)  # YAML reads `on:` as True and `7:` as a number
        if value is None:
            continue
        yield f"--{name}"
        if isinstance(value, list):
            yield from (str(each) for each in value)
        else:
            yield json.dumps(value) if isinstance(value, dict) else str(value)


def _require_field(name: str, where: str) -> None:
    known = [each.name for arguments in _ARGUMENTS for each in fields(arguments)]
    if name in known or name.removeprefix("no_") in known:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise UserError(f"{where} has an unknown field {name}{hint}")
