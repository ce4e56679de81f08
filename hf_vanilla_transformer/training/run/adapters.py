"""Fine-tuning with LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT, the extra `lora`."""

import warnings
from pathlib import Path

from transformers import PreTrainedModel, Trainer

from ...utils.errors import UserError, naming_extras
from ..state.distributed import is_main_rank, print_main
from .arguments import RunArguments

ADAPTER_FOLDER = "adapter"  # in the model folder, which contains the merged weights
TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def add_lora(model: PreTrainedModel, args: RunArguments) -> PreTrainedModel:
    """Return the model with adapters, the only weights that are trained.

    Raises:
        UserError: no base model, or a setting that needs the whole weights.
    """
    with naming_extras():
        from peft import LoraConfig, get_peft_model
    if args.model_name_or_path is None:
        raise UserError(
            f"lora_r: {args.lora_r}: adapters need a trained model: give model_name_or_path"
        )
    for name, unset in (("average_last", 0), ("ema_decay", 0.0), ("muon", False)):
        if (value := getattr(args, name)) != unset:
            raise UserError(
                f"{name}: {value}: it needs the whole weights, and lora_r trains adapters: leave one out"
            )
    # The scale α / r is 2 for every rank.
    config = LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules=TARGETS)
    with warnings.catch_warnings():
        # PEFT asks the model by the old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = get_peft_model(model, config)
    trained, parameters = adapted.get_nb_trainable_parameters()
    print_main(
        f"LoRA: {trained:,} of {parameters:,} parameters are trained, in {', '.join(TARGETS)}"
    )
    return adapted


def merge_lora(trainer: Trainer, folder: Path) -> None:
    """Save the adapter in `ADAPTER_FOLDER`, and replace the trainer's model by the merged one."""
    adapted = trainer.accelerator.unwrap_model(trainer.model)
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = trainer.args.model_name_or_path
    if is_main_rank():
        adapted.save_pretrained(folder / ADAPTER_FOLDER)
    trainer.model = trainer.model_wrapped = adapted.merge_and_unload()
