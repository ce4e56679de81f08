"""The settings that the trainer refuses, because the model or the way it is distributed does not allow them."""

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..data.packing import BACKENDS
from ..modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerPreTrainedModel,
)
from ..utils.errors import UserError


def check_collator(trainer: Seq2SeqTrainer) -> None:
    """Refuse a collator that pads on the left."""
    tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise UserError(
            "data_collator: its tokenizer pads on the left, but labels are shifted right from their first token: "
            "set tokenizer.padding_side = 'right'"
        )


def check_token_batches(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> None:
    """Refuse `max_tokens_per_batch` where the loss of an update would not be the mean over its tokens."""
    args = trainer.args
    why = None
    is_ours = isinstance(model, VanillaTransformerPreTrainedModel)
    if not is_ours and trainer.compute_loss_func is None:
        # Marian, BART and T5 accept num_items_in_batch and ignore it.
        name = type(model).__name__
        why = f"needs a loss that is divided by num_items_in_batch: give {name} a compute_loss_func"
    elif not args.average_tokens_across_devices:
        why = "needs average_tokens_across_devices=True"
    elif args.n_gpu > 1:
        why = f"does not go with {args.n_gpu} GPUs in one process; start the script with accelerate launch"
    elif trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        why = "shards sentences over ranks and excludes tensor, context and sequence parallelism"
    elif isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
        why = "needs a dataset with a length, not a stream"
    if why:
        raise UserError(f"max_tokens_per_batch={args.max_tokens_per_batch} {why}")


def why_not_packed(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> str | None:
    """The reason why a run cannot have packed rows, or None."""
    args = trainer.args
    if args.max_tokens_per_batch is None:
        return "needs max_tokens_per_batch"
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        return f"needs a VanillaTransformerForConditionalGeneration, not {type(model).__name__}"
    backend = model.config._attn_implementation
    if backend not in BACKENDS:
        return (
            f"does not go with attn_implementation={backend!r}: choose one of {', '.join(BACKENDS)}"
        )
    for name in ("crossconst_alpha", "teacher_top"):
        if value := getattr(args, name):
            return f"does not go with {name}={value}, which reads pairs one by one"
    return None


def check_objective(trainer: Seq2SeqTrainer, model: PreTrainedModel, setting: str) -> None:
    """Refuse an objective of `training.objectives` for a model that has no place for it."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UserError(
            f"{setting} needs a VanillaTransformerForConditionalGeneration, not {type(model).__name__}"
        )
    if trainer.is_fsdp_enabled:
        raise UserError(f"{setting} needs unsharded weights, but FSDP shards them: train with DDP")


def check_unsharded(trainer: Seq2SeqTrainer) -> None:
    """Refuse an average of the weights, and Muon, where no process has them whole."""
    args = trainer.args
    fsdp = trainer.is_fsdp_enabled
    if getattr(args, "ema_decay", 0) and (fsdp or is_deepspeed_zero3_enabled()):
        raise UserError(
            f"ema_decay={args.ema_decay} needs unsharded weights, but FSDP and ZeRO-3 shard them: train "
            "with DDP or ZeRO-2"
        )
    if getattr(args, "muon", False) and (fsdp or trainer.is_deepspeed_enabled):
        raise UserError(
            "muon=True needs whole matrices, but FSDP and DeepSpeed shard them: train with DDP"
        )
