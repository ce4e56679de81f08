"""The settings that the trainer refuses, because the model or the way it is distributed does not allow them."""

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ...modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerPreTrainedModel,
)
from ...utils.errors import UserError
from .ownership import methods


def check_arguments(trainer: Seq2SeqTrainer) -> None:
    """Refuse what `VanillaTransformerTrainingArguments` refuse, for values that were set later."""
    check = getattr(trainer.args, "check", None)
    if check is not None:
        check()


def check_collator(trainer: Seq2SeqTrainer) -> None:
    """Refuse a collator that pads on the left."""
    tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise UserError(
            "data_collator: its tokenizer pads on the left, but labels are shifted right from their first token: "
            "set tokenizer.padding_side = 'right'"
        )


_methods_of_loaders = methods("_get_train_sampler", "_get_dataloader", "_get_num_items_in_batch")


def check_token_batches(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> None:
    """Refuse `max_tokens_per_batch` where the loss of an update would not be the mean over its tokens."""
    args = trainer.args
    why = None
    # Marian, BART and T5 accept num_items_in_batch and ignore it. A subclass may not accept it.
    is_ours = isinstance(model, VanillaTransformerPreTrainedModel)
    divides = is_ours and trainer.model_accepts_loss_kwargs
    if not divides and trainer.compute_loss_func is None:
        name = type(model).__name__
        why = f"needs a loss that is divided by num_items_in_batch: give {name} a compute_loss_func"
        if is_ours:
            why += ", or let its forward pass on **kwargs"
    elif not args.average_tokens_across_devices:
        why = "needs average_tokens_across_devices=True"
    elif args.n_gpu > 1:
        why = f"does not go with {args.n_gpu} GPUs in one process; start the script with accelerate launch"
    elif trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        why = "shards sentences over ranks and excludes tensor, context and sequence parallelism"
    elif isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
        why = "needs a dataset with a length, not a stream"
    elif args.train_sampling_strategy not in ("random", "group_by_length"):
        why = f"makes an order of its own: leave train_sampling_strategy={args.train_sampling_strategy} out"
    elif passed_by := _methods_of_loaders(trainer):
        why = f"makes its own loader and never calls {passed_by}: set per_device_train_batch_size instead"
    if why:
        raise UserError(f"max_tokens_per_batch={args.max_tokens_per_batch} {why}")


def check_objective(trainer: Seq2SeqTrainer, model: PreTrainedModel, setting: str) -> None:
    """Refuse an objective of `training.trainer.objectives` for a model that has no place for it."""
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


def check_optimizer_is_made(trainer: Seq2SeqTrainer) -> None:
    """Refuse Muon together with an optimizer of the caller's, which would train in its place."""
    if not getattr(trainer.args, "muon", False):
        return
    own = methods("create_optimizer", "get_optimizer_cls_and_kwargs")(trainer)
    if trainer.optimizer is not None:
        own = "optimizers"
    if own is not None:
        raise UserError(f"muon=True does not go with {own}: leave one of the two out")
