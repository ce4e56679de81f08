"""Convert a checkpoint of a different toolkit to a model folder that gives the same translations.

  vanilla-transformer convert --from marian opus-mt-en-de runs/en_de

FORMAT is one of:
@@FORMATS@@
SRC may also be a name on the Hub. Give settings that a checkpoint lacks with --set NAME=VALUE, as often as needed.
DIR appears when it is complete. If this architecture cannot express a model, it is refused with the reason. No code of
a checkpoint is run.
"""

import argparse
from typing import Any

from .parsing import Parser, add_flags, name_and_value

FORMATS = """\
  marian   a folder of a Hugging Face MarianMTModel, such as every OPUS-MT model
  fsmt     a folder of a Hugging Face FSMTForConditionalGeneration, such as facebook/wmt19-en-de
  marian-npz  a .npz of Marian itself, or its folder, with the vocabularies that its options name. For raw text of a
           BPE release, --set codes=FILE and target_codes=FILE
  torch    a state dictionary with a torch.nn.Transformer, with --set heads=N, scale_embedding=true and the like,
           perhaps --set activation=gelu or norm_first=true, and tokenizer=FILE
  m2m100   a folder of an M2M100ForConditionalGeneration, of M2M-100 or NLLB-200, with its languages:
           --set source_language=en and target_language=de
  fairseq  a .pt of a transformer, post-norm or pre-norm, with dict.*.txt in its folder or in --set data=FOLDER. For
           raw text, --set codes=FILE (subword-nmt, fastBPE, with Moses' tokenizer) or sentencepiece=FILE
  joeynmt  the model_dir of a Transformer, post-norm or pre-norm, or a .ckpt in it
  opennmt  a .pt of a Transformer of OpenNMT-py, with --set sentencepiece=FILE or codes=FILE for raw text
  eole     the model_path of an encoder-decoder Transformer of eole, or a step_NUMBER in it, with the same options
"""


def add_arguments(parser: Parser) -> None:
    parser.description = (__doc__ or "").replace("@@FORMATS@@\n", FORMATS)
    names = [line.split()[0] for line in FORMATS.splitlines() if line[2] != " "]
    parser.add_argument(
        "--from", required=True, dest="source_format", choices=names, metavar="FORMAT"
    )
    parser.add_argument("source", metavar="SRC", help="the checkpoint: a folder, a file or a name")
    parser.add_argument("output", metavar="DIR", help="new model folder")
    parser.add_argument(
        "--set",
        action="append",
        type=name_and_value,
        default=[],
        dest="options",
        metavar="NAME=VALUE",
        help="an option",
    )
    add_flags(parser, overwrite="replace a folder that exists already")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.interop.converting import convert

    # `convert` parses the text as the option's type.
    options: dict[str, Any] = dict(arguments.options)
    print(
        convert(
            arguments.source_format,
            arguments.source,
            arguments.output,
            arguments.overwrite,
            **options,
        )
    )
