"""Measure whether bfloat16 autocast trains this model faster than float32 on this machine."""

import statistics
import time

import torch

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

WARM_UP, TIMED = 1, 3  # training steps of each precision


def bf16_is_faster(model: VanillaTransformerForConditionalGeneration, sentences: int = 64, length: int = 16) -> bool:
    """Time a few training steps in each precision, alternating.

    Args:
        model: its weights and the random state stay unchanged, its gradients are cleared.
        sentences, length: size of the batch on both sides; about 1,000 tokens are enough for the ratio.

    Returns:
        Whether the median step is faster with autocast to bfloat16.
    """
    device, was_training = model.device, model.training
    vocab_size = min(model.config.vocab_size, model.config.target_vocab_size)  # ids that both vocabularies have
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
                loss.item()  # synchronizes with the device
                if step >= WARM_UP:
                    seconds[bf16].append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return statistics.median(seconds[True]) < statistics.median(seconds[False])
