"""Whether bfloat16 is faster than float32, on this machine and for this model: measured, since no name tells it."""

import statistics
import time

import torch

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

WARM_UP, TIMED = 1, 3  # training steps of each kind


def bf16_is_faster(model: VanillaTransformerForConditionalGeneration, sentences: int = 64, length: int = 16) -> bool:
    """Time a few training steps of each kind, in turn.

    Args:
        model: a fresh one; its weights and the random numbers stay as they are, gradients are thrown away.
        sentences, length: the batch, both sides; about 1,000 words are enough for the ratio.

    Returns:
        Whether autocast to bfloat16 took less time, by the median.
    """
    device, was_training = model.device, model.training
    vocab_size = min(model.config.vocab_size, model.config.target_vocab_size)  # ids that both sides have
    ids = torch.arange(sentences * length, device=device).view(sentences, length) % vocab_size
    seconds: dict[bool, list[float]] = {True: [], False: []}
    model.train()
    with torch.random.fork_rng():
        for step in range(WARM_UP + TIMED):
            for bf16 in seconds:
                start = time.perf_counter()
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                loss.item()  # waits for the device
                if step >= WARM_UP:
                    seconds[bf16].append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return statistics.median(seconds[True]) < statistics.median(seconds[False])
