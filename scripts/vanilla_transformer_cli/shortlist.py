"""Build a shortlist: for each source token the target tokens that the output layer computes.

  vanilla-transformer shortlist --model runs/mine --source train.en --target train.de --output mine.shortlist
  vanilla-transformer translate --model runs/mine --shortlist mine.shortlist --input input.en
  vanilla-transformer export --to ctranslate2 runs/mine ct2 --vmap mine.shortlist

The model aligns the pairs by its attention. The shortlist is a vocabulary mapping of CTranslate2.
"""

import argparse

from .models import MODEL_CODE, load_translator
from .parsing import Flag, Parser, add_flags, add_shared_flags


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        model=Flag("DIR", "model folder", required=True),
        source=Flag(
            "F", "sentences of the training data, one per line, .gz too, or a table", required=True
        ),
        target=Flag("F", "their translations", required=True),
        output=Flag("F", "file for the shortlist", required=True),
    )
    add_shared_flags(parser, "device", "dtype", *MODEL_CODE)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.sentences import stream_sentence_pairs
    from hf_vanilla_transformer.inference.shortlist_files import write_shortlist

    translator = load_translator(arguments, [arguments.model])
    rows = stream_sentence_pairs(arguments.source, arguments.target)
    pairs = ((source, target) for source, target, _ in rows)
    count = write_shortlist(translator, pairs, arguments.output)
    print(f"{arguments.output}: {count:,} source tokens")
