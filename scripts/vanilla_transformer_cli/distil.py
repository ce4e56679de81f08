"""Translate text with a teacher, to train a smaller student on its translations (sequence-level distillation).

  vanilla-transformer distil --teacher runs/big --source_file train.en --output_dir distilled
  vanilla-transformer train RECIPE --train train distilled

For back-translation, give text in the target language and a model of the opposite direction. Its translations become
the source:

  vanilla-transformer distil --teacher runs/de_en --source_file more.de --output_dir back --back_translation

The teacher is any model folder that AutoModelForSeq2SeqLM loads, such as an OPUS-MT model, or several folders of this
package as an ensemble. A killed command resumes. The workers of a cluster share the work with --ray, several jobs with
--shard: when all have finished, the command without it writes the pairs. To learn from the teachers' probabilities
too, train with --teacher DIR [DIR ...] and the teachers' vocabularies.
"""

import argparse
import os

from .models import MODEL_CODE, load_translator, ray_pool, resumable
from .parsing import (
    COLUMNS,
    COLUMNS_TITLE,
    Flag,
    Parser,
    add_flags,
    add_shared_flags,
    columns_of,
    given_values,
    is_same_file,
)

SETTINGS = "num_beams", "length_penalty", "max_new_tokens", "batch_size", "shard"


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        teacher=Flag("DIR", "model folder; several form an ensemble", required=True, nargs="+"),
        source_file=Flag(
            "F", "text to translate, one sentence per line, or a table", required=True
        ),
        output_dir=Flag("DIR", "folder for train.source.txt and train.target.txt", required=True),
        back_translation="write the translations as the source, the text as the target",
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the teacher's generation_config.json)")
    add_flags(group, temperature=Flag("T", "sample; 0 does not (default)", float, default=0.0))
    add_shared_flags(group, *SETTINGS, "device", "dtype", "ray")
    add_shared_flags(parser, *MODEL_CODE)


def check_arguments(parser: Parser, parsed: argparse.Namespace) -> None:
    for name in ("train.source.txt", "train.target.txt"):
        if is_same_file(os.path.join(parsed.output_dir, name), parsed.source_file):
            parser.error(
                f"--output_dir {parsed.output_dir}: its {name} is the same file as --source_file"
            )


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.distilled_text import distil
    from hf_vanilla_transformer.utils.system_info import counted

    with resumable() as progress:
        count = distil(
            teacher=load_translator(arguments, arguments.teacher),
            source=arguments.source_file,
            output=arguments.output_dir,
            temperature=arguments.temperature,
            back_translation=arguments.back_translation,
            columns=columns_of(arguments, arguments.teacher[0], arguments.source_file),
            progress=progress,
            pool=ray_pool(arguments, "teacher"),
            **given_values(arguments, *SETTINGS),
        )
    print(f"{arguments.output_dir}: {counted(count, 'pair')}")
