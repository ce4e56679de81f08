"""Decode token by token with a decoder that takes and returns a state, as in "Dive into Deep Learning"."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Found(Exception):
    """Ends the forward pass that searches the decoder."""


def output_of_steps(model: nn.Module, run: Callable[[], Any], target: Tensor) -> Tensor | None:
    """Return the decoder's outputs (B, T, V) for one token at a time in eval mode.

    Args:
        model: has a module that takes the target and a state (a list or a dictionary), and returns logits and a state.
        run: calls the model for a whole target.
        target: the decoder's input (B, T) of that call.

    Returns:
        The outputs, or None if there is no such module.

    Raises:
        RuntimeError: the shapes of the state do not fit those of the next token.
    """
    model.eval()
    call = _decoder_call(model, run, target)
    if call is None:
        return None
    decoder, arguments = call
    state_place = next(place for place, each in enumerate(arguments) if _is_state(each))
    target_place = next(place for place, each in enumerate(arguments) if isinstance(each, Tensor))
    outputs = []
    for token in target.split(1, dim=1):
        arguments[target_place] = token
        result = decoder(*arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            return None
        outputs.append(result[0])
        arguments[state_place] = result[1]
    return torch.cat(outputs, dim=1)


def _decoder_call(
    model: nn.Module, run: Callable[[], Any], target: Tensor
) -> tuple[nn.Module, list[Any]] | None:
    """The first module that is called with the target and a state, and its arguments before the call."""
    calls: list[tuple[nn.Module, list[Any]]] = []

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        has_target = len(tensors) == 1 and torch.equal(tensors[0], target)
        if has_target and any(map(_is_state, arguments)):
            calls.append((module, copy.deepcopy(list(arguments))))
            raise _Found

    hooks = [part.register_forward_pre_hook(record) for part in model.modules()]
    try:
        run()
    except _Found:
        return calls[0]
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _is_state(argument: Any) -> bool:
    return isinstance(argument, (list, dict))
