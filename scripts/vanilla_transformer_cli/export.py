"""Export a model to another library's format: the same translations, without this package.

  vanilla-transformer export --to onnx runs/quickstart runs/quickstart_onnx

FORMAT is one of:
  ctranslate2  a folder for ctranslate2.Translator; smaller and faster with --quantization int8
  marian       a folder for transformers' MarianMTModel
  onnx         encoder.onnx and decoder.onnx (with a KV cache) for onnxruntime, one file of weights for both
  torch        encoder.pt2 and decoder.pt2, exported programs of torch.export

DIR gets the tokenizer too, and appears when it is complete. With onnx and torch it also gets translate.py, which
translates greedily and needs only NumPy, transformers' tokenizers, and onnxruntime or torch. What a format cannot
express is refused with the reason, and nothing is written.
"""

import argparse

from .parsing import make_parser


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = make_parser(prog, __doc__)
    formats = ["ctranslate2", "marian", "onnx", "torch"]
    parser.add_argument("--to", required=True, dest="target_format", choices=formats, metavar="FORMAT")
    parser.add_argument("model", metavar="MODEL", help="a model folder with its tokenizer")
    parser.add_argument("output", metavar="DIR", help="new folder")
    parser.add_argument(
        "--quantization", metavar="TYPE", help="ctranslate2 only: int8, float16, bfloat16, ... (its names)"
    )
    parser.add_argument("--vmap", metavar="FILE", help="ctranslate2 only: a vocabulary mapping to include")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that exists already")
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.text_io import silence_transformers
    from hf_vanilla_transformer.interop.exporting import export

    silence_transformers()
    given = arguments.target_format, arguments.model, arguments.output, arguments.overwrite, arguments.quantization
    print(export(*given, vmap=arguments.vmap))
