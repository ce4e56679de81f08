"""Translate text with a teacher, to train a smaller student on its translations (sequence-level distillation).

  vanilla-transformer distil --teacher runs/big --source_file train.en --output_dir distilled
  vanilla-transformer train RECIPE --train train distilled

For back-translation, give text in the target language and a model of the opposite direction. Its translations become
the source:

  vanilla-transformer distil --teacher runs/de_en --source_file more.de --output_dir back --back_translation

The teacher is any model folder that AutoModelForSeq2SeqLM loads, such as an OPUS-MT model, or several folders of this
package as an ensemble. Or it is a causal language model, a folder that AutoModelForCausalLM loads, with --source_lang
and --target_lang for its prompt. A killed command resumes. Several processes can share the work with accelerate
launch, the workers of a cluster with --ray, several jobs with --shard: when all have finished, the command without it
writes the pairs. To learn from the teachers' probabilities too, train with --teacher DIR [DIR ...] and the teachers'
vocabularies.
"""

import argparse
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, load_translator, ray_pool, shared_work
from .parsing import COLUMNS, COLUMNS_TITLE, Parser, add_shared_flags, columns_of, given_values

SETTINGS = "num_beams", "length_penalty", "max_new_tokens", "batch_size", "shard"


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add("--teacher", required=True, nargs="+", metavar="DIR", help="model folder; several form an ensemble")
    add("--prompt", metavar="TEXT", help="of a causal model: text or file with {text}, {source_lang}, {target_lang}")
    add("--source_file", required=True, metavar="F", help="text to translate, one sentence per line, or a table")
    add("--output_dir", required=True, metavar="DIR", help="folder for train.source.txt and train.target.txt")
    add("--reference_file", metavar="F", help="translations of the same lines by people, to train on too")
    add("--back_translation", action="store_true", help="write the translations as the source, the text as the target")
    add("--n_best", type=int, default=1, metavar="N", help="translations of each line (default: %(default)s)")
    add("--mbr", action="store_true", help="keep the one of --n_best that is most similar to the others (chrF)")
    add("--tag", default="", metavar="TOKEN", help="start of the source of back-translations, such as <BT>")
    add(
        "--pairs_format", choices=["text", "jsonl", "parquet"], default="text",
        help="write two files of text, or train.jsonl or train.parquet with columns source and target",
    )  # fmt: skip
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the teacher's generation_config.json)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sample; 0 does not (default)")
    add_shared_flags(group, *SETTINGS, "device", "dtype", "ray")
    add_shared_flags(parser, *MODEL_CODE)
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.inference.distilled_text import distil
    from hf_vanilla_transformer.utils.errors import check_at_least_one
    from hf_vanilla_transformer.utils.system_info import counted

    check_at_least_one(n_best=arguments.n_best)
    with shared_work(arguments) as (processes, device, progress):
        teacher = _load_teacher(arguments, device)
        prompted, files = hasattr(teacher, "prompt"), (arguments.source_file, arguments.reference_file)
        count = distil(
            teacher, arguments.source_file, arguments.output_dir,
            processes, n_best=arguments.n_best, mbr=arguments.mbr, tag=arguments.tag,
            references=arguments.reference_file, temperature=arguments.temperature,
            back_translation=arguments.back_translation, progress=progress,
            columns=columns_of(arguments, None if prompted else arguments.teacher[0], *files, prompted=prompted),
            pool=ray_pool(arguments, "teacher"), pairs_format=arguments.pairs_format,
            **given_values(arguments, *SETTINGS),
        )  # fmt: skip
    if processes.process_index == 0:
        print(f"{arguments.output_dir}: {counted(count, 'pair')}")


def _load_teacher(arguments: argparse.Namespace, device: str | None) -> Any:
    """The causal language model in a folder, or the translator. A UserError for flags without an effect."""
    from transformers import AutoModelForCausalLM

    from hf_vanilla_transformer.data.tokenizer_training import load_tokenizers
    from hf_vanilla_transformer.inference.llm_teacher import PROMPT, CausalTeacher, read_prompt
    from hf_vanilla_transformer.inference.loading import load_model, registered_class
    from hf_vanilla_transformer.utils.errors import UserError

    folders = [Path(name) for name in arguments.teacher if Path(name, "config.json").is_file()]
    causal = [folder for folder in folders if registered_class(folder) is None]
    if causal and len(arguments.teacher) > 1:
        raise UserError(f"--teacher: {causal[0]} is a causal language model; give it alone")
    for flag in given_values(arguments, "ray" if causal else "prompt"):
        raise UserError(f"--{flag} has no effect: {arguments.teacher[0]} is {'' if causal else 'not '}a causal model")
    if not causal:
        return load_translator(arguments, arguments.teacher, device)
    prompt = read_prompt(arguments.prompt or PROMPT, arguments.source_lang, arguments.target_lang)
    model = load_model(causal[0], device or arguments.device, arguments.dtype, model_class=AutoModelForCausalLM)
    return CausalTeacher(model, load_tokenizers(causal[0])[0], prompt)
