"""Planted faults: mistakes that a port of this model has had, or easily could have, each of which a test must notice.

A fault replaces a piece of one function in a copy of the package. The tests that it names must then fail. Functions
are found by their qualified name and compared as `ast.unparse` writes them, so that comments, line breaks and code
elsewhere may change.
"""

import ast
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faulty_copies import RunTests, copy_repository, running_tests


class Fault(NamedTuple):
    module: str  # without the suffix of the bundle's files
    function: str  # qualified name of a function, or the name of a constant
    right: str  # exactly once in the function
    wrong: str
    tests: str  # files in tests/, and perhaps -k and an expression


def read_faults(text: str) -> dict[str, Fault]:
    """The faults of planted_faults.txt by name."""
    faults = {}
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            name, place, *pieces, tests = lines
            module, function = place.split(": ")
            right = "\n".join(piece[2:] for piece in pieces if piece[0] == "-")
            wrong = "\n".join(piece[2:] for piece in pieces if piece[0] == "+")
            faults[name] = Fault(module, function, right, wrong, tests)
    return faults


FAULTS = read_faults(Path(__file__).with_name("planted_faults.txt").read_text(encoding="utf-8"))


def file_of(fault: Fault) -> str:
    return f"{fault.module}.py" if "/" in fault.module else f"{fault.module}_vanilla_transformer.py"


def plant(source: str, fault: Fault) -> str:
    """The text of a module with a fault in it. Its function and its text must be there exactly once."""
    node: Any = ast.parse(source)
    for name in fault.function.split("."):
        found = [each for each in node.body if name in names_of(each)]
        assert len(found) == 1, f"{len(found)} times {name} of {fault.function} in {file_of(fault)}"
        node = found[0]
    right = ast.unparse(node)
    times = right.count(fault.right)
    assert times == 1, f"{times} times {fault.right!r} in\n{right}"
    wrong = right.replace(fault.right, fault.wrong)
    assert ast.unparse(ast.parse(wrong)) != right
    lines = source.splitlines(keepends=True)
    decorators = getattr(node, "decorator_list", [])
    first = min(each.lineno for each in [node, *decorators])
    before = lines[: first - 1]
    after = lines[node.end_lineno :]
    wrong = textwrap.indent(f"{wrong}\n", " " * node.col_offset)
    return "".join([*before, wrong, *after])


def names_of(statement: ast.AST) -> list[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [statement.name] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []


@pytest.fixture(scope="module")
def run_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunTests]:
    with running_tests(tmp_path_factory.mktemp("runner")) as run:
        yield run


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    return copy_repository(repository, tmp_path)


def selection(fault: Fault) -> tuple[list[str], list[str]]:
    """Test files, and -k with its expression."""
    arguments = shlex.split(fault.tests)
    end = arguments.index("-k") if "-k" in arguments else len(arguments)
    return [f"tests/{name}" for name in arguments[:end]], arguments[end:]


@pytest.mark.slow  # it pins source text: a rename must not break the fast tests
@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(name: str, repository: Path) -> None:
    source = (repository / "hf_vanilla_transformer" / file_of(FAULTS[name])).read_text(
        encoding="utf-8"
    )
    compile(plant(source, FAULTS[name]), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, copy: Path, run_tests: RunTests) -> None:
    file = copy / "hf_vanilla_transformer" / file_of(FAULTS[name])
    file.write_text(plant(file.read_text(encoding="utf-8"), FAULTS[name]), encoding="utf-8")
    files, expression = selection(FAULTS[name])
    status, output = run_tests(copy, files + expression)
    # 1: a test failed. Anything else, errors of collection too, is a mistake in the fault.
    assert status == 1 and "error" not in output.splitlines()[-1], f"{status}: {output[-2000:]}"
    print(
        next((line for line in output.splitlines() if line.startswith("FAILED")), "").split(" - ")[
            0
        ]
    )


@pytest.mark.slow
def test_copy_of_right_code_passes(copy: Path, run_tests: RunTests) -> None:
    """For one fault: the suite itself runs the tests of all."""
    files, expression = selection(next(iter(FAULTS.values())))
    status, output = run_tests(copy, files + expression)
    assert status == 0, output[-2000:]
