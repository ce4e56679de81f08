"""Export a model to the format of a different library: the same translations, without this package.

  vanilla-transformer export --to onnx runs/quickstart runs/quickstart_onnx

FORMAT is one of:
  argos        an .argosmodel for Argos Translate and LibreTranslate, for its languages: --languages en de
  ctranslate2  a folder for ctranslate2.Translator, smaller and faster with --quantization int8
  marian       a folder for transformers' MarianMTModel
  onnx         a folder for optimum and transformers.js, in the layout of a MarianMTModel that optimum exports
  web          a page that translates in the browser, with the folder of onnx

DIR gets the tokenizer too, and appears when it is complete. A model that the format cannot express is refused with the
reason, and nothing is written.

  vanilla-transformer export --to web runs/quickstart runs/quickstart_web
  python -m http.server --bind 127.0.0.1 --directory runs/quickstart_web 8000

The page is static: any file server, GitHub Pages or a static Space serves it. It loads onnxruntime-web from a content
delivery network, checked by a hash, or with --runtime from a copy.
"""

import argparse

from .models import MODEL_CODE
from .parsing import Flag, Parser, add_flags, add_shared_flags, given_values


def add_arguments(parser: Parser) -> None:
    formats = ["argos", "ctranslate2", "marian", "onnx", "web"]
    parser.add_argument(
        "--to", required=True, dest="target_format", choices=formats, metavar="FORMAT"
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder with its tokenizer")
    parser.add_argument(
        "output", metavar="DIR", help="new folder; with argos a new file, NAME.argosmodel"
    )
    add_flags(
        parser,
        quantization=Flag(
            "TYPE", "ctranslate2 and argos: int8, float16, bfloat16, ... (its names)"
        ),
        vmap=Flag("FILE", "ctranslate2 only: a vocabulary mapping to include"),
        languages=Flag("CODE", "argos only: of source and target (default: the model's)", nargs=2),
        overwrite="replace a folder that exists already",
    )
    add_shared_flags(parser, *MODEL_CODE)
    add_flags(
        parser,
        dtype=Flag(
            "TYPE",
            "onnx and web: of the weights: fp32, fp16, q8 (default: fp32, of web: q8 fp32)",
            nargs="+",
            dest="dtypes",
        ),
    )
    web = parser.add_argument_group("web only")
    add_flags(
        web,
        runtime=Flag("DIR", "folder in which npm installed the runtime, for use without a network"),
        example=Flag("TEXT", "sentences that the page offers", nargs="+", dest="examples"),
    )


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.interop.exporting import OPTIONS, export, refuse_options

    options = given_values(arguments, *OPTIONS)
    refuse_options(arguments.target_format, options)
    options["overwrite"] = arguments.overwrite
    if arguments.target_format == "web":
        from hf_vanilla_transformer.web.site import write_site

        print(write_site(arguments.model, arguments.output, **options))
        return
    print(export(arguments.target_format, arguments.model, arguments.output, **options))
