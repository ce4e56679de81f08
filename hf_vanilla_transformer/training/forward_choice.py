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
    special = _special_forward(trainer, model)
    mixed_precision = trainer.accelerator.mixed_precision
    ours = isinstance(model, VanillaTransformerForConditionalGeneration)
    if ours and mixed_precision == "bf16" and special is None:
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
    why_not = special_loss or special
    if mixed_precision == "fp16":
        why_not = why_not or "scales its loss for fp16"
    if args.neftune_noise_alpha:
        why_not = why_not or "adds noise to embeddings"
    if why_not:
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
        "raise max_tokens_per_batch"
    )
    return None


def is_bound_by_launches(device: torch.device) -> bool:
    """True if casting all weights by one kernel pays: on a GPU."""
    return device.type != "cpu"


def _special_forward(trainer: Seq2SeqTrainer, model: PreTrainedModel) -> str | None:
    """What the forward pass does that this module's do not, or None."""
    layers = model.modules()
    shards = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1
    reasons = {
        # outside of the context in which they have cast weights
        "computes activations again": any(
            getattr(layer, "gradient_checkpointing", False) for layer in layers
        ),
        "has adapters": trainer.model is not model,
        "shards weights": shards,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
