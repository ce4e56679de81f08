"""Train a joint byte-pair encoding on text files and save it as a Hugging Face tokenizer.

  vanilla-transformer tokenizer train.en train.de --vocab_size 10000 --output_dir tokenizer

Give the files of both languages for one joint vocabulary, as in the paper.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .parsing import COLUMNS, COLUMNS_TITLE, Flag, Parser, add_flags, add_shared_flags, columns_of


def add_arguments(parser: Parser) -> None:
    parser.add_argument("files", nargs="+", help="text, one sentence per line, .gz too, or a table")
    add_flags(
        parser,
        output_dir=Flag("DIR", "folder of the tokenizer, created if necessary", required=True),
        vocab_size=Flag(
            "N",
            "number of tokens, including 4 special tokens and 256 bytes (default %(default)s)",
            int,
            default=37000,
        ),
        sentences=Flag(
            "N",
            "sentences to learn from, at most, drawn at random; text of a pipe is taken whole, and --sentencepiece "
            "needs about 2.3 GB of memory for a million (default 10,000,000)",
            int,
        ),
        sentencepiece="a SentencePiece vocabulary, for models to be used in Argos Translate",
        normalization=Flag(
            None,
            "of --sentencepiece, for both sides: identity keeps full-width punctuation in translations "
            "(default nmt_nfkc)",
            choices=("nmt_nfkc", "nfkc", "identity"),
        ),
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.corpora.columns import SIDES
    from hf_vanilla_transformer.inference.sentences import read_sentences
    from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
    from hf_vanilla_transformer.text.tokenizer_training import (
        SENTENCES,
        sampled_texts,
        train_sentencepiece_tokenizer,
    )
    from hf_vanilla_transformer.utils.errors import UserError, check_at_least_one

    folder = Path(arguments.output_dir)
    if folder.is_file():
        raise UserError(f"output_dir {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()):  # perhaps a model, which needs its own tokenizer
        raise UserError(f"output_dir {folder} exists already: name a new folder")
    columns = columns_of(arguments, None, *arguments.files)
    sides = [
        (file, side)
        for file in arguments.files
        for side in SIDES[: 2 if columns.are_in(Path(file)) else 1]
    ]

    def read() -> Iterator[str]:
        return chain.from_iterable(read_sentences(file, side, columns) for file, side in sides)

    limit = SENTENCES if arguments.sentences is None else arguments.sentences
    check_at_least_one(sentences=limit)
    are_files = all(Path(file).is_file() for file in arguments.files)  # a pipe is read once
    lines = sampled_texts(read, limit) if are_files else read()
    if arguments.normalization and not arguments.sentencepiece:
        raise UserError(
            "normalization: the BPE keeps all text, and its source is NFKC; add --sentencepiece"
        )
    if arguments.sentencepiece:
        normalization = arguments.normalization or "nmt_nfkc"
        tokenizer = train_sentencepiece_tokenizer(
            lines, arguments.vocab_size, normalization=normalization
        )
    else:
        tokenizer = train_tokenizer(lines, arguments.vocab_size)
    save_tokenizers(arguments.output_dir, tokenizer)
    print(
        f"{len(tokenizer):,} tokens learned from {', '.join(arguments.files)}; saved in {arguments.output_dir}"
    )
    if len(tokenizer) < arguments.vocab_size:
        print(f"below --vocab_size {arguments.vocab_size:,}: no other pair occurs twice")
