"""The forward pass of an update on a GPU, with few launches of kernels or as one compiled graph.

Eager training is bound by launches: on an H200 the base and the big model take the same time. Autocast casts each
weight and each bias by itself, and each gradient back: 384 of 1,312 kernels of an update of the base model.
`CastForward` casts all of them together. Values and gradients are autocast's, bit for bit.

`CompiledForward` compiles the function of packed rows to their losses. Their batches have one shape, and nothing in
them waits for the host, so that a run has one graph of the forward and one of the backward pass.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...attention_vanilla_transformer import is_plain_linear
from ...batches.packing import is_packed
from ...loss_vanilla_transformer import VanillaTransformerOutput
from ...utils.random_state import kept_random_state
from ...utils.untrusted import one_line
from ..state.distributed import Agreement, print_main


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
        weights: dict[str, Tensor] = {}
        for group in self.groups:
            names = [f"model.{path}" for path, _, _ in group]
            own = [getattr(module, name) for _, module, name in group]
            weights |= zip(names, cast_together(own, self.dtype), strict=True)
        with torch.autocast(self.device.type, dtype=self.dtype):
            return torch.func.functional_call(self.plain, weights, kwargs=batch, tie_weights=False)


class PlainForward(nn.Module):
    """The forward pass of a model's class, without what accelerate puts around that of the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return cast(Any, type(self.model)).forward(self.model, **batch)


def linear_weights(model: nn.Module, by_layer: bool) -> list[list[tuple[str, nn.Module, str]]]:
    """The trained weights and biases of linear layers, but for the output layer, in groups to cast together.

    Each has its name in the model, its module and its name there.
    """
    output = cast(Any, model).get_output_embeddings()
    groups: dict[str, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        if module is output or not is_plain_linear(module):
            continue
        stack, _, rest = path.partition(".layers.")
        layer = rest.partition(".")[0]
        group = f"{stack} {layer}" if by_layer else ""
        for name, weight in module.named_parameters():
            if weight.requires_grad and weight.dtype == torch.float32:
                groups[group].append((f"{path}.{name}", module, name))
    return list(groups.values())


def cast_together(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of weights in another dtype. Their gradients are cast back together as well."""
    joined = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = joined.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


class CompiledForward:
    """The forward pass for packed rows, as one graph compiled with the first batch (`compile`).

    Batches of another shape run without it. Embeddings are looked up before the graph. Inductor adds up the gradients
    of a token's places in any order, so that a resumed run would have other bits.

    Args:
        forward: returns the model's outputs for the arguments of its forward pass.
        model: of `forward`.
        shapes: of `input_ids` and `labels`, the planned ones.
        settings: `backend` and `mode` of `torch.compile`.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        model: Any,
        shapes: tuple[tuple[int, int], tuple[int, int]],
        **settings: Any,
    ):
        self.forward = forward
        self.model = model
        self.shapes = shapes
        self.is_due = True  # nothing is compiled yet
        self.failed = False
        self._compiled = torch.compile(self._losses, fullgraph=True, dynamic=False, **settings)

    def fits(self, batch: Mapping[str, Any]) -> bool:
        """True if the batch has the shape that is compiled."""
        if self.failed or not is_packed(batch):
            return False
        return (tuple(batch["input_ids"].shape), tuple(batch["labels"].shape)) == self.shapes

    def __call__(self, **batch: Any) -> VanillaTransformerOutput:
        """The losses of a batch of packed rows."""
        items = batch.get("num_items_in_batch")
        if items is not None:  # a number would be a constant of the graph
            batch["num_items_in_batch"] = torch.as_tensor(items, device=batch["labels"].device)
        source = self.model.get_encoder().embed_tokens
        target = self.model.get_decoder().embed_tokens
        batch["inputs_embeds"] = source(batch.pop("input_ids"))
        batch["decoder_inputs_embeds"] = target(batch.pop("decoder_input_ids"))
        loss, nll_loss = self._compiled(batch)
        return VanillaTransformerOutput(loss=loss, nll_loss=nll_loss)

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self.forward(**batch, skip_logits=True)
        return outputs.loss, outputs.nll_loss

    def compile(self, batch: Mapping[str, Any]) -> None:
        """Compile both passes by a rehearsal with a batch, and say how long it took.

        If a rank cannot, all compute every batch without the graph, and a line says why. A rehearsal leaves gradients
        and random state as they are. DistributedDataParallel has no part in it: within its forward pass torch
        would split the graph at its buckets, and an error in its backward pass would end the run.

        Args:
            batch: on the device, with `num_items_in_batch`.
        """
        self.is_due = False
        start = time.monotonic()
        device = batch["labels"].device
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        reason = ""
        try:
            with kept_random_state(device):
                loss = self(**batch).loss
                torch.autograd.grad(loss, weights, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch has no public class for the errors of its compilers
            reason = f"{type(error).__name__}: {one_line(error)}"
        (self.failed,) = Agreement(bool(reason), device=device).read()
        if self.failed:
            print_main(
                f"torch_compile: the update is not compiled: {reason or 'another rank cannot'}"
            )
            return
        (rows, source), (_, target) = self.shapes
        print_main(
            f"torch_compile: one graph for updates of batches of {rows} rows of {source} source and {target} target "
            f"places, compiled in {time.monotonic() - start:.0f} s"
        )


@dataclass
class ForwardChoice:
    """What computes the losses of a batch in training in place of the model's own forward pass."""

    compiled: CompiledForward | None = None
    cast: Callable[..., Any] | None = None  #: `CastForward`, with outputs in float32

    def of(self, batch: Mapping[str, Any]) -> Callable[..., Any] | None:
        """The forward pass for a batch, or None for the model's own."""
        if self.compiled is not None and self.compiled.fits(batch):
            return self.compiled
        return self.cast


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
