"""Plot a model's cross-attention for one sentence and its translation.

  vanilla-transformer attention --model runs/numbers_en_de --sentence "two hundred and one" --output attention.png

The plot shows one decoder layer: the mean of its heads and each head, with a column per source token and a row per
target token. A low line is the space at the start of a token.
"""

import argparse

from .models import MODEL_CODE
from .parsing import Flag, Parser, add_flags, add_shared_flags


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        model=Flag("DIR", "folder of the trained model", required=True),
        sentence=Flag(None, "the sentence to translate", required=True),
        translation=Flag(None, "the translation (default: the model's)"),
        layer=Flag("N", "decoder layer, counted from 1 (default: the last)", int),
        output=Flag("F", "the plot: .png, .pdf or .svg", required=True),
    )
    add_shared_flags(parser, "source_lang", "target_lang", *MODEL_CODE, "device")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation import cross_attention, plot_attention
    from hf_vanilla_transformer.inference.loading import load_model
    from hf_vanilla_transformer.text import load_tokenizers

    model = load_model(arguments.model, arguments.device)
    tokenizers = load_tokenizers(arguments.model)
    text = (arguments.sentence, arguments.translation)
    languages = (arguments.source_lang, arguments.target_lang)
    maps = cross_attention(model, *tokenizers, *text, *languages)
    print(plot_attention(*maps, arguments.output, layer=arguments.layer))
