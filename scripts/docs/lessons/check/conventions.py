"""Find what the mask functions of the checked code mark: the visible keys or the hidden ones."""

import ast
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from . import subject

LENGTH = 4
_MAX_MODULES = 50
_NOT_THEIRS = {*sys.stdlib_module_names, "hf_vanilla_transformer", "scripts"}
_WORDS = "src|source|inp|trg|tgt|target|dec|seq"  # in names of arguments
_FIXED_LENGTH = r"(max_?)?(seq_?)?len(gth)?"  # names of constants
_NAMES = {
    "torch": torch,
    "nn": nn,
    "F": functional,
    "np": numpy,
    "numpy": numpy,
    "math": math,
    "Variable": lambda tensor: tensor,
    "device": "cpu",
}


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
    """The convention of the functions and methods that make a causal mask, or None.

    The file of `build` decides, or else the files that it imports if they agree. Other files in its folder may belong
    to other attempts. A function with "mask" in its name is called with a length, or with words, and its result must
    be a triangle.
    """
    source = inspect.getsourcefile(build)
    if source is None:
        return None
    own = Path(source)
    paths = [own, *_imported_files(build.__module__)]
    trees = [tree for path in paths if (tree := _parsed(path)) is not None]
    constants = {name: value for tree in reversed(trees) for name, value in _constants(tree)}
    conventions: list[Convention] = []
    for tree in trees:
        conventions += _conventions_in(tree, constants)
        if tree is trees[0] and conventions:
            return conventions[0]
    agreed = {each.encoding for each in conventions}
    return conventions[0] if len(agreed) == 1 else None


def _conventions_in(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[Convention]:
    words = torch.ones(1, LENGTH, dtype=torch.long)
    for node in _mask_functions(tree):
        function = _compiled(node, constants)
        for sentence in (LENGTH, words, words.float()):
            try:
                result = function(*_arguments(function, sentence))
            except Exception:
                continue
            results = result if isinstance(result, tuple) else (result,)
            yield from (each for one in results if (each := _convention(one, node.name)))


def _arguments(function: Callable[..., Any], sentence: Any) -> list[Any]:
    """A value for each required argument of a mask function by its name."""
    values: list[Any] = []
    has_sentence = False
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.default is not parameter.empty:
            break
        if "pad" in name:
            values.append(subject.PAD)
        elif name == "device":
            values.append("cpu")
        elif name == "self" or has_sentence and not re.search(_WORDS, name):
            values.append(_Anything())
        else:
            values.append(sentence)
            has_sentence = True
    return values


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


def _compiled(node: ast.FunctionDef, constants: Mapping[str, Any]) -> Callable[..., Any]:
    """The function alone. Its file is not imported."""
    names: dict[str, Any] = {**_NAMES, **constants}
    exec(compile(ast.Module([node], []), node.name, "exec"), names)
    return names[node.name]


def _imported_files(name: str) -> list[Path]:
    """The files that a module imported, and those that these imported, without the standard library and libraries."""
    names = [name]
    files: list[Path] = []
    for each in names:  # it grows
        module = sys.modules.get(each)
        path = Path(getattr(module, "__file__", None) or "")
        tree = None if "site-packages" in path.parts else _parsed(path)
        if tree is None:
            continue
        files.append(path)
        imported = _imports(tree, getattr(module, "__package__", None) or "")
        names += [other for other in imported if other not in names][: _MAX_MODULES - len(names)]
    return files[1:]


def _imports(tree: ast.Module, package: str) -> list[str]:
    """The modules that a file of a package imports, if they are loaded."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*(parents if node.level else ()), *filter(None, [node.module])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    loaded = (name for name in names if name in sys.modules)
    return [name for name in dict.fromkeys(loaded) if name.partition(".")[0] not in _NOT_THEIRS]


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that a file gives numbers and texts. A fixed length of sentences becomes `LENGTH`."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                is_length = re.fullmatch(_FIXED_LENGTH, target.id.lower())
                yield target.id, LENGTH if is_length else node.value.value


def _mask_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions and methods with "mask" in their names, without decorators, types and computed defaults."""
    classes = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in itertools.chain(tree.body, *classes):
        if isinstance(node, ast.FunctionDef) and re.search("mask", node.name, re.IGNORECASE):
            node.decorator_list = []
            node.args.defaults = [
                each for each in node.args.defaults if isinstance(each, ast.Constant)
            ]
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            yield node
