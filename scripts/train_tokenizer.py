"""Train a joint byte-pair encoding on text files and save it as a Hugging Face tokenizer.

    python scripts/train_tokenizer.py train.en train.de --vocab_size 10000 --output_dir tokenizer

Give the files of both languages for one shared vocabulary, as in the paper. One sentence a line; plain or .gz.
"""

import argparse
from itertools import chain

from hf_vanilla_transformer.data import read_lines, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="text files, UTF-8, one sentence a line, plain or gzip")
    parser.add_argument("--output_dir", required=True, help="folder for the tokenizer; made if there is none")
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=37000,
        help="tokens in all, with 4 special ones and 256 bytes (default 37000)",
    )
    parser.add_argument(
        "--min_frequency", type=int, default=2, help="merge only pairs that occur this often (default 2)"
    )
    parser.add_argument("--lowercase", action="store_true", help="lower-case all text; the case is lost")
    arguments = parser.parse_args()

    lines = chain.from_iterable(map(read_lines, arguments.files))
    tokenizer = train_tokenizer(lines, arguments.vocab_size, arguments.min_frequency, arguments.lowercase)
    save_tokenizers(arguments.output_dir, tokenizer)
    print(f"{len(tokenizer):,} tokens learnt from {', '.join(arguments.files)}; saved in {arguments.output_dir}")
    if len(tokenizer) < arguments.vocab_size:
        print(f"no more pairs occur {arguments.min_frequency} times: {arguments.vocab_size:,} were asked for")


if __name__ == "__main__":
    run_command(main)
