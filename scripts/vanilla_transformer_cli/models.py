"""The models of the subcommands: their classes, loading them, and work on files that may be resumed."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .parsing import given_values

MODEL_CODE = ("model_class", "trust_remote_code")
_CODES = ("source_lang", "target_lang")


def use_model_code(arguments: argparse.Namespace) -> None:
    """Register the classes of `MODEL_CODE`, so that every function of the package loads their folders."""
    from hf_vanilla_transformer.inference.loading import import_class, register_class, trust_code

    if arguments.model_class is not None:
        register_class(import_class(arguments.model_class))
    if not arguments.trust_remote_code:
        return
    for folders in given_values(arguments, "teacher", "checkpoints", "run", "model").values():
        for name in [folders] if isinstance(folders, str) else folders:
            # SOURCE-TARGET=DIR.
            trust_code(Path(name if Path(name).is_dir() else name.partition("=")[2] or name))


def use_shipped_models(arguments: Any) -> None:
    """Replace the names of models of this package in --model and --compare, such as `g2p_en`, by their folders."""
    from hf_vanilla_transformer.utils.shipped_models import model_folder

    for flag in ("model", "compare"):
        names = getattr(arguments, flag, None)
        if isinstance(names, list):
            setattr(arguments, flag, [model_folder(name) for name in names])
        elif names is not None:
            setattr(arguments, flag, model_folder(names))


def load_translator(arguments: argparse.Namespace, models: Sequence[str]) -> Any:
    """The translator of a model, or of several as an ensemble, with the flags of the subcommand.

    A model of many languages translates from --source_lang into --target_lang. With --ray the workers have the device.
    """
    from hf_vanilla_transformer.inference.translator import Translator

    first, *others = models
    translator = Translator.from_pretrained(
        first,
        "cpu" if getattr(arguments, "ray", None) else arguments.device,
        arguments.dtype,
        others,
        **given_values(arguments, "workers", "shortlist", "trust_remote_code"),
    )
    if translator.directions.source is None:
        return translator
    return translator.directed(**given_values(arguments, *_CODES))


def codes_of(
    arguments: argparse.Namespace, translator: Any, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns with the languages of each row, for a model of many languages, without those of flags."""
    if translator.directions.source is None or getattr(arguments, "paragraphs", False):
        return {}
    flags = given_values(arguments, *_CODES)
    return {name: codes for name, codes in columns.items() if name not in flags}


def ray_pool(arguments: argparse.Namespace, flag: str) -> Any:
    """The workers of --ray with the models of the flag "model" or "teacher", or None without --ray."""
    if arguments.ray is None:
        return None
    from hf_vanilla_transformer.inference.ray_workers import RayPool

    # a worker may have another working directory
    models = [str(Path(name).resolve()) for name in getattr(arguments, flag)]
    changed: dict[str, Any] = {flag: models, "ray": None}
    if getattr(arguments, "shortlist", None) is not None:
        changed["shortlist"] = str(Path(arguments.shortlist).resolve())
    load = partial(_load_in_worker, argparse.Namespace(**vars(arguments) | changed), models)
    return RayPool(arguments.ray, load, getattr(arguments, "workers", None), arguments.device)


def _load_in_worker(arguments: argparse.Namespace, models: list[str]) -> Any:
    use_model_code(arguments)
    return load_translator(arguments, models)


@contextmanager
def resumable() -> Iterator[Callable[[int], object]]:
    """A function that shows how many more lines are finished. An interrupt says that they are kept."""
    from tqdm import tqdm

    from hf_vanilla_transformer.utils.errors import Interrupted

    with tqdm(unit=" lines", disable=not sys.stderr.isatty()) as bar:
        try:
            yield bar.update
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted: finished chunks are kept, and the same command resumes"
            ) from None
