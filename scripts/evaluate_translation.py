"""Score a model on parallel text, or a finished translation against its reference.

  python scripts/evaluate_translation.py --model runs/numbers_en_de --source test.en --reference test.de
  python scripts/evaluate_translation.py --hypothesis translation.txt --reference test.de --tokenize none

Prints BLEU and chrF with sacreBLEU's signatures, and the percentage of lines that equal their reference.
"""

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

from translate import add_decoding_arguments, decoding_settings, load_translator, quiet


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", nargs="+", metavar="DIR", help="folder of the trained model, or several to average; needs --source"
    )
    what.add_argument("--hypothesis", metavar="F", help="a finished translation, one sentence a line")
    parser.add_argument("--source", metavar="F", help="text to translate, one sentence a line, .gz too")
    parser.add_argument("--reference", required=True, metavar="F", help="the right translations, one a line, .gz too")
    parser.add_argument("--output", metavar="F", help="JSON file for the scores and how they came about")
    parser.add_argument(
        "--tokenize", default="13a", metavar="NAME",
        help="sacreBLEU's tokenizer for BLEU: 13a for plain text, none for text that is tokenised already, "
        "intl, char, zh and others (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--lowercase", action="store_true", help="score without regard to case")
    add_decoding_arguments(parser)
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.source is None):
        parser.error("--model and --source belong together; --hypothesis needs neither")
    return arguments


def translate_source(arguments: argparse.Namespace, references: int) -> tuple[list[str], dict[str, Any]]:
    """Translate --source; give the translations and how they were made."""
    from hf_vanilla_transformer.inference.text_io import read_lines

    sources = list(read_lines(arguments.source))
    check_lengths(arguments.source, len(sources), arguments.reference, references)
    translator = load_translator(arguments)
    settings = decoding_settings(arguments)
    start = time.perf_counter()
    translations = list(translator.translate(sources, **settings))
    seconds = time.perf_counter() - start
    return translations, {
        "model": arguments.model if len(arguments.model) > 1 else arguments.model[0],
        "source": arguments.source,
        "settings": translator.describe(**settings),
        "seconds": round(seconds, 3),
        "sentences_per_second": round(len(sources) / seconds, 3),
    }


def check_lengths(path: str, lines: int, reference: str, references: int) -> None:
    from hf_vanilla_transformer.errors import UserError

    if lines != references:
        raise UserError(f"{path} has {lines} lines, {reference} has {references}: each line needs its reference")
    if not references:
        raise UserError(f"{reference}: it is empty, there is nothing to score")


def print_scores(results: dict[str, Any]) -> None:
    print(f"{results['bleu_signature']} = {results['bleu']:.2f}")
    print(f"{results['chrf_signature']} = {results['chrf']:.2f}")
    print(f"exact match = {results['exact_match']:.2f} % of {results['sentences']} sentences")
    if "seconds" in results:
        print(f"{results['seconds']:.1f} seconds, {results['sentences_per_second']:.1f} sentences per second")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation.metrics import check_tokenizer, score_translations
    from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

    quiet()
    # what can be wrong is found before the model works for an hour
    check_tokenizer(arguments.tokenize)
    with line_writer(arguments.output) if arguments.output else nullcontext() as write:
        references = list(read_lines(arguments.reference))
        if arguments.model is not None:
            hypotheses, origin = translate_source(arguments, len(references))
        else:
            hypotheses, origin = list(read_lines(arguments.hypothesis)), {"hypothesis": arguments.hypothesis}
            check_lengths(arguments.hypothesis, len(hypotheses), arguments.reference, len(references))
        scores = score_translations(hypotheses, references, tokenize=arguments.tokenize, lowercase=arguments.lowercase)
        results = scores | origin | {"reference": arguments.reference}
        print_scores(results)
        if write:
            write(json.dumps(results, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
