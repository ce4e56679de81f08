"""Translate text line by line with a trained model.

  python scripts/translate.py --model runs/numbers_en_de < source.txt > translation.txt
  python scripts/translate.py --model runs/numbers_en_de --input source.txt.gz --output translation.txt
  python scripts/translate.py --model runs/numbers_en_de --input source.txt --score translation.txt > scores.tsv
  python scripts/translate.py --model runs/first runs/second --input source.txt --n_best 4 > best.txt

As many lines come out as go in, in the same order; an empty line stays an empty line. Text is UTF-8, and only a line
feed ends a line. Lines are read some batches ahead and sorted by length; --batch_size 1 answers each line at once.
What goes into a file survives being killed: the same command again goes on where it stopped. Several processes share
the work: accelerate launch --num_processes 4 scripts/translate.py --model DIR --input F --output F

--n_best N writes up to N lines for each line of the input, the best first, as Moses, fairseq and Marian do:
  i ||| translation ||| score
where i counts the lines of the input from 0 and the score is the natural logarithm of the probability over the length
penalty. --alignment adds " ||| " and, in Pharaoh format, which word comes from which: 0-0 1-2 links the first word of
the source with the first of the translation, the second with the third. Words are what spaces separate.
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
        "--batch_size", type=int, default=64, metavar="N", help="sentences per batch, at most (default: %(default)s)"
    )
    group.add_argument(
        "--max_tokens_per_batch", type=int, default=4096, metavar="N",
        help="source tokens per batch, padding included, at most; less needs less memory (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--workers", type=int, metavar="N",
        help="on a CPU, searches beside each other, each with --batch_size sentences and its part of the threads "
        "(default: one for each thread, up to 8)",
    )  # fmt: skip
    group.add_argument("--device", help='such as "cpu" or "cuda:1" (default: the accelerator if there is one)')
    group.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "int8", "fastest"],
        help="precision; int8 is for few sentences at once on a CPU: then the decoder's matrices have 8 bits, and the "
        "rest is bfloat16; fastest tries float32 and bfloat16 for a moment (default: that of the checkpoint)",
    )  # fmt: skip


def decoding_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those flags of `add_decoding_arguments` that `Translator.translate` takes."""
    names = ("num_beams", "length_penalty", "max_new_tokens", "batch_size", "max_tokens_per_batch")
    return {name: getattr(arguments, name) for name in names}


def load_translator(arguments: argparse.Namespace, device: str | None = None) -> Any:
    """The models of --model, ready to translate."""
    from hf_vanilla_transformer.inference.translator import Translator

    first, *others = arguments.model
    return Translator.from_pretrained(first, device or arguments.device, arguments.dtype, others, arguments.workers)


def quiet() -> None:
    """No progress bars and no advice from transformers: only the translation, or what is wrong."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, nargs="+", metavar="DIR",
        help="folder of the trained model; of several, which share a tokenizer, the probabilities are averaged",
    )  # fmt: skip
    parser.add_argument("--input", metavar="F", help="text to translate, .gz too (default: standard input)")
    parser.add_argument("--output", metavar="F", help="file for the translations (default: standard output)")
    parser.add_argument("--n_best", type=int, metavar="N", help="write N translations of each line, with their scores")
    parser.add_argument(
        "--prefix", metavar="F",
        help="what each translation must begin with, one a line; an empty line forces nothing, and the last word of a "
        "prefix may come out longer",
    )  # fmt: skip
    parser.add_argument("--alignment", action="store_true", help="write which word comes from which")
    parser.add_argument(
        "--alignment_layer", type=int, metavar="N",
        help="decoder layer whose attention tells it, counted from 1 (default: the last but one)",
    )  # fmt: skip
    parser.add_argument("--score", metavar="F", help="finished translations, one a line: say how likely they are")
    add_decoding_arguments(parser)
    return parser.parse_args()


def output_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `translated_lines` needs to know, as far as it is given."""
    settings = decoding_settings(arguments) | {
        "n_best": arguments.n_best,
        "alignment_layer": arguments.alignment_layer,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return given | {"alignment": True} if arguments.alignment else given


def check_combination(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and two files from one pipe."""
    from hf_vanilla_transformer.errors import UserError

    asked = [name for name in ("n_best", "prefix", "alignment", "alignment_layer") if getattr(arguments, name)]
    if arguments.score and asked:
        raise UserError(f"--score judges finished translations; --{asked[0]} is for new ones")
    if arguments.alignment_layer is not None and not arguments.alignment:
        raise UserError("--alignment_layer says where --alignment looks; give both, or neither")
    for name in ("prefix", "score"):
        if getattr(arguments, name) == "-" and arguments.input in (None, "-"):
            raise UserError(f"--{name} and --input cannot both be standard input; name a file")


def translate_to_file(arguments: argparse.Namespace) -> None:
    """Into a file: in parts that a killed job leaves for the next one, shared by all processes."""
    from accelerate import PartialState
    from tqdm import tqdm

    from hf_vanilla_transformer.errors import Interrupted
    from hf_vanilla_transformer.inference.file_translation import translate_file

    processes = PartialState(cpu=arguments.device == "cpu")
    device = arguments.device or (str(processes.device) if processes.num_processes > 1 else None)
    translator = load_translator(arguments, device)
    hidden = processes.process_index > 0 or not sys.stderr.isatty()
    with tqdm(unit=" sentences", disable=hidden) as bar:
        try:
            translate_file(
                translator,
                arguments.input,
                arguments.output,
                processes,
                prefixes=arguments.prefix,
                progress=lambda lines, _: bar.update(lines * processes.num_processes),
                **output_settings(arguments),
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted; what is finished is kept, and the same command goes on there") from None


def scores(translator: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """One line for each pair of lines of --input and --score."""
    from hf_vanilla_transformer.errors import UserError
    from hf_vanilla_transformer.inference.scoring import score_translations_of
    from hf_vanilla_transformer.inference.text_io import read_lines

    sources, targets = list(read_lines(arguments.input)), list(read_lines(arguments.score))
    if len(sources) != len(targets):
        name = arguments.input or "standard input"
        raise UserError(f"{name} has {len(sources)} lines, {arguments.score} has {len(targets)}: each needs its other")
    pairs, limits = zip(sources, targets, strict=True), (arguments.batch_size, arguments.max_tokens_per_batch)
    for scored in score_translations_of(translator, pairs, *limits):
        words = " ".join(f"{log_p:.4f}" for log_p in scored.log_probabilities)
        yield f"{scored.log_probability:.4f}\t{words}"


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

    quiet()
    check_combination(arguments)
    if (
        arguments.output
        and not arguments.score
        and (not (place := Path(arguments.output)).exists() or place.is_file())
    ):
        return translate_to_file(arguments)
    with line_writer(arguments.output) as write:
        translator = load_translator(arguments)
        if arguments.score:
            lines = scores(translator, arguments)
        else:
            prefixes = None if arguments.prefix is None else read_lines(arguments.prefix)
            settings = output_settings(arguments)
            lines = translated_lines(translator, read_lines(arguments.input), prefixes=prefixes, **settings)
        for line in lines:
            write(line)


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
