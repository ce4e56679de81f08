"""Join the shards of an output, after `vanilla-transformer translate` or `predict` with --shard I/N for each I.

  vanilla-transformer merge --output translation.txt

The shards lie in .translation.txt.parts next to the output. Copy shards of other machines into that folder. It is
deleted when the output is complete. A missing shard, and one of other text, model or settings, is an error.
"""

import argparse

from .parsing import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--output", required=True, metavar="F", help="the output that the shards were given"
    )


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.file_translation import merge_shards

    count = merge_shards(arguments.output)
    print(f"{arguments.output}: {count:,} chunk{'s' if count != 1 else ''}")
