"""Count the parameters and the FLOPs of a model, without computing anything."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)


def size_and_flops(config: VanillaTransformerConfig, source: int, target: int) -> tuple[int, int]:
    """Return the parameters, and the FLOPs of the matrix products in the forward pass of a pair.

    Training needs three times as many FLOPs. Attention is counted without masking.

    Args:
        config: the model.
        source: source tokens of the pair.
        target: target tokens of the pair.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = VanillaTransformerForConditionalGeneration(config)
        source_embeds, target_embeds = (
            torch.empty(1, length, config.d_model) for length in (source, target)
        )
        model(inputs_embeds=source_embeds, decoder_inputs_embeds=target_embeds)
    return model.num_parameters(), counter.get_total_flops()
