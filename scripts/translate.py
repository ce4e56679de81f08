"""Translate text line by line with a trained model.

  python scripts/translate.py --model runs/numbers_en_de < source.txt > translation.txt
  python scripts/translate.py --model runs/numbers_en_de --input source.txt.gz --output translation.txt
  python scripts/translate.py --model runs/numbers_en_de --input source.txt --score translation.txt > scores.tsv

As many lines come out as go in, in the same order; an empty line stays an empty line. Text is UTF-8, and only a line
feed ends a line. Lines are read some batches ahead and sorted by length; --batch_size 1 answers each line at once.
What goes into a file survives being killed: the same command again goes on where it stopped. Several processes share
the work: accelerate launch --num_processes 4 scripts/translate.py --model DIR --input F --output F
--score writes, for each pair of lines, the natural logarithm of the translation's probability, a tab, and those of its
words (the end of the sentence is the last of them).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that translates."""
    group = parser.add_argument_group("decoding (the defaults are those of the model's generation_config.json)")
    group.add_argument("--num_beams", type=int, metavar="N", help="beam width; 1 is greedy decoding")
    group.add_argument(
        "--length_penalty", type=float, metavar="A", help="score log P / length^A (default: the paper's)"
    )
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
    parser.add_argument("--score", metavar="F", help="finished translations, one a line: say how likely they are")
    add_decoding_arguments(parser)
    return parser.parse_args()


def translate_to_file(arguments: argparse.Namespace) -> None:
    """Into a file: in parts that a killed job leaves for the next one, shared by all processes."""
    from accelerate import PartialState
    from tqdm import tqdm

    from hf_vanilla_transformer.evaluation.large_jobs import translate_file
    from hf_vanilla_transformer.evaluation.translating import Translator

    processes = PartialState(cpu=arguments.device == "cpu")
    device = arguments.device or (str(processes.device) if processes.num_processes > 1 else None)
    translator = Translator.from_pretrained(arguments.model, device, arguments.dtype)
    settings = {name: value for name, value in decoding_settings(arguments).items() if value is not None}
    hidden = processes.process_index > 0 or not sys.stderr.isatty()
    with tqdm(unit=" sentences", disable=hidden) as bar:
        translate_file(
            translator,
            arguments.input,
            arguments.output,
            processes,
            progress=lambda lines, _: bar.update(lines * processes.num_processes),
            **settings,
        )


def scores(translator: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """One line for each pair of lines of --input and --score."""
    from hf_vanilla_transformer.errors import UserError
    from hf_vanilla_transformer.evaluation.scoring import score_translations_of
    from hf_vanilla_transformer.evaluation.text_lines import read_lines

    sources, targets = list(read_lines(arguments.input)), list(read_lines(arguments.score))
    if len(sources) != len(targets):
        name = arguments.input or "standard input"
        raise UserError(f"{name} has {len(sources)} lines, {arguments.score} has {len(targets)}: each needs its other")
    for scored in score_translations_of(translator, zip(sources, targets, strict=True), arguments.batch_size):
        words = " ".join(f"{log_p:.4f}" for log_p in scored.log_probabilities)
        yield f"{scored.log_probability:.4f}\t{words}"


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation.text_lines import line_writer, read_lines
    from hf_vanilla_transformer.evaluation.translating import Translator

    quiet()
    if (
        arguments.output
        and not arguments.score
        and (not (place := Path(arguments.output)).exists() or place.is_file())
    ):
        return translate_to_file(arguments)
    with line_writer(arguments.output) as write:
        translator = Translator.from_pretrained(arguments.model, arguments.device, arguments.dtype)
        if arguments.score:
            for line in scores(translator, arguments):
                write(line)
            return
        for translation in translator.translate(read_lines(arguments.input), **decoding_settings(arguments)):
            # a model can make any character, but a line has to stay one line
            write(translation.replace("\n", " "))


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
