"""Check one part of a Transformer alone: positions, attention, LayerNorm or a layer of the encoder."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.utils.errors import UserError

from . import subject
from .reference import Reference
from .report import TOLERANCE, UNKNOWN, Report, choices, notes_of, relative_difference
from .roles import part_tensors
from .trace import Trace

AT = "model.encoder.layers.0."
_PARTS = {
    r"position(?!_?wise)|pos_?enc|^pe$": ("positions", ("positions",)),
    r"norm|^ln$": ("norm", ("norm", "epsilon")),
    r"layer|block": (
        "encoder layer",
        (
            "heads",
            "attention scale",
            "softmax",
            "mask value",
            "residual",
            "norm",
            "epsilon",
            "activation",
            "feed-forward",
            "attention output",
            "sublayers",
        ),
    ),
    r"att|mha": (
        "attention",
        ("heads", "attention scale", "softmax", "mask value", "attention output"),
    ),
}


def part_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The part that a class with this name is, and its places. None is a whole model."""
    if re.search(
        r"transformer(?!.*(layer|block|attention))|seq2seq|translat|^model", name, re.IGNORECASE
    ):
        return None
    return next(
        (part for words, part in _PARTS.items() if re.search(words, name, re.IGNORECASE)), None
    )


@torch.no_grad()
def check_part(build: Any, given: Mapping[str, Any], part: str, places: tuple[str, ...]) -> Report:
    """As `check_model`, for a part and its places."""
    arguments = subject.constructor_arguments(build, given)
    module = subject.built(build, arguments)
    x = torch.randn(3, 7, subject.WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7)[None] < torch.tensor([[7], [5], [6]])  # (B, T), True for a visible key
    working: list[Callable[[], Any]] = []
    outputs: list[Tensor] = []
    errors: list[BaseException] = []
    # Without a mask only if the part takes none: a mistake in it would not show.
    for visible in (mask, None):
        for call in () if outputs else _calls(part, module, x, visible):
            try:
                output, again = (
                    each[0] if isinstance(each, tuple) else each for each in (call(), call())
                )
            except Exception as error:
                errors.append(error)
                continue
            if isinstance(output, Tensor):
                subject.require_equal(output, again)
                working.append(call)
                outputs += [output, output.transpose(0, 1)] if output.ndim == 3 else [output]
        if outputs:
            break
    if not outputs:
        raise UserError(
            f"{build.__name__} cannot be called as what its name says ({part}): {subject.describe_failure(errors)}"
        )
    tensors, all_heads = _weights(part, module, working[0], x)
    named = subject.heads_of(module, arguments)
    smallest = float("inf")
    for heads in dict.fromkeys(each for each in (*named, *all_heads) if subject.WIDTH % each == 0):
        reference = Reference(
            tensors, heads, subject.PAD, large_epsilon=subject.large_epsilon(module)
        )
        expected = _reference(part, reference)
        for choice, mistake in choices(places, subject.norm_options(module)):
            try:
                numbers = expected(x, visible, choice)
            except (RuntimeError, KeyError):  # shapes that this mistake does not allow
                continue
            difference = min(_difference(output, numbers, x, part) for output in outputs)
            smallest = min(smallest, float("inf") if mistake else difference)
            if difference < TOLERANCE:
                return Report([mistake] if mistake else [], smallest, notes_of(choice, mistake))
    return Report([UNKNOWN._replace(place=part)], smallest, [])


def _difference(output: Tensor, numbers: Tensor, x: Tensor, part: str) -> float:
    """The largest difference of an output, or of positions without x, relative to the largest number."""
    if part == "positions" and output.shape != numbers.shape:
        numbers = (numbers - x)[0]
        output = output[0] if output.ndim == 3 else output
    return relative_difference(output, numbers) if output.shape == numbers.shape else float("inf")


def _calls(
    part: str, module: nn.Module, x: Tensor, mask: Tensor | None
) -> Iterator[Callable[[], Any]]:
    """Ways to call a part with x (B, T, D) or (T, B, D), and a mask (B, T) of the visible keys or the hidden ones."""
    masks: list[tuple[Tensor, ...]] = [()]
    if mask is not None:
        takes_mask = part in ("encoder layer", "attention")
        shown = (mask, ~mask) if takes_mask else ()
        masks = [(each,) for one in shown for each in (one[:, None, None], one[:, None], one)]
    for inputs, mask_of_call in itertools.product((x, x.transpose(0, 1)), masks):
        for values in ([inputs] * 3, [inputs]) if part == "attention" else ([inputs],):
            yield partial(module, *values, *mask_of_call)


def _weights(
    part: str, module: nn.Module, call: Callable[[], Any], x: Tensor
) -> tuple[dict[str, Tensor], list[int]]:
    """The weights of a part by this package's names, and its number of heads, if it has some."""
    if part == "positions":
        return {}, [1]
    if part == "norm":
        vectors = [value for value in module.state_dict().values() if value.is_floating_point()]
        names = (f"{AT}norm.weight", f"{AT}norm.bias")
        return {
            name: value.expand(subject.WIDTH) for name, value in zip(names, vectors, strict=False)
        }, [1]
    with Trace(module, {}, x) as trace:
        call()
    tensors, heads = part_tensors(trace, module, subject.WIDTH)
    return tensors, [heads]


def _reference(
    part: str, reference: Reference
) -> Callable[[Tensor, Any, Mapping[str, Any]], Tensor]:
    """The paper's output for x, a mask or None, and a choice."""

    def output(x: Tensor, mask: Any, choice: Mapping[str, Any]) -> Tensor:
        if part == "positions":
            option = choice.get("positions", "interleaved")
            return x + reference.positions(x.shape[1], x.shape[2], "encoder", option)
        if part == "norm":
            return reference.norm(x, f"{AT}norm", choice)
        # (B, 1, 1, T)
        visible = torch.ones(1, dtype=torch.bool) if mask is None else mask[:, None, None]
        if part == "attention":
            return reference.attention(x, x, visible, f"{AT}self_attn.", choice)
        return reference.layer(x, None, visible, None, AT, choice)

    return output
