"""Predict target sequences line by line: reactions, phonemes, code, formulas.

  echo hello | vanilla-transformer predict --model g2p_en
  vanilla-transformer predict --model runs/reactions --input products.txt --output reactants.txt
  vanilla-transformer predict --model runs/reactions --input products.txt --num_beams 50 --n_best 50 > best.txt
  vanilla-transformer predict --model runs/reactions --input products.txt --score reactants.txt > scores.tsv

The output has as many lines as the input, in the same order. An empty line stays empty. Text is UTF-8, and only a line
feed ends a line. A line is brought to the form that the model folder names, such as canonical SMILES (source_form of
`vanilla-transformer train`), and otherwise given to the model as it is. Its symbols that the model does not know are
read as <unk>, with a warning. A killed prediction into a file resumes with the same command. Jobs of a scheduler take
--shard 1/64 to --shard 64/64, in any order. Then `vanilla-transformer merge --output F` joins them. An output named
.jsonl or .parquet gets rows with line, source, prediction and, if the model has a closed vocabulary, the list unknown.

--n_best N writes up to N lines for each line of the input, best first:
  i ||| target ||| score
where i counts the lines of the input from 0 and the score is the log-probability over the length penalty. --format tsv
writes instead the number of the line and the rank, both from 1, the text, the score and the probability among the
candidates, and the unknown symbols of the line. --format jsonl writes a list of candidates for each line, with valid,
null without --normalize. The same texts are one candidate, also after --normalize.
With --spellings M, each M lines of the input are spellings of one source and get one list, ranked by the sum of
1 / rank over their lists of --num_beams hypotheses. They are read as they are.
--score writes, for each pair of lines, the natural log-probability of the target, a tab, and one log-probability for
each token, including the token of the end.
"""

import argparse

from .lines import add_line_flags, check_files, write_lines
from .parsing import Flag, Parser, add_flags, add_shared_flags, columns_of


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        model=Flag(
            "DIR",
            "model folder, g2p_en or retrosynthesis; several form an ensemble",
            required=True,
            nargs="+",
        ),
        input=Flag("F", "sequences, one a line, .gz too, or a table (default: standard input)"),
    )
    add_line_flags(parser, "prediction")
    columns = parser.add_argument_group("tables: CSV, TSV, JSON lines, Parquet, text with columns")
    add_shared_flags(columns, "source_column", "target_column", "line_pattern")


def main(arguments: argparse.Namespace) -> None:
    check_files(arguments)
    columns = columns_of(arguments, None, arguments.input, arguments.score)
    write_lines(arguments, columns, "prediction", one_line=False, protect=False)
