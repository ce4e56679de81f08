"""The choice of the forward pass of training, made once a run."""

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainingArguments

from ..data.packing import PackedBatchSampler
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .distributed import print_main
from .forward import CastForward, CompiledForward, ForwardChoice, PlainForward


def choose_forward(
    trainer: Seq2SeqTrainer,
    model: PreTrainedModel,
    plan: PackedBatchSampler | None,
    special_loss: str | None,
) -> ForwardChoice:
    """Choose the forward pass of a run, and say why an update that could be compiled is not.

    Args:
        trainer: of the run.
        model: the trainer's, without wrappers.
        plan: of packed rows, or None without them.
        special_loss: what the loss does that a compiled update does not, or None.
    """
    args = trainer.args
    casting = None
    if _casts_weights(trainer, model):
        by_layer = trainer.accelerator.num_processes > 1
        casting = CastForward(model, args.device, torch.bfloat16, by_layer)
    choice = ForwardChoice()
    if casting is not None and is_bound_by_launches(args.device):
        choice.cast = convert_outputs_to_fp32(casting)
    compiles = args.torch_compile
    if compiles is None:
        compiles = args.device.type == "cuda"
    if plan is None or not compiles:
        return choice
    if why_not := special_loss or _why_not_compiled(trainer, model):
        print_main(f"torch_compile: the update is not compiled, because the run {why_not}")
        return choice
    source, target = plan.places
    choice.compiled = CompiledForward(
        (casting or PlainForward(model)).forward,
        model,
        ((plan.rows_of_batch, source), (plan.rows_of_batch, target)),
        looks_up=type(model).forward is VanillaTransformerForConditionalGeneration.forward,
        backend=args.torch_compile_backend or "inductor",
        mode=_compile_mode(args, plan),
    )
    return choice


def _compile_mode(args: TrainingArguments, plan: PackedBatchSampler) -> str | None:
    """`torch_compile_mode`, but no CUDA graphs for updates of several batches.

    The graph of the second batch would overwrite the gradients of the first.
    """
    mode = args.torch_compile_mode
    if mode is None or plan.batches_of_update == args.world_size:
        return mode
    if not torch._inductor.list_mode_options(mode).get("triton.cudagraphs"):
        return mode
    print_main(
        f"torch_compile_mode={mode}: left out, because an update has several batches on each device: "
        "max_tokens_per_batch is smaller than tokens_per_update"
    )
    return None


def is_bound_by_launches(device: torch.device) -> bool:
    """True if casting all weights by one kernel pays: on a GPU."""
    return device.type != "cpu"


def _casts_weights(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> bool:
    """True if autocast casts the weights of this model, so that `CastForward` can do it."""
    return (
        trainer.accelerator.mixed_precision == "bf16"
        and isinstance(model, VanillaTransformerForConditionalGeneration)
        and trainer.model is model  # without an adapter
        and not _computes_again(model)  # computes layers again outside of the context
        and not _shards_weights(trainer)
    )


def _computes_again(model: PreTrainedModel) -> bool:
    """True if the model computes activations again in the backward pass (gradient checkpointing)."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _shards_weights(trainer: Seq2SeqTrainer) -> bool:
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1


def _why_not_compiled(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> str | None:
    reasons = {
        "computes activations again": _computes_again(model),
        "has adapters": trainer.model is not model,
        "shards weights": _shards_weights(trainer),
        "scales its loss for fp16": trainer.accelerator.mixed_precision == "fp16",
        "adds noise to embeddings": bool(trainer.args.neftune_noise_alpha),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
