"""Serve models over HTTP: translations to LibreTranslate's clients, predictions of sequences, and a page.

  vanilla-transformer serve --model en_de
  vanilla-transformer serve --model en-de=runs/first de-en=runs/second --port 8000 --api_key_file key.txt

The page is at http://127.0.0.1:5000/. Other clients call it as they call LibreTranslate:
  curl -d q=seven -d source=en -d target=de http://127.0.0.1:5000/translate

A model of sequences that are no language, such as g2p_en, answers /predict with n-best lists:
  curl --json '{"q": "hello", "n_best": 3}' http://127.0.0.1:5000/predict

Requests that come at the same time are one batch. On SIGTERM or Ctrl-C the server refuses new requests
and answers the open ones.
"""

import argparse

from .models import MODEL_CODE
from .parsing import REPETITION, Flag, Parser, add_flags, add_shared_flags, given_values

_ENGINE = ("num_beams", *REPETITION, "batch_size", "max_tokens_per_batch")
_TRANSLATOR = ("workers", "shortlist", "device", "dtype")


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        model=Flag(
            "DIR",
            "model folder, en_de, or SOURCE-TARGET=DIR if neither its card nor its name has the languages; several "
            "serve several pairs, and so does a model of many languages; of sequences one folder, or g2p_en",
            required=True,
            nargs="+",
        ),
        pivot=Flag("CODE", "translate other pairs through this language: de to en, then en to fr"),
        host=Flag(
            None,
            "address to listen on; 0.0.0.0 is every one (default: %(default)s)",
            default="127.0.0.1",
        ),
        port=Flag("N", "0 takes a free one (default: %(default)s)", int, default=5000),
        api_key_file=Flag(
            "F", "file with a key that requests must have as api_key or bearer token"
        ),
        cors_origin=Flag(
            "URL",
            "web sites whose pages may call this server; * is all (default: none)",
            nargs="+",
            default=[],
        ),
        allowed_host=Flag(
            "NAME",
            "names of this server behind a proxy; on 127.0.0.1 requests for other names are refused",
            nargs="+",
            default=[],
        ),
        translate_files="translate documents by POST /translate_file",
    )
    add_flags(
        parser.add_argument_group("limits"),
        max_characters=Flag("N", "of a request (default: %(default)s)", int, default=10_000),
        max_queue=Flag("N", "sentences that may wait (default: %(default)s)", int, default=1024),
        timeout=Flag("S", "seconds until an answer (default: %(default)g)", float, default=60.0),
    )
    group = parser.add_argument_group("translation (defaults: the model's generation_config.json)")
    add_flags(group, lines="take each line as one sentence, instead of splitting it")
    add_shared_flags(group, *_ENGINE, *_TRANSLATOR)
    add_shared_flags(parser, *MODEL_CODE)
    parser.set_defaults(dtype="fastest")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.corpora.readers import read_lines
    from hf_vanilla_transformer.serving import Limits, ServeOptions, serve

    key = None
    if arguments.api_key_file is not None:
        key = "\n".join(read_lines(arguments.api_key_file)).strip()
    limits = Limits(
        api_key=key,
        cors_origins=tuple(arguments.cors_origin),
        allowed_hosts=tuple(arguments.allowed_host),
        **given_values(arguments, "max_characters", "timeout", "translate_files"),
    )
    options = ServeOptions(
        models=arguments.model,
        split_sentences=not arguments.lines,
        limits=limits,
        engine=given_values(arguments, "max_queue", *_ENGINE),
        **given_values(arguments, "host", "port", "pivot", *_TRANSLATOR),
    )
    serve(options)
