"""The choice of the forward pass of training, made once a run."""

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainingArguments

from ...batches.packing import PackedBatchSampler
from ..state.distributed import print_main
from .forward import CastForward, CompiledForward, ForwardChoice, PlainForward


def choose_forward(
    trainer: Seq2SeqTrainer,
    model: PreTrainedModel,
    plan: PackedBatchSampler | None,
    casts: bool,
    compiles: bool,
) -> ForwardChoice:
    """Choose the forward pass of a run.

    Args:
        trainer: of the run.
        model: the trainer's, without wrappers.
        plan: of packed rows, or None without them.
        casts: weights may be cast together, with autocast in bfloat16.
        compiles: updates of packed rows are compiled.
    """
    args = trainer.args
    casting = None
    if casts and trainer.accelerator.mixed_precision == "bf16":
        by_layer = trainer.accelerator.num_processes > 1
        casting = CastForward(model, args.device, torch.bfloat16, by_layer)
    choice = ForwardChoice()
    if casting is not None and is_bound_by_launches(args.device):
        choice.cast = convert_outputs_to_fp32(casting)
    if plan is None or not compiles:
        return choice
    source, target = plan.places
    choice.compiled = CompiledForward(
        (casting or PlainForward(model)).forward,
        model,
        ((plan.rows_of_batch, source), (plan.rows_of_batch, target)),
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
