"""Find the first module whose output differs from the paper's for the input that it gets."""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from .reference import ALLOWED, Reference

TOLERANCE = 1e-4


def first_difference(
    model: nn.Module,
    modules: dict[str, str],
    reference: Reference,
    call: Callable[[], Any],
    batch: tuple[Tensor, Tensor],
) -> tuple[str, str]:
    """Return the place and its section, such as ("decoder layer 1, feed-forward", "§3.3").

    `call` runs the model on `batch`, the source (B, S) and the decoder input (B, T). `modules` has its names by ours.
    """
    layers = {}
    for stack in ("encoder", "decoder"):
        for number in range(reference.depth(stack)):
            at = f"model.{stack}.layers.{number}."
            inside = [path for name, path in modules.items() if name.startswith(at)]
            layers[at] = os.path.commonprefix([f"{path}." for path in inside]).rpartition(".")[0]
    seen: dict[str, tuple[Any, Any]] = {}

    def record(path: str, _: nn.Module, inputs: Any, output: Any) -> None:
        seen.setdefault(path, (inputs, output))

    paths = {*layers.values(), *modules.values()}
    named = [(path, module) for path, module in model.named_modules() if path in paths]
    hooks = [module.register_forward_hook(partial(record, path)) for path, module in named]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    for at, path in layers.items():
        stack, number = at.split(".")[1], int(at.split(".")[3])
        where = f"{stack} layer {number + 1}"
        inputs, output = _tensors(seen.get(path), batch[0].shape[0])
        if number == 0 and inputs is not None and not _embedding_is_right(reference, inputs, stack, batch):
            return f"{stack}'s embeddings and positions", "§3.4 and §3.5"
        for name in ("self_attn_layer_norm", "cross_attn_layer_norm", "final_layer_norm"):
            x, y = _tensors(seen.get(modules.get(f"{at}{name}", "")), batch[0].shape[0])
            if x is not None and not any(_close(reference.norm(x, f"{at}{name}", c), y) for c in _norms()):
                return f"{where}, {name.removesuffix('_layer_norm')} normalisation", "§3.1"
        if stack == "encoder" and inputs is not None:
            mask = batch[0].ne(reference.pad_token_id)[:, None, None, :]
            if not any(_close(reference.layer(inputs, None, mask, None, at, c), output) for c in _all()):
                return f"{where}, its attention, feed-forward network or residual connections", "§3.1 to §3.3"
    return "decoder's layers or output", "§3.1 to §3.4"


def _tensors(call: tuple[Any, Any] | None, batch: int) -> tuple[Any, Any]:
    """The first input and output (B, T, D) of a call."""
    if call is None or not call[0] or not isinstance(call[0][0], Tensor):
        return None, None
    x, y = call[0][0], call[1][0] if isinstance(call[1], tuple) else call[1]
    if not isinstance(y, Tensor) or x.ndim != 3 or x.shape != y.shape:
        return None, None
    return (x, y) if x.shape[0] == batch else (x.transpose(0, 1), y.transpose(0, 1))


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) < TOLERANCE * max(1.0, float(one.abs().max()))


def _embedding_is_right(reference: Reference, x: Tensor, stack: str, batch: tuple[Tensor, Tensor]) -> bool:
    ids = batch[stack == "decoder"]
    return any(_close(reference.embed(ids, stack, {"positions": option}), x) for option in ALLOWED["positions"])


def _norms() -> Iterator[dict[str, Any]]:
    return ({"norm": kind, "epsilon": eps} for kind, eps in itertools.product(ALLOWED["norm"], (1e-5, 1e-6, 1e-12)))


def _all() -> Iterator[dict[str, Any]]:
    names = ("norm position", "activation", "heads")
    for values in itertools.product(*(ALLOWED[name] for name in names)):
        yield from (dict(zip(names, values, strict=True)) | norm for norm in _norms())
