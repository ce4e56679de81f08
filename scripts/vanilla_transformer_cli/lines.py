"""What `translate` and `predict` share: their flags, and the way from lines of text to lines of text."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, codes_of, load_translator, ray_pool, shared_work
from .parsing import CANDIDATES, DECODING, Flag, Parser, add_flags, add_shared_flags, given_values

# Flags that have an effect on new outputs alone: arguments of `translated_lines`, and others.
_SETTINGS = (
    "n_best",
    "n_best_format",
    "spellings",
    "alignment",
    "alignment_layer",
    "probabilities",
)
_OF_OUTPUTS = (*_SETTINGS, "normalize", "prefix")


def add_line_flags(parser: Parser, output: str) -> None:
    """Add the flags of both subcommands. `output` names what is written for a line, such as "translation"."""
    add_flags(
        parser,
        output=Flag("F", f"file for the {output}s (default: standard output)"),
        n_best=Flag("N", f"write N {output}s of each line, with their scores", int),
        prefix=Flag(
            "F",
            f"file with the start of each {output}, one per line; an empty line forces nothing, and the last word of "
            "a prefix may be continued",
        ),
        probabilities="write the probability of each token, from 0 to 1",
        score=Flag("F", f"existing {output}s, one per line: write their log-probabilities"),
    )
    add_shared_flags(parser, *CANDIDATES)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "shortlist", "device", "dtype", "shard", "ray")
    add_shared_flags(parser, *MODEL_CODE)


def flags_of_outputs(arguments: argparse.Namespace) -> list[str]:
    """The given flags that have an effect on new outputs alone."""
    return [*given_values(arguments, *_OF_OUTPUTS)]


def check_files(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and two files from one pipe."""
    from hf_vanilla_transformer.utils.errors import UserError

    requested = flags_of_outputs(arguments)
    if arguments.score and requested:
        raise UserError(f"--score is for existing outputs, --{requested[0]} is for new ones")
    for name in given_values(arguments, "shard", "ray"):
        if arguments.score or arguments.output in (None, "-"):
            raise UserError(f"--{name} shares a file: it needs --output, and cannot have --score")
    for name in ("prefix", "score"):
        if getattr(arguments, name) == "-" and arguments.input in (None, "-"):
            raise UserError(f"--{name} and --input cannot both be standard input: name a file")


def write_lines(
    arguments: argparse.Namespace,
    sentences: Iterable[str],
    columns: Any,
    column: str = "translation",
    one_line: bool = True,
    **settings: Any,
) -> None:
    """Write the outputs of the sentences of --input, or the scores of --score, to where the flags say.

    Args:
        sentences: of --input.
        columns: of the tables that are read.
        column: of the outputs, in a table that is written.
        one_line: whether a line break within a cell becomes a space.
        settings: arguments of `translated_lines`, in addition to those that the flags give.
    """
    from hf_vanilla_transformer.utils.normalization import import_normalizer

    settings |= given_values(arguments, *DECODING, *_SETTINGS)
    if arguments.normalize is not None:
        settings["normalize"] = import_normalizer(arguments.normalize)
    if _writes_a_file(arguments):
        _write_in_chunks(arguments, sentences, settings | {"column": column})
    elif _is_at_a_prompt(arguments):
        _answer_at_a_prompt(arguments, settings)
    else:
        _write_one_by_one(arguments, sentences, columns, one_line, settings)


def _writes_a_file(arguments: argparse.Namespace) -> bool:
    """Return whether new lines go to a file that a killed job can resume, and not to a pipe."""
    if arguments.score or arguments.output in (None, "", "-"):
        return False
    output = Path(arguments.output)
    return output.is_file() or not output.exists()


def _write_in_chunks(
    arguments: argparse.Namespace, sentences: Iterable[str], settings: dict[str, Any]
) -> None:
    """Write chunks that all processes share, and that a killed job leaves for the next one."""
    from hf_vanilla_transformer.inference.file_translation import translate_file

    with shared_work(arguments) as (processes, device, progress):
        translator = load_translator(arguments, arguments.model, device)
        translate_file(
            translator,
            sentences,
            arguments.output,
            processes,
            prefixes=arguments.prefix,
            codes=codes_of(arguments, translator, arguments.input),
            shard=arguments.shard,
            pool=ray_pool(arguments, "model"),
            progress=progress,
            **settings,
        )


def _is_at_a_prompt(arguments: argparse.Namespace) -> bool:
    """Return whether lines are typed at a terminal, and answered there."""
    files = (arguments.input, arguments.output, arguments.score, arguments.prefix)
    streams = (sys.stdin, sys.stdout)
    return not any(files) and all(stream is not None and stream.isatty() for stream in streams)


def _answer_at_a_prompt(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Print the outputs for the lines that a person types."""
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import prompt_lines
    from hf_vanilla_transformer.utils.errors import UserError

    translator = load_translator(arguments, arguments.model)
    translated_lines(translator, [], **settings)  # checks the arguments before the first prompt
    for line in prompt_lines():
        try:
            for output in translated_lines(translator, [line], **settings):
                print(output)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def _write_one_by_one(
    arguments: argparse.Namespace,
    sentences: Iterable[str],
    columns: Any,
    one_line: bool,
    settings: dict[str, Any],
) -> None:
    """Write each line as soon as it is known."""
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

    with line_writer(arguments.output) as write:
        translator = load_translator(arguments, arguments.model)
        codes = codes_of(arguments, translator, arguments.input)
        if arguments.score:
            lines = _scores(arguments, translator, columns, one_line, codes)
        else:
            prefixes = None if arguments.prefix is None else read_lines(arguments.prefix)
            lines = translated_lines(translator, sentences, prefixes=prefixes, **settings, **codes)
        for line in lines:
            write(line)


def _scores(
    arguments: argparse.Namespace,
    translator: Any,
    columns: Any,
    one_line: bool,
    codes: dict[str, Any],
) -> Iterator[str]:
    """For each pair of lines its log-probability, a tab, and those of its tokens."""
    from hf_vanilla_transformer.inference.scoring import score_translations_of
    from hf_vanilla_transformer.inference.sentences import read_sentence_pairs

    sides = read_sentence_pairs(arguments.input, arguments.score, columns, one_line=one_line)
    settings = given_values(arguments, "batch_size", "max_tokens_per_batch")
    for scored in score_translations_of(translator, zip(*sides, strict=True), **settings, **codes):
        tokens = " ".join(f"{log_p:.4f}" for log_p in scored.log_probabilities)
        yield f"{scored.log_probability:.4f}\t{tokens}"
