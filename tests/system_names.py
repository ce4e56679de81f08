"""Names of the standard library on each system, by typeshed, whose stubs come with mypy.

typeshed's maintainers compare the stubs with Python on Linux, macOS and Windows (`stubtest`).
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

SYSTEMS = "linux", "darwin", "win32"
OLDEST = (3, 10)  # Python that pyproject.toml supports

_MYPY = find_spec("mypy")
STUBS = None
if _MYPY is not None:
    STUBS = Path(str(_MYPY.origin)).parent / "typeshed" / "stdlib"


@cache
def stub(module: str) -> Path | None:
    """The file that describes a module of the standard library, or None for other modules."""
    assert STUBS is not None
    path = STUBS.joinpath(*module.split("."))
    files = path / "__init__.pyi", path.with_suffix(".pyi")
    return next((file for file in files if file.is_file()), None)


@cache
def names(module: str, system: str) -> frozenset[str]:
    """The names that a module has on a system. It is empty for a module that a system lacks."""
    file = stub(module)
    assert file is not None, module
    world = {"sys": SimpleNamespace(platform=system, version_info=OLDEST)}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for statement in _statements(tree.body, world):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            parent = f"{module}." if statement.level else ""
            found |= names(f"{parent}{statement.module}", system)
        elif isinstance(
            statement, ast.Import | ast.ImportFrom
        ):  # without `as` they are the stub's own
            found |= {alias.asname for alias in statement.names if alias.asname is not None}
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _statements(body: list[ast.stmt], world: dict[str, object]) -> Iterator[ast.stmt]:
    """The statements that count on a system, without the conditions around them."""
    for statement in body:
        if isinstance(statement, ast.If):
            holds = eval(compile(ast.Expression(statement.test), "stub", "eval"), world)
            yield from _statements(statement.body if holds else statement.orelse, world)
        else:
            yield statement


def lacking(module: str, system: str) -> frozenset[str]:
    """The names of a module that Linux has and another system lacks."""
    return names(module, "linux") - names(module, system)
