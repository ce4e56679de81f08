"""The forward pass of an update on a GPU, with few launches of kernels.

Eager training is bound by launches: on an H200 the base and the big model take the same time. Autocast casts each
weight and each bias by itself, and each gradient back: 384 of 1,312 kernels of an update of the base model.
`CastForward` casts all of them together. Values and gradients are autocast's, bit for bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layers_vanilla_transformer import is_plain_linear

ALIGNED = 8  # elements: weights start at multiples of 16 bytes, for the kernels of products


class CastForward(nn.Module):
    """The forward pass of a model under autocast, with the weights of its linear layers cast together.

    The weights of the optimizer stay float32, and so do their gradients: the cast is a part of the graph. Nothing is
    kept between two passes, so that a checkpoint has nothing to add. The output layer is left out, because it may be
    tied to embeddings, which stay float32.

    Args:
        model: whose weights are float32.
        device: of the weights.
        dtype: of autocast.
        by_layer: cast the weights of each layer apart, so that DistributedDataParallel can average the gradients of
            one layer during the backward pass of the layers before it.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, by_layer: bool = False
    ):
        super().__init__()
        self.plain = PlainForward(model)
        self.device = device
        self.dtype = dtype
        self.groups = linear_weights(model, by_layer)

    def forward(self, **batch: Any) -> Any:
        """The model's outputs for the arguments of its forward pass."""
        model = self.plain.model
        weights = {}
        for names in self.groups:
            group = [model.get_parameter(name) for name in names]
            for name, weight in zip(names, cast_together(group, self.dtype), strict=True):
                weights[f"model.{name}"] = weight
        with torch.autocast(self.device.type, dtype=self.dtype):
            return torch.func.functional_call(self.plain, weights, kwargs=batch, tie_weights=False)


class PlainForward(nn.Module):
    """The forward pass of a model's class, without what accelerate puts around that of the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        forward: Callable[..., Any] = type(self.model).forward
        return forward(self.model, **batch)


def linear_weights(model: nn.Module, by_layer: bool) -> list[list[str]]:
    """Names of the trained weights and biases of linear layers, but for the output layer, in groups to cast together.

    In a group those whose size is a multiple of 8 are first, so that all but the last of the others are aligned.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    groups: dict[str, list[str]] = defaultdict(list)
    sizes = {}
    for module_name, module in model.named_modules():
        if module is output or not is_plain_linear(module):
            continue
        layer = ".".join(module_name.split(".layers.")[-1].split(".")[:1])
        stack = module_name.split(".layers.")[0]
        for name, weight in module.named_parameters(module_name):
            if weight.requires_grad and weight.dtype == torch.float32:
                sizes[name] = weight.numel()
                groups[f"{stack} {layer}" if by_layer else ""].append(name)
    return [sorted(names, key=lambda name: sizes[name] % ALIGNED > 0) for names in groups.values()]


def cast_together(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of weights in another dtype. Their gradients are cast back together as well."""
    joined = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = joined.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


@contextmanager
def forward_pass_of(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a model, also through DistributedDataParallel, run another forward pass."""
    before = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before
