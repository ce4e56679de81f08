"""Write a model for another program: the same translations, without this package.

  python scripts/export_model.py --to onnx runs/quickstart runs/quickstart_onnx

FORMAT is one of:
  ctranslate2  a folder for ctranslate2.Translator; --quantization int8 makes it small and fast
  marian       a folder for transformers' MarianMTModel
  onnx         encoder.onnx and decoder.onnx (with a cache) for onnxruntime, one file of weights for both
  torch        encoder.pt2 and decoder.pt2, programs of torch.export

DIR gets the tokenizer too, and appears when it is complete. With onnx and torch it also gets translate.py, which
translates greedily and needs only NumPy, transformers' tokenizers, and onnxruntime or torch. What a format cannot
express is refused with the reason, and nothing is written.
"""

import argparse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--to",
        required=True,
        dest="target_format",
        choices=["ctranslate2", "marian", "onnx", "torch"],
        metavar="FORMAT",
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder with its tokenizer")
    parser.add_argument("output", metavar="DIR", help="new folder")
    parser.add_argument(
        "--quantization", metavar="TYPE", help="ctranslate2 only: int8, float16, bfloat16 …, as it names them"
    )
    parser.add_argument("--overwrite", action="store_true", help="take the place of a folder that is there already")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    from translate import quiet

    from hf_vanilla_transformer.interop.exporting import export

    quiet()
    print(
        export(arguments.target_format, arguments.model, arguments.output, arguments.overwrite, arguments.quantization)
    )


if __name__ == "__main__":
    # parsed before the package is imported: importing torch takes seconds, and --help should not
    parsed = parse_arguments()

    from hf_vanilla_transformer.errors import run_command

    run_command(lambda: main(parsed))
