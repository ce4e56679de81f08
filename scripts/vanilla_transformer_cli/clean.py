"""Drop damaged pairs from training text, and show what was dropped.

  vanilla-transformer clean train.en train.de --output clean.en clean.de
  vanilla-transformer clean corpus.tsv --output clean.tsv --exclude test.en test.de --report report.html

Limits of length ratio and script come from the text itself. Pairs with a sentence of the --exclude text are dropped,
and so are duplicates. The report shows ten examples of each rule. The output of OpusFilter or OpusCleaner is plain
text, which `train` reads: use them for heavier filters.
"""

import argparse
from contextlib import ExitStack
from typing import Any

from .parsing import COLUMNS, COLUMNS_TITLE, Parser, add_shared_flags, given_values


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    parser.add_argument("input", nargs="+", metavar="INPUT", help="as of `train --train`: train.en train.de, a CSV …")
    parser.add_argument(
        "--output", required=True, nargs="+", metavar="F", help="two text files, source first, or a TSV"
    )
    parser.add_argument("--exclude", nargs="+", metavar="INPUT", help="validation and test text")
    parser.add_argument("--dropped", metavar="F", help="TSV for the dropped pairs: rule, line, source, target")
    parser.add_argument("--report", metavar="F", help="HTML file for the counts and examples")
    parser.add_argument("--skip", nargs="+", default=[], metavar="RULE", help="rules that are not applied")
    parser.add_argument("--max_characters", type=int, metavar="N", help="of a side (default: 1000)")
    parser.add_argument(
        "--max_ratio", type=float, metavar="R", help="of the lengths in characters (default: fits the text)"
    )
    parser.add_argument("--detect", action="store_true", help="drop other languages (extra detect); needs their codes")
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    parsed = parser.parse_args(arguments)
    if len(parsed.output) > 2 or (len(parsed.output) == 1 and not parsed.output[0].endswith((".tsv", ".tsv.gz"))):
        parser.error(f"--output {' '.join(parsed.output)}: give two text files, source first, or one .tsv")
    if parsed.detect and not (parsed.source_lang and parsed.target_lang):
        parser.error("--detect needs --source_lang and --target_lang")
    return parsed


def _limits(arguments: argparse.Namespace) -> dict[str, Any]:
    import math

    from hf_vanilla_transformer.utils.errors import UserError, check_at_least_one

    limits = given_values(arguments, "max_characters")
    check_at_least_one(**limits)
    if arguments.max_ratio is not None:
        if not arguments.max_ratio > 1:
            raise UserError(f"max_ratio: {arguments.max_ratio}: must be above 1")
        limits["ratio"] = (0.0, math.log(arguments.max_ratio))
    if arguments.detect:
        limits["languages"] = (arguments.source_lang, arguments.target_lang)
    return limits


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.data import load_pairs
    from hf_vanilla_transformer.data.cleaning import RULES, judge_pairs
    from hf_vanilla_transformer.data.cleaning_report import report_page, report_text
    from hf_vanilla_transformer.inference.text_io import line_writer
    from hf_vanilla_transformer.utils.errors import UserError

    unknown = [rule for rule in arguments.skip if rule not in RULES]
    if unknown:
        raise UserError(f"skip: {unknown[0]!r} is no rule; choose from {', '.join(RULES)}")
    columns = given_values(arguments, *COLUMNS)
    pairs, loaded = load_pairs(arguments.input, streaming=True, **columns)
    excluded: list[str] = []
    if arguments.exclude:
        rows = load_pairs(arguments.exclude, field="exclude", **columns)[0]
        excluded = [*rows["source"], *rows["target"]]
    rules = [rule for rule in RULES if rule not in arguments.skip]
    lines = ((row["line"], row["source"], row["target"]) for row in pairs)
    judged, report = judge_pairs(lines, rules, excluded, **_limits(arguments))
    with ExitStack() as files:
        write = [files.enter_context(line_writer(name)) for name in arguments.output]
        write_dropped = files.enter_context(line_writer(arguments.dropped)) if arguments.dropped else None
        write_page = files.enter_context(line_writer(arguments.report)) if arguments.report else None
        if len(write) == 1:
            write[0]("source\ttarget")
        for rule, line, pair in judged:
            texts = [" ".join(text.split()) if any(sign in text for sign in "\t\r\n") else text for text in pair]
            if rule is not None and write_dropped is not None:
                write_dropped("\t".join([rule, str(line), *texts]))
            if rule is None and len(write) == 1:
                write[0]("\t".join(texts))
            elif rule is None:
                for write_side, text in zip(write, texts, strict=True):
                    write_side(text)
        if write_page is not None:
            write_page(report_page(report, loaded.summary()))
    print(loaded.summary())
    print(report_text(report))
