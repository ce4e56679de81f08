"""Translate text line by line with a trained model.

  python scripts/translate.py --model runs/numbers_en_de < source.txt > translation.txt
  python scripts/translate.py --model runs/numbers_en_de --input source.txt.gz --output translation.txt

As many lines come out as go in, in the same order; an empty line stays an empty line. Text is UTF-8, and only a line
feed ends a line. Lines are read some batches ahead and sorted by length; --batch_size 1 answers each line at once.
"""

import argparse
from typing import Any


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that translates."""
    group = parser.add_argument_group("decoding (the defaults are those of the model's generation_config.json)")
    group.add_argument("--num_beams", type=int, metavar="N", help="beam width; 1 is greedy decoding")
    group.add_argument("--length_penalty", type=float, metavar="A", help="more favours longer translations")
    group.add_argument(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help="longest translation (default: longest source of the batch + 50)",
    )
    group.add_argument(
        "--batch_size", type=int, default=64, metavar="N", help="sentences per batch (default: %(default)s)"
    )
    group.add_argument("--device", help='such as "cpu" or "cuda:1" (default: the accelerator if there is one)')
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="precision (default: that of the checkpoint)"
    )


def decoding_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those flags of `add_decoding_arguments` that `Translator.translate` takes."""
    return {name: getattr(arguments, name) for name in ("num_beams", "length_penalty", "max_new_tokens", "batch_size")}


def quiet() -> None:
    """No progress bars and no advice from transformers: only the translation, or what is wrong."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the trained model")
    parser.add_argument("--input", metavar="F", help="text to translate, .gz too (default: standard input)")
    parser.add_argument("--output", metavar="F", help="file for the translations (default: standard output)")
    add_decoding_arguments(parser)
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation.text_lines import line_writer, read_lines
    from hf_vanilla_transformer.evaluation.translating import Translator

    quiet()
    with line_writer(arguments.output) as write:
        translator = Translator.from_pretrained(arguments.model, arguments.device, arguments.dtype)
        for translation in translator.translate(read_lines(arguments.input), **decoding_settings(arguments)):
            # a model can make any character, but a line has to stay one line
            write(translation.replace("\n", " "))


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
