"""Predict target sequences line by line: reactions, phonemes, code, formulas.

  echo hello | vanilla-transformer predict --model g2p_en
  vanilla-transformer predict --model runs/reactions --input products.txt --output reactants.txt
  vanilla-transformer predict --model runs/reactions --input products.txt --num_beams 50 --n_best 50 > best.txt
  vanilla-transformer predict --model runs/reactions --input products.txt --score reactants.txt > scores.tsv

Without --input in a terminal it prompts for sequences. Arrow keys recall earlier ones, Ctrl-D ends.

The output has as many lines as the input, in the same order. An empty line stays empty. Text is UTF-8, and only a line
feed ends a line. A line is given to the model as it is. Its symbols that the model does not know are read as <unk>,
with a warning. A killed prediction into a file resumes with the same command. Jobs of a scheduler take --shard 1/64 to
--shard 64/64, in any order. Then `vanilla-transformer merge --output F` joins them. An output named .jsonl or .parquet
gets rows with line, source and prediction.

--n_best N writes up to N lines for each line of the input, best first:
  i ||| target ||| score
where i counts the lines of the input from 0 and the score is the log-probability over the length penalty. --format tsv
writes instead the number of the line and the rank, both from 1, the text, the score and the probability among the
candidates, --format jsonl a list of these for each line. The same texts are one candidate, also after --normalize.
With --spellings M, each M lines of the input are spellings of one source and get one list, ranked by the sum of
1 / rank over their lists.
--probabilities adds " ||| " and each token with its probability.
--score writes, for each pair of lines, the natural log-probability of the target, a tab, and one log-probability for
each token, including the token of the end.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from .models import (
    MODEL_CODE,
    answer_at_a_prompt,
    check_files,
    is_at_a_prompt,
    load_translator,
    ray_pool,
    score_lines,
    shared_work,
    writes_a_file,
)
from .parsing import CANDIDATES, DECODING, Parser, add_shared_flags, candidate_values, given_values

_COLUMNS = ("source_column", "target_column")


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        nargs="+",
        metavar="DIR",
        help="model folder, g2p_en or retrosynthesis; several form an ensemble",
    )
    add(
        "--input",
        metavar="F",
        help="sequences, one a line, .gz too, or a table (default: standard input)",
    )
    add("--output", metavar="F", help="file for the predictions (default: standard output)")
    add(
        "--n_best",
        type=int,
        metavar="N",
        help="write N predictions for each line, with their scores",
    )
    add_shared_flags(parser, *CANDIDATES)
    add(
        "--prefix",
        metavar="F",
        help="file with the start of each target, one per line; an empty line forces nothing",
    )
    add(
        "--probabilities",
        action="store_true",
        help="write the probability of each token, from 0 to 1",
    )
    add(
        "--score", metavar="F", help="existing targets, one per line: write their log-probabilities"
    )
    add_shared_flags(parser.add_argument_group("tables: CSV, TSV, JSON lines, Parquet"), *_COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "shortlist", "device", "dtype", "shard", "ray")
    add_shared_flags(parser, *MODEL_CODE)
    return parser.parse_args(arguments)


def check_combination(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and two files from one pipe."""
    from hf_vanilla_transformer.utils.errors import UserError

    for_new_ones = ("n_best", "n_best_format", "normalize", "spellings", "prefix", "probabilities")
    requested = [name for name in for_new_ones if getattr(arguments, name)]
    if arguments.score and requested:
        raise UserError(f"--score is for existing targets, --{requested[0]} is for new ones")
    check_files(arguments)


def output_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `translated_lines` that are given."""
    settings = given_values(arguments, *DECODING, "n_best", "probabilities")
    settings |= candidate_values(arguments)
    settings["protect"] = False
    return settings


def columns_of(arguments: argparse.Namespace) -> Any:
    """The columns of tables that the flags name."""
    from hf_vanilla_transformer.data.columns import Columns

    return Columns(**{name: getattr(arguments, name) for name in _COLUMNS})


def sources(arguments: argparse.Namespace) -> Iterator[str]:
    """The sequences of --input."""
    from hf_vanilla_transformer.inference.sentences import read_sentences

    return read_sentences(arguments.input, "source", columns_of(arguments), one_line=False)


def predict_to_file(arguments: argparse.Namespace) -> None:
    """Predict in chunks that all processes share, and that a killed job leaves for the next one."""
    from hf_vanilla_transformer.inference.file_translation import translate_file

    with shared_work(arguments) as (processes, device, progress):
        translator = load_translator(arguments, arguments.model, device)
        translate_file(
            translator,
            sources(arguments),
            arguments.output,
            processes,
            column="prediction",
            prefixes=arguments.prefix,
            shard=arguments.shard,
            pool=ray_pool(arguments, "model"),
            progress=progress,
            **output_settings(arguments),
        )


def scores(translator: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """One line for each pair of lines of --input and --score."""
    from hf_vanilla_transformer.inference.sentences import read_sentence_pairs

    columns = columns_of(arguments)
    lines, targets = read_sentence_pairs(arguments.input, arguments.score, columns, one_line=False)
    settings = given_values(arguments, "batch_size", "max_tokens_per_batch")
    return score_lines(translator, zip(lines, targets, strict=True), **settings)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

    check_combination(arguments)
    if writes_a_file(arguments):
        return predict_to_file(arguments)
    if is_at_a_prompt(arguments):
        return answer_at_a_prompt(arguments, output_settings(arguments))
    with line_writer(arguments.output) as write:
        translator = load_translator(arguments, arguments.model)
        if arguments.score:
            lines = scores(translator, arguments)
        else:
            prefixes = None if arguments.prefix is None else read_lines(arguments.prefix)
            settings = output_settings(arguments) | {"prefixes": prefixes}
            lines = translated_lines(translator, sources(arguments), **settings)
        for line in lines:
            write(line)
