"""Drop damaged pairs from training text, and show what was dropped.

  vanilla-transformer clean train.en train.de --output clean.en clean.de
  vanilla-transformer clean corpus.tsv --output clean.tsv --exclude test.en test.de --report report.html

Limits of length ratio and script come from the text itself. In a table with the columns source_lang and target_lang
each direction has its own, and a TSV keeps all columns. Pairs with a sentence of the --exclude text are dropped, and
so are duplicates. Of near duplicates the best is kept, and entities (&amp;) on one side become their characters. The
report shows ten examples of each rule. The output of OpusFilter or OpusCleaner is plain text, which `train` reads: use
them for heavier filters.

--workers N judges pairs in N processes. Output and report are the same for any N. A pair takes a byte of memory, and
28 in temporary files next to the output.

--task sequence is for text that is no language. It drops pairs that are too long, that are duplicates, or that have a
side in the --exclude text, and changes nothing in the others.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .parsing import COLUMNS, COLUMNS_TITLE, Flag, Parser, add_flags, add_shared_flags, given_values

TASKS = ("language", "sequence")

_TABLES = ".tsv", ".tsv.gz"  # of files that are written


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="as of `train --train`: train.en train.de, a CSV ...",
    )
    add_flags(
        parser,
        output=Flag("F", "two text files, source first, or a TSV", required=True, nargs="+"),
        exclude=Flag("INPUT", "validation and test text", nargs="+"),
        dropped=Flag(
            "F", "TSV for the dropped pairs: rule, line, source, target, and other columns"
        ),
        report=Flag("F", "HTML file for the counts and examples"),
        task=Flag(
            None,
            "sequence: reactions, phonemes, code, formulas (default: %(default)s)",
            choices=TASKS,
            default="language",
        ),
        skip=Flag("RULE", "rules that are not applied", nargs="+", default=[]),
        workers=Flag("N", "processes (default: %(default)s)", int, default=1),
        detect="drop other languages (extra detect); needs --source_lang and --target_lang, or their columns",
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)


def check_arguments(parser: Parser, parsed: argparse.Namespace) -> None:
    if len(parsed.output) > 2 or (
        len(parsed.output) == 1 and not parsed.output[0].endswith(_TABLES)
    ):
        parser.error(
            f"--output {' '.join(parsed.output)}: give two text files, source first, or one .tsv"
        )


def _row(cells: Sequence[str]) -> str:
    """A line of a TSV. A space takes the place of signs that would end a cell or a line."""
    return "\t".join(re.sub(r"[\t\r\n]+", " ", cell) for cell in cells)


def _write(arguments: argparse.Namespace, rows: Any, judged: Any) -> None:
    """Write the pairs that are kept, and those that are not."""
    from hf_vanilla_transformer.inference.text_io import line_writer

    with ExitStack() as files:
        write = [files.enter_context(line_writer(name)) for name in arguments.output]
        write_dropped = (
            files.enter_context(line_writer(arguments.dropped)) if arguments.dropped else None
        )
        is_table = len(write) == 1
        for number, (rule, row) in enumerate(judged):
            if is_table and number == 0:
                write[0](_row(rows.header()))
            reason = row.defect or rule
            if reason is None and is_table:
                write[0](_row(rows.record(row)))
            elif reason is None:
                for write_side, text in zip(write, row.pair, strict=True):
                    write_side(re.sub(r"[\r\n]+", " ", text))
            elif write_dropped is not None:
                write_dropped(_row([reason, str(row.line), *rows.record(row)]))


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.cleaning.judging import judge_pairs
    from hf_vanilla_transformer.cleaning.report import report_page, report_text
    from hf_vanilla_transformer.cleaning.rows import CleaningInput
    from hf_vanilla_transformer.cleaning.rules import RULES, SEQUENCE_RULES
    from hf_vanilla_transformer.corpora import load_pairs
    from hf_vanilla_transformer.corpora.columns import SIDES, Columns
    from hf_vanilla_transformer.inference.text_io import line_writer
    from hf_vanilla_transformer.text.language_tokens import CODES
    from hf_vanilla_transformer.utils.errors import UserError

    if arguments.dropped and not arguments.dropped.endswith(_TABLES):
        raise UserError(
            f"dropped: {arguments.dropped}: pairs and rules are a table, give a name that ends in .tsv"
        )
    of_task = RULES if arguments.task == "language" else SEQUENCE_RULES
    unknown = [rule for rule in arguments.skip if rule not in of_task]
    if unknown:
        reason = f"{unknown[0]!r} is no rule of --task {arguments.task}"
        raise UserError(f"skip: {reason}; choose from {', '.join(of_task)}")
    rules = [rule for rule in of_task if rule not in arguments.skip]
    if arguments.detect and "language" not in rules:
        raise UserError("detect: it has no effect without the rule language, which is left out")
    columns = given_values(arguments, *COLUMNS)
    rows = CleaningInput.open(arguments.input, Columns(**columns))
    named = given_values(arguments, "source_column", "target_column")
    is_plain = all(len(source.input.files) == 2 for source in rows.sources)
    if named and is_plain and not arguments.exclude:
        raise UserError(f"--{next(iter(named))} has no effect: plain text has no columns")
    excluded: Iterable[str] = []
    if arguments.exclude:
        held_out = load_pairs(arguments.exclude, field="exclude", **columns)[0]
        excluded = (text for batch in held_out.iter(1000) for side in SIDES for text in batch[side])
    if arguments.detect and not (arguments.source_lang and arguments.target_lang):
        next(iter(rows), None)
        if not set(CODES) <= set(rows.names):
            raise UserError(
                "detect: give --source_lang and --target_lang: the text does not name its languages"
            )
    output = Path(arguments.output[0]).resolve()
    judged, report = judge_pairs(
        rows,
        rules,
        excluded,
        arguments.detect,
        task=arguments.task,
        workers=arguments.workers,
        folder=output.parent if output.is_file() or not output.exists() else None,
    )
    with ExitStack() as files:
        write_page = (
            files.enter_context(line_writer(arguments.report)) if arguments.report else None
        )
        _write(arguments, rows, judged)
        if write_page is not None:
            write_page(report_page(report, rows.summary()))
    # The reader keeps what it can read, and the rules keep what is right.
    if not report.summary().startswith(rows.summary()):
        print(rows.summary())
    if len(arguments.output) == 2 and rows.names:
        print(f"left out the columns {', '.join(rows.names)}: a .tsv as --output keeps them")
    print(report_text(report))
