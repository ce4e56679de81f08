"""Serve translations over HTTP, to LibreTranslate's clients and to a page in the browser.

  vanilla-transformer serve --model runs/numbers_en_de
  vanilla-transformer serve --model en-de=runs/first de-en=runs/second --port 8000 --api_key_file key.txt

The page is at http://127.0.0.1:5000/. Other clients call it as they call LibreTranslate:
  curl -d q=seven -d source=en -d target=de http://127.0.0.1:5000/translate

Requests that come at the same time are translated in one batch. On SIGTERM or Ctrl-C the server takes no more, and
answers what it has taken.
"""

import argparse
from pathlib import Path

from .parsing import Parser


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add(
        "--model", required=True, nargs="+", metavar="DIR",
        help="model folder, or SOURCE-TARGET=DIR where neither its card nor its name has the languages; several serve "
        "several pairs",
    )  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one (default: %(default)s)")
    add("--port", type=int, default=5000, metavar="N", help="0 takes a free one (default: %(default)s)")
    add("--api_key_file", metavar="F", help="file with a key that requests must have as api_key or bearer token")
    add(
        "--cors_origin", nargs="+", default=[], metavar="URL",
        help="web sites whose pages may call this server; * is all (default: none)",
    )  # fmt: skip
    add = parser.add_argument_group("limits").add_argument
    add("--max_characters", type=int, default=10_000, metavar="N", help="of a request (default: %(default)s)")
    add("--max_queue", type=int, default=1024, metavar="N", help="sentences that may wait (default: %(default)s)")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds until an answer (default: %(default)g)")
    add = parser.add_argument_group("translation").add_argument
    add("--num_beams", type=int, metavar="N", help="beam size; 1 is greedy decoding (default: the checkpoint's)")
    add("--lines", action="store_true", help="take each line as one sentence, instead of splitting it")
    add("--batch_size", type=int, default=64, metavar="N", help="sentences per batch, at most (default: %(default)s)")
    add("--max_tokens_per_batch", type=int, default=4096, metavar="N", help="source tokens (default: %(default)s)")
    add("--workers", type=int, metavar="N", help="parallel batches on a CPU (default: one per thread, up to 8)")
    add("--device", help='such as "cpu" or "cuda:1" (default: the accelerator if there is one)')
    add(
        "--dtype", choices=["float32", "bfloat16", "float16", "int8", "fastest"],
        help="precision; see `vanilla-transformer translate --help` (default: the checkpoint's)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.text_io import silence_transformers
    from hf_vanilla_transformer.serving import Limits, ServeOptions, serve

    silence_transformers()
    key = None
    if arguments.api_key_file is not None:
        key = Path(arguments.api_key_file).read_text(encoding="utf-8").strip()
    names = ("batch_size", "max_tokens_per_batch", "max_queue", "num_beams")
    engine = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    serve(
        ServeOptions(
            models=arguments.model,
            host=arguments.host,
            port=arguments.port,
            device=arguments.device,
            dtype=arguments.dtype,
            workers=arguments.workers,
            split_sentences=not arguments.lines,
            limits=Limits(arguments.max_characters, arguments.timeout, key, tuple(arguments.cors_origin)),
            engine=engine,
        )
    )
