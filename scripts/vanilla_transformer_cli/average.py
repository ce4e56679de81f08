"""Average the weights of several checkpoints of a run (section 6.1) into one model.

  vanilla-transformer average --output runs/averaged --run runs/multi30k_en_de_tiny --last 10

The output is a model folder with the configuration, tokenizers and generation config of the last checkpoint.
"""

import argparse
import shutil
from pathlib import Path

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


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add_flags(
        parser,
        run=Flag("DIR", "average the checkpoints of this run", required=True),
        last=Flag("K", "its last K checkpoints (the paper: 5 or 20)", int, required=True),
        output=Flag("DIR", "new model folder", required=True),
        overwrite="replace a folder that exists already",
    )
    add_shared_flags(parser, *MODEL_CODE)
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.data.tokenizer_files import TARGET_FOLDER
    from hf_vanilla_transformer.inference.loading import check_model_folder
    from hf_vanilla_transformer.training.checkpoints import (
        WEIGHTS,
        average_weights,
        complete_checkpoints,
    )
    from hf_vanilla_transformer.utils.atomic_write import new_folder
    from hf_vanilla_transformer.utils.errors import UserError, check_at_least_one

    check_at_least_one(last=arguments.last)
    run = Path(arguments.run)
    complete = complete_checkpoints(run)
    if len(complete) < arguments.last:
        raise UserError(
            f"last: {arguments.last}: run {run} has {len(complete)} complete checkpoints"
        )
    checkpoints = complete[-arguments.last :]
    for checkpoint in checkpoints:
        check_model_folder(checkpoint)
    with new_folder(Path(arguments.output), arguments.overwrite) as folder:
        folder.mkdir()
        average_weights(checkpoints, folder / WEIGHTS)
        # Checkpoints of `Seq2SeqTrainer` lack the target tokenizer of the run.
        if (run / TARGET_FOLDER).is_dir():
            shutil.copytree(run / TARGET_FOLDER, folder / TARGET_FOLDER)
        unwanted = shutil.ignore_patterns(*TRAINING_STATE, *RESULTS, "*.safetensors")
        shutil.copytree(checkpoints[-1], folder, ignore=unwanted, dirs_exist_ok=True)
    print(f"{arguments.output}: mean of {', '.join(map(str, checkpoints))}")
