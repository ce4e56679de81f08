"""The models of the subcommands: their classes, loading them, and work on files that several processes share."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .parsing import given_values

MODEL_CODE = "model_class", "trust_remote_code"


def use_model_code(arguments: argparse.Namespace) -> None:
    """Register the classes of `MODEL_CODE`, so that every function of the package loads their folders."""
    from hf_vanilla_transformer.inference.loading import import_class, register_class, trust_code

    if arguments.model_class is not None:
        register_class(import_class(arguments.model_class))
    named = (getattr(arguments, name, None) for name in ("teacher", "checkpoints", "run", "model"))
    folders: Any = next(filter(None, named), [])
    for name in [folders] if isinstance(folders, str) else folders:
        if arguments.trust_remote_code:
            # SOURCE-TARGET=DIR.
            trust_code(Path(name if Path(name).is_dir() else name.partition("=")[2] or name))


def use_shipped_models(arguments: Any) -> None:
    """Replace the names of models of this package in --model and --compare, such as `g2p_en`, by their folders."""
    from hf_vanilla_transformer.utils.shipped_models import model_folder

    models = getattr(arguments, "model", None)
    if isinstance(models, list):
        arguments.model = [model_folder(name) for name in models]
    elif models is not None:
        arguments.model = model_folder(models)
    if isinstance(getattr(arguments, "compare", None), list):
        arguments.compare = [model_folder(name) for name in arguments.compare]


def load_translator(
    arguments: argparse.Namespace, models: Sequence[str], device: str | None = None
) -> Any:
    """The translator of a model, or of several as an ensemble, with the flags of the subcommand.

    A model of many languages translates from --source_lang into --target_lang.
    """
    from hf_vanilla_transformer.inference.translator import Translator

    first, *others = models
    workers, shortlist = (getattr(arguments, name, None) for name in ("workers", "shortlist"))
    device = device or arguments.device
    translator = Translator.from_pretrained(
        first, device, arguments.dtype, others, workers, shortlist=shortlist
    )
    codes = (getattr(arguments, name, None) for name in ("source_lang", "target_lang"))
    return translator if translator.directions.source is None else translator.directed(*codes)


def codes_of(arguments: argparse.Namespace, translator: Any, path: str | None) -> dict[str, Any]:
    """The columns of a table with the languages of each row, for a model of many languages, without those of flags."""
    from hf_vanilla_transformer.inference.sentences import read_codes

    is_read = translator.directions.source is not None and not getattr(
        arguments, "paragraphs", False
    )
    columns = read_codes(path) if is_read else {}
    return {name: codes for name, codes in columns.items() if getattr(arguments, name) is None}


def check_files(arguments: argparse.Namespace) -> None:
    """Refuse --shard and --ray without a file, and --prefix or --score on the standard input of --input."""
    from hf_vanilla_transformer.utils.errors import UserError

    for name in given_values(arguments, "shard", "ray"):
        if arguments.score or arguments.output in (None, "-"):
            raise UserError(f"--{name} shares a file: it needs --output, and cannot have --score")
    for name in ("prefix", "score"):
        if getattr(arguments, name) == "-" and arguments.input in (None, "-"):
            raise UserError(f"--{name} and --input cannot both be standard input: name a file")


def writes_a_file(arguments: argparse.Namespace) -> bool:
    """Return whether new lines go to a file that a killed job can resume, and not to a pipe."""
    if arguments.score or arguments.output in (None, "", "-"):
        return False
    output = Path(arguments.output)
    return output.is_file() or not output.exists()


def is_at_a_prompt(arguments: argparse.Namespace) -> bool:
    """Return whether lines are typed at a terminal, and answered there."""
    files = (arguments.input, arguments.output, arguments.score, arguments.prefix)
    streams = (sys.stdin, sys.stdout)
    return not any(files) and all(stream is not None and stream.isatty() for stream in streams)


def answer_at_a_prompt(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Print the outputs for the lines that a person types. `settings` are of `translated_lines`."""
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import prompt_lines
    from hf_vanilla_transformer.utils.errors import UserError

    translator = load_translator(arguments, arguments.model)
    translated_lines(translator, [], **settings)  # checks the arguments before the first prompt
    for line in prompt_lines():
        try:
            for output in translated_lines(translator, [line], **settings):
                print(output)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def ray_pool(arguments: argparse.Namespace, flag: str) -> Any:
    """The workers of --ray with the models of the flag "model" or "teacher", or None without --ray."""
    if arguments.ray is None:
        return None
    from hf_vanilla_transformer.inference.ray_workers import RayPool

    # a worker may have another working directory
    models = [str(Path(name).resolve()) for name in getattr(arguments, flag)]
    changed: dict[str, Any] = {flag: models}
    if getattr(arguments, "shortlist", None) is not None:
        changed["shortlist"] = str(Path(arguments.shortlist).resolve())
    load = partial(_load_in_worker, argparse.Namespace(**vars(arguments) | changed), models)
    return RayPool(arguments.ray, load, getattr(arguments, "workers", None), arguments.device)


def _load_in_worker(arguments: argparse.Namespace, models: list[str]) -> Any:
    use_model_code(arguments)
    return load_translator(arguments, models)


@contextmanager
def shared_work(arguments: argparse.Namespace) -> Iterator[tuple[Any, str | None, Any]]:
    """The processes that share the chunks of a file, the device of this one, and a bar as a callback."""
    import torch
    from accelerate import PartialState
    from tqdm import tqdm

    from hf_vanilla_transformer.utils.errors import Interrupted, UserError

    # accelerate forms a group of processes on CPUs only if it is told so.
    processes = PartialState(cpu=arguments.device == "cpu" or not torch.accelerator.is_available())
    device = arguments.device or (str(processes.device) if processes.num_processes > 1 else None)
    if arguments.ray is not None:
        device = "cpu"  # this process only reads and writes
        if processes.num_processes > 1:
            raise UserError("--ray starts workers: leave out accelerate launch")
    with tqdm(unit=" lines", disable=processes.process_index > 0 or not sys.stderr.isatty()) as bar:
        try:
            yield processes, device, lambda lines, _: bar.update(lines * processes.num_processes)
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted: finished chunks are kept, and the same command resumes"
            ) from None


def score_lines(
    translator: Any, pairs: Iterable[tuple[str, str]], **settings: Any
) -> Iterator[str]:
    """The output of --score: for each pair its log-probability, a tab, and those of its tokens."""
    from hf_vanilla_transformer.inference.scoring import score_translations_of

    for scored in score_translations_of(translator, pairs, **settings):
        tokens = " ".join(f"{log_p:.4f}" for log_p in scored.log_probabilities)
        yield f"{scored.log_probability:.4f}\t{tokens}"
