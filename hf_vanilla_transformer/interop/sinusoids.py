"""The same model with its sinusoids in another order.

The paper has sines and cosines in turn (§3.5), most programs all sines first. The order of the D numbers that run
through a model is free, as long as every matrix agrees with it: a model with sinusoids in turn is one with split
sinusoids, whose weights are permuted.
"""

import torch
from torch import Tensor

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

READS = ("q_proj", "k_proj", "v_proj", "fc1", "lm_head")  # from the D numbers, to something else
WRITES = ("out_proj", "fc2")  # to the D numbers


def weights_with_split_sinusoids(model: VanillaTransformerForConditionalGeneration) -> dict[str, Tensor]:
    """The weights with which `model` computes the same where all sines stand before all cosines.

    Args:
        model: with sinusoids of either order.

    Returns:
        Weights by name, tied ones each by its own name; the model's own where the order is right already.

    Raises:
        ValueError: learned positions, or others that are no permutation of the paper's.
    """
    kind = model.config.position_encoding_type
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    if kind == "sinusoidal_split":
        return weights
    if kind != "sinusoidal":
        raise ValueError(f"position_encoding_type={kind!r} has no split order; only 'sinusoidal' has")
    width = model.config.d_model
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return {name: _reordered(name, weight, order) for name, weight in weights.items()}


def _reordered(name: str, weight: Tensor, order: Tensor) -> Tensor:
    module, kind = name.split(".")[-2:]
    order = order.to(weight.device)
    if module == "embed_tokens" or (module in READS and kind == "weight"):
        return weight[:, order]  # (·, D)
    return weight if module in READS else weight[order]  # (D, ·) or (D,): what writes, and the normalisations
