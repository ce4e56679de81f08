"""Find what the mask functions next to the checked code mark: the visible keys or the hidden ones."""

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH = 4
_MAX_FILES = 50


class Convention(NamedTuple):
    """A mask function, and whether 1 marks the "visible" keys or the "hidden" ones. Its diagonal may be wrong."""

    encoding: str
    function: str
    is_shifted: bool


class _Anything:
    """An argument of which nothing is known, such as options with a device."""

    def __getattr__(self, name: str) -> None:
        return None


def own_convention(build: Callable[..., Any]) -> Convention | None:
    """The convention of the first function that makes a causal mask, next to the code.

    A function with "mask" in its name is called with a length, or with words, and its result must be a triangle.
    """
    for name, function in _functions(build):
        for argument in (LENGTH, torch.ones(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH)):
            for others in ((), (_Anything(),)):
                try:
                    result = function(argument, *others)
                except Exception:
                    continue
                for each in result if isinstance(result, tuple) else (result,):
                    if (convention := _convention(each, name)) is not None:
                        return convention
    return None


def _convention(result: Any, name: str) -> Convention | None:
    if (
        not isinstance(result, Tensor)
        or result.shape[-2:] != (LENGTH, LENGTH)
        or result.numel() != LENGTH**2
    ):
        return None
    if result.is_floating_point() and bool(result.isinf().any()):
        return None  # numbers to add explain themselves
    square = result.reshape(LENGTH, LENGTH) != 0
    full = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    for shift in (0, -1, 1):
        if torch.equal(square, full.tril(shift)):
            return Convention("visible", name, shift != 0)
        if torch.equal(square, full.triu(shift + 1)):
            return Convention("hidden", name, shift != 0)
    return None


def _functions(build: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    file = inspect.getsourcefile(build)
    if file is None:
        return
    own = Path(file)
    others = sorted(each for each in own.parent.glob("*.py") if each != own)
    names = {
        "torch": torch,
        "nn": nn,
        "F": functional,
        "np": numpy,
        "numpy": numpy,
        "math": math,
        "Variable": _same,
    }
    for path in [own, *others][:_MAX_FILES]:
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and re.search("mask", node.name, re.IGNORECASE):
                node.decorator_list = []
                node.args.defaults = [
                    each for each in node.args.defaults if isinstance(each, ast.Constant)
                ]
                node.returns = None
                for argument in node.args.args:
                    argument.annotation = None
                space: dict[str, Any] = dict(names)
                exec(compile(ast.Module([node], []), str(path), "exec"), space)
                yield node.name, space[node.name]


def _same(tensor: Tensor) -> Tensor:
    return tensor
