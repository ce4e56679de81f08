"""What `translate` and `predict` share: their flags, and the way from lines of text to lines of text."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, codes_of, load_translator, ray_pool, resumable
from .parsing import (
    CANDIDATES,
    DECODING,
    OF_SEARCHES,
    Flag,
    Parser,
    add_flags,
    add_shared_flags,
    given_values,
)

# Flags that have an effect on new outputs alone.
OF_OUTPUTS = ("n_best", "n_best_format", "spellings", "alignment", "normalize")


def add_line_flags(parser: Parser, output: str) -> None:
    """Add the flags of both subcommands. `output` names what is written for a line, such as "translation"."""
    add_flags(
        parser,
        output=Flag("F", f"file for the {output}s (default: standard output)"),
        n_best=Flag("N", f"write N {output}s of each line, with their scores", int),
        score=Flag("F", f"existing {output}s, one per line: write their log-probabilities"),
    )
    add_shared_flags(parser, *CANDIDATES)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "shortlist", "device", "dtype", "shard", "ray")
    add_shared_flags(parser, *MODEL_CODE)


def check_files(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and two files from one pipe."""
    from hf_vanilla_transformer.utils.errors import UserError

    for name in given_values(arguments, *OF_OUTPUTS, *OF_SEARCHES, "workers", "shortlist", "raw"):
        if arguments.score:
            raise UserError(f"--score is for existing outputs, --{name} is for new ones")
    for name in given_values(arguments, "shard", "ray"):
        if arguments.output in (None, "-"):
            raise UserError(f"--{name} shares a file: it needs --output")
    if arguments.score == "-" and arguments.input in (None, "-"):
        raise UserError("--score and --input cannot both be standard input: name a file")


def write_lines(
    arguments: argparse.Namespace,
    columns: Any,
    column: str = "translation",
    one_line: bool = True,
    **settings: Any,
) -> None:
    """Write the outputs of the sentences of --input, or the scores of --score, to where the flags say.

    Args:
        columns: of the tables that are read.
        column: of the outputs, in a table that is written.
        one_line: whether a line break within a cell becomes a space.
        settings: arguments of `translated_lines`, in addition to those that the flags give.
    """
    from hf_vanilla_transformer.inference.file_translation import translate_file, translated_lines
    from hf_vanilla_transformer.inference.sentences import file_of_lines
    from hf_vanilla_transformer.inference.text_io import line_writer
    from hf_vanilla_transformer.utils.normalization import import_normalizer

    if arguments.score:
        settings = given_values(arguments, "batch_size", "max_tokens_per_batch")
    else:
        names = (*DECODING, "n_best", "n_best_format", "spellings", "alignment")
        settings |= given_values(arguments, *names)
    if arguments.normalize is not None:
        settings["normalize"] = import_normalizer(arguments.normalize)
    if _is_file(arguments.output):
        with resumable() as progress:
            translator = load_translator(arguments, arguments.model)
            sentences, codes = _input(arguments, translator, columns, one_line)
            translate_file(
                translator,
                sentences if codes else file_of_lines(arguments.input, columns) or sentences,
                arguments.output,
                column=column,
                codes=codes,
                shard=arguments.shard,
                pool=ray_pool(arguments, "model"),
                progress=progress,
                **settings,
            )
        return
    if arguments.input in (None, "-") and sys.stdin is not None and sys.stdin.isatty():
        settings.setdefault("batch_size", 1)  # each line is answered at once
        print("type a line, or Ctrl-D to end", file=sys.stderr)
    with line_writer(arguments.output) as write:
        translator = load_translator(arguments, arguments.model)
        sentences, codes = _input(arguments, translator, columns, one_line)
        for line in translated_lines(translator, sentences, **settings, **codes):
            write(line)


def _is_file(output: str | None) -> bool:
    """Return whether an output is a file, which a killed job can resume, and no pipe or device."""
    if output in (None, "", "-"):
        return False
    return Path(output).is_file() or not Path(output).exists()


def _input(
    arguments: argparse.Namespace, translator: Any, columns: Any, one_line: bool
) -> tuple[Iterator[str], dict[str, Any]]:
    """The sentences of --input, those of --score, and their languages, for a model of many."""
    from hf_vanilla_transformer.inference import sentences

    if not arguments.score and translator.directions.source is None:
        return sentences.read_sentences(arguments.input, "source", columns, one_line), {}
    texts, found = sentences.read_directed_sentences(
        arguments.input, columns, one_line, arguments.score
    )
    targets = {"targets": found.pop("targets")} if arguments.score else {}
    return texts, targets | codes_of(arguments, translator, found)
