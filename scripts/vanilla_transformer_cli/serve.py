"""Serve models over HTTP: translations to LibreTranslate's clients, predictions of sequences, and a page.

  vanilla-transformer serve --model runs/numbers_en_de
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
from .parsing import REPETITION, Parser, add_shared_flags, given_values

_ENGINE = "num_beams", *REPETITION, "batch_size", "max_tokens_per_batch"


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        nargs="+",
        metavar="DIR",
        help="model folder, or SOURCE-TARGET=DIR if neither its card nor its name has the languages; several serve "
        "several pairs, and so does a model of many languages; of sequences a folder, NAME=DIR, or g2p_en",
    )
    add(
        "--pivot",
        metavar="CODE",
        help="translate other pairs through this language: de to en, then en to fr",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 is every one (default: %(default)s)",
    )
    add(
        "--port",
        type=int,
        default=5000,
        metavar="N",
        help="0 takes a free one (default: %(default)s)",
    )
    add(
        "--api_key_file",
        metavar="F",
        help="file with a key that requests must have as api_key or bearer token",
    )
    add(
        "--cors_origin",
        nargs="+",
        default=[],
        metavar="URL",
        help="web sites whose pages may call this server; * is all (default: none)",
    )
    add(
        "--allowed_host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of this server behind a proxy; on 127.0.0.1 requests for other names are refused",
    )
    add(
        "--translate_files", action="store_true", help="translate documents by POST /translate_file"
    )
    add = parser.add_argument_group("limits").add_argument
    add(
        "--max_characters",
        type=int,
        default=10_000,
        metavar="N",
        help="of a request (default: %(default)s)",
    )
    add(
        "--max_queue",
        type=int,
        default=1024,
        metavar="N",
        help="sentences that may wait (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds until an answer (default: %(default)g)",
    )
    group = parser.add_argument_group("translation (defaults: the model's generation_config.json)")
    group.add_argument(
        "--lines",
        action="store_true",
        help="take each line as one sentence, instead of splitting it",
    )
    add_shared_flags(group, *_ENGINE, "workers", "shortlist", "device", "dtype")
    add_shared_flags(parser, *MODEL_CODE)
    parser.set_defaults(dtype="fastest")
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.data.readers import read_lines
    from hf_vanilla_transformer.serving import Limits, ServeOptions, serve

    key = None
    if arguments.api_key_file is not None:
        key = "\n".join(read_lines(arguments.api_key_file)).strip()
    serve(
        ServeOptions(
            models=arguments.model,
            host=arguments.host,
            port=arguments.port,
            device=arguments.device,
            dtype=arguments.dtype,
            workers=arguments.workers,
            shortlist=arguments.shortlist,
            split_sentences=not arguments.lines,
            pivot=arguments.pivot,
            limits=Limits(
                max_characters=arguments.max_characters,
                timeout=arguments.timeout,
                api_key=key,
                cors_origins=tuple(arguments.cors_origin),
                allowed_hosts=tuple(arguments.allowed_host),
                translate_files=arguments.translate_files,
            ),
            engine=given_values(arguments, "max_queue", *_ENGINE),
        )
    )
