"""Score a model on parallel text, or an existing translation against its reference.

  vanilla-transformer evaluate --model runs/numbers_en_de --source test.en --reference test.de
  vanilla-transformer evaluate --model runs/numbers_en_de --source test.csv --reference test.csv
  vanilla-transformer evaluate --hypothesis translation.txt --reference test.de --bleu_tokenize none

Prints BLEU and chrF with sacreBLEU's signatures, and the percentage of lines that equal their reference.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, load_translator
from .parsing import COLUMNS, COLUMNS_TITLE, DECODING, Parser, add_shared_flags, columns_of, given_values


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    translations = parser.add_mutually_exclusive_group(required=True)
    translations.add_argument("--model", nargs="+", metavar="DIR", help="model folder, or several; needs --source")
    translations.add_argument("--hypothesis", metavar="F", help="an existing translation, one sentence per line")
    parser.add_argument("--source", metavar="F", help="text to translate, one sentence per line, .gz too, or a table")
    parser.add_argument(
        "--reference", required=True, metavar="F", help="references, one per line, or a table such as --source"
    )
    parser.add_argument("--output", metavar="F", help="JSON file for the scores and the settings")
    parser.add_argument(
        "--bleu_tokenize", metavar="NAME",
        help="sacreBLEU's tokenizer for BLEU: 13a, none for tokenised text, intl, char, zh … (default: fits the "
        "script of the references)",
    )  # fmt: skip
    parser.add_argument("--bleu_lowercase", action="store_true", help="case-insensitive scores")
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "device", "dtype")
    add_shared_flags(parser, *MODEL_CODE)
    parsed = parser.parse_args(arguments)
    if (parsed.model is None) != (parsed.source is None):
        parser.error("--model and --source belong together; --hypothesis needs neither")
    return parsed


def translate_source(arguments: argparse.Namespace, sources: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The translations of --source, and the settings that produced them."""
    translator = load_translator(arguments, arguments.model)
    settings = given_values(arguments, *DECODING)
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


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.data.readers import require_plain_text
    from hf_vanilla_transformer.errors import UserError
    from hf_vanilla_transformer.evaluation.metrics import check_tokenizer, score_translations
    from hf_vanilla_transformer.inference.sentences import read_sentence_pairs
    from hf_vanilla_transformer.inference.text_io import line_writer

    if arguments.bleu_tokenize:
        check_tokenizer(arguments.bleu_tokenize)  # before the model translates for an hour
    with line_writer(arguments.output) if arguments.output else nullcontext() as write:
        columns = columns_of(arguments, (arguments.model or [None])[0], arguments.source, arguments.reference)
        if arguments.hypothesis:
            require_plain_text(Path(arguments.hypothesis))
        texts, references = read_sentence_pairs(arguments.source or arguments.hypothesis, arguments.reference, columns)
        if not references:
            raise UserError(f"{arguments.reference}: it is empty, there is nothing to score")
        if arguments.model is not None:
            hypotheses, origin = translate_source(arguments, texts)
        else:
            hypotheses, origin = texts, {"hypothesis": arguments.hypothesis}
        scores = score_translations(
            hypotheses, references, tokenize=arguments.bleu_tokenize, lowercase=arguments.bleu_lowercase
        )
        results = scores | origin | {"reference": arguments.reference}
        for metric in ("bleu", "chrf"):
            print(f"{results[f'{metric}_signature']} = {results[metric]:.2f}")
        print(f"exact match = {results['exact_match']:.2f} % of {results['sentences']} sentences")
        if "seconds" in results:
            print(f"{results['seconds']:.1f} seconds, {results['sentences_per_second']:.1f} sentences per second")
        if write:
            write(json.dumps(results, indent=2, ensure_ascii=False))
