"""The precision of a run: chosen once, with `auto_bf16` by a measurement, and kept in every checkpoint."""

import statistics
import time
from pathlib import Path

import torch

from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...utils.cpu_time import on_fitting_threads
from ...utils.random_state import kept_random_state
from ..state.distributed import broadcast_from_main, print_main
from ..state.fingerprint import read_run_state
from .arguments import RunArguments

WARM_UP = 1
TIMED = 3  # training steps of each precision


def resolve_precision(
    model: VanillaTransformerForConditionalGeneration,
    args: RunArguments,
    checkpoint: Path | None = None,
) -> None:
    """Replace `auto_bf16` by `bf16`, true or false, and print the precision.

    Args:
        model: of the run. It is moved to the device of the run.
        args: of the run, which are changed.
        checkpoint: the one that the run resumes from, whose precision is kept.
    """
    reason = " (as set)" if args.bf16 or args.fp16 else ""
    if args.auto_bf16 and not (args.bf16 or args.fp16):
        if checkpoint is not None:
            precision = read_run_state(checkpoint).fixed.get("precision")
            faster = precision == "bf16"
            reason = f" (as in {checkpoint})"
        else:
            with on_fitting_threads():
                faster = broadcast_from_main(lambda: bf16_is_faster(model.to(args.device)))
            reason = " (the faster one in a measurement)"
        if faster:
            args.bf16 = True
            args.mixed_precision = "bf16"
    args.auto_bf16 = False  # the model card names the precision, for repeating the run elsewhere
    print_main(f"precision: {'bf16' if args.bf16 else 'fp16' if args.fp16 else 'float32'}{reason}")


def bf16_is_faster(
    model: VanillaTransformerForConditionalGeneration, sentences: int = 64, length: int = 16
) -> bool:
    """Return True if the median of a few training steps is faster with autocast to bfloat16. Precisions alternate.

    Weights and random state stay unchanged, gradients are cleared. About 1,000 tokens are enough for the ratio.
    """
    device = model.device
    was_training = model.training
    # Ids that both vocabularies have.
    vocab_size = min(model.config.vocab_size, model.config.target_vocab_size)
    ids = torch.arange(sentences * length, device=device).view(sentences, length) % vocab_size
    seconds: dict[bool, list[float]] = {True: [], False: []}
    model.train()
    with kept_random_state(device):
        for step in range(WARM_UP + TIMED):
            for bf16 in seconds:
                start = time.perf_counter()
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                loss.item()  # synchronizes with the device
                if step >= WARM_UP:
                    seconds[bf16].append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return statistics.median(seconds[True]) < statistics.median(seconds[False])
