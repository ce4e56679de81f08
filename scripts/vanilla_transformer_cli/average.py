"""Average the weights of several checkpoints of a run (section 6.1) into one model.

  vanilla-transformer average --output runs/averaged --run runs/multi30k_en_de_tiny --last 10
  vanilla-transformer average --output runs/averaged runs/mine/checkpoint-2000 runs/mine/checkpoint-2500

The output is a model folder with the configuration, tokenizers and generation config of the last checkpoint. If its
name ends in .safetensors, it is a file with the weights only.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from .models import MODEL_CODE
from .parsing import Flag, Parser, add_flags, add_shared_flags

# Files of a checkpoint that do not apply to averaged weights: results, and the state for resuming.
RESULTS = ("README.md", "all_results.json", "*.png", "runs")
TRAINING_STATE = (
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "run_state.json",
    "ema.safetensors",
    "pytorch_model_fsdp*",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints", nargs="*", metavar="CHECKPOINT", help="folders or .safetensors files"
    )
    add_flags(
        parser,
        run=Flag("DIR", "average the checkpoints of this run"),
        last=Flag("K", "with --run: its last K checkpoints (the paper: 5 or 20)", int),
        output=Flag("DIR", "new folder, or a file.safetensors", required=True),
    )
    add_shared_flags(parser, *MODEL_CODE)


def check_arguments(parser: Parser, parsed: argparse.Namespace) -> None:
    if bool(parsed.checkpoints) == bool(parsed.run):
        parser.error("name the checkpoints, or give --run DIR --last K")
    if (parsed.run is None) != (parsed.last is None):
        parser.error("--run and --last go together")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.training.state.checkpoints import average_weights
    from hf_vanilla_transformer.utils.errors import UserError

    checkpoints = chosen_checkpoints(arguments)
    output = Path(arguments.output)
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"output {output} exists already: name a new one")
    check_checkpoints(checkpoints)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".safetensors":
        average_weights(checkpoints, output)
    else:
        write_model_folder(checkpoints, output)
    print(f"{output}: mean of {', '.join(map(str, checkpoints))}")


def chosen_checkpoints(arguments: argparse.Namespace) -> list[Path]:
    """The named checkpoints, or the last ones of the run, oldest first."""
    from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
    from hf_vanilla_transformer.utils.errors import UserError, check_at_least_one

    if arguments.run is None:
        return [Path(name) for name in arguments.checkpoints]
    check_at_least_one(last=arguments.last)
    checkpoints = complete_checkpoints(Path(arguments.run))
    if len(checkpoints) < arguments.last:
        raise UserError(
            f"last: {arguments.last}: run {arguments.run} has {len(checkpoints)} complete checkpoints"
        )
    return checkpoints[-arguments.last :]


def check_checkpoints(checkpoints: list[Path]) -> None:
    """Refuse tokenizers of different effect: an id is another token in each."""
    from hf_vanilla_transformer.text.tokenizer_files import require_same_tokenizers

    known = {
        checkpoint: tokenizers
        for checkpoint in checkpoints
        if (tokenizers := tokenizers_at(checkpoint if checkpoint.is_dir() else checkpoint.parent))
    }
    for other, tokenizers in known.items():
        first = next(iter(known))
        require_same_tokenizers(first, known[first], other, tokenizers, "an average")


def tokenizers_at(folder: Path) -> list[Any]:
    """The tokenizers of the weights in a folder, none if it has weights only."""
    from hf_vanilla_transformer.text.tokenizer_files import load_tokenizer

    folders = [folder] if any(folder.glob("tokenizer*.json")) else []
    return [load_tokenizer(each) for each in [*folders, *filter(None, [target_folder(folder)])]]


def target_folder(checkpoint: Path) -> Path | None:
    """The folder of a separate target tokenizer. Checkpoints of `Seq2SeqTrainer` lack that of the run."""
    from hf_vanilla_transformer.text.tokenizer_files import TARGET_FOLDER

    folders = [checkpoint]
    if checkpoint.name.startswith("checkpoint-"):
        folders.append(checkpoint.parent)
    return next((each / TARGET_FOLDER for each in folders if (each / TARGET_FOLDER).is_dir()), None)


def write_model_folder(checkpoints: list[Path], output: Path) -> None:
    """Write the average as a model folder, atomically."""
    from hf_vanilla_transformer.inference.loading import check_model_folder
    from hf_vanilla_transformer.text.tokenizer_files import TARGET_FOLDER
    from hf_vanilla_transformer.training.state.checkpoints import WEIGHTS, average_weights
    from hf_vanilla_transformer.utils.atomic_write import new_folder
    from hf_vanilla_transformer.utils.errors import UserError

    last = checkpoints[-1]
    for checkpoint in checkpoints:
        check_model_folder(checkpoint)
    with new_folder(output) as folder:
        folder.mkdir()
        average_weights(checkpoints, folder / WEIGHTS)
        if not last.is_dir():
            raise UserError(
                f"{last} has no configuration next to it: name folders, or end output with .safetensors"
            )
        target_tokenizer = target_folder(last)
        if target_tokenizer is not None:
            shutil.copytree(target_tokenizer, folder / TARGET_FOLDER)
        unwanted = shutil.ignore_patterns(
            *TRAINING_STATE, *RESULTS, "*.safetensors", "checkpoint-*"
        )
        shutil.copytree(last, folder, ignore=unwanted, dirs_exist_ok=True)
