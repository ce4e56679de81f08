"""Print the test files that changed modules need: python -m scripts.mutants.needed_tests FILE …

A test file is needed if it, or a helper beside it, imports the module. If none does, those are needed that import a
module which imports it, and so on. If there are few, those are needed, too, that import such a module of the same
folder. Test files of the same name and folder come first, then those without a helper.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEW = 3  # test files
PACKAGE = "hf_vanilla_transformer"
FOLDERS = {
    PACKAGE: ROOT,
    "vanilla_transformer_cli": ROOT / "scripts",
    "tests": ROOT,
    "scripts/trials": ROOT,
}
# Helpers of tests: a test module that imports one also tests the modules that the helper imports.
HELPERS = "tests.", "scripts.trials."

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the package, of the command, of the tests and of their trials."""
    found = {}
    for name, folder in FOLDERS.items():
        for path in sorted((folder / name).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports, inside functions too, and siblings that it names for `import_module`."""
    path = known[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    text = path.read_text(encoding="utf-8")
    by_name = "import_module(" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (defining_module(module, alias.name, known) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and by_name:
            yield f"{package}.{node.value}"


def defining_module(module: str, name: str, known: dict[str, Path]) -> str:
    """The module behind `from module import name`. A package may pass on what another module defines."""
    longer = f"{module}.{name}"
    if longer in known:
        return longer
    if module not in known or known[module].name != "__init__.py" or module.startswith("tests"):
        return module
    value = getattr(importlib.import_module(module), name, None)
    return getattr(value, "__module__", module)


def importers(known: dict[str, Path]) -> Graph:
    """Module -> the modules that import it."""
    found: Graph = {name: set() for name in known}
    for name in known:
        for imported in imports_of(name, known):
            if imported in found and imported != name:
                found[imported].add(name)
    return found


def needed_tests(changed: str, found: Graph) -> list[str]:
    """The test modules that a changed module needs, the nearest first."""
    ring, seen = {changed}, {changed}
    while ring:
        nearest = {name for module in ring for name in found[module]}
        if tests := {name for module in ring for name in tests_with(module, found)}:
            if len(tests) < FEW:
                room = changed.rpartition(".")[0]
                siblings = {name for name in nearest if name.rpartition(".")[0] == room}
                tests |= {name for module in siblings for name in found[module] if is_test(name)}
            return sorted(
                tests, key=lambda test: (-likeness(test, changed), test not in nearest, test)
            )
        ring = nearest - seen
        seen |= ring
    return []


def is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def tests_with(module: str, found: Graph) -> set[str]:
    """The test modules that import a module, or a helper of tests that does."""
    tests: set[str] = set()
    waiting, seen = [module], {module}
    while waiting:
        for name in found[waiting.pop()] - seen:
            seen.add(name)
            if is_test(name):
                tests.add(name)
            elif name.startswith(HELPERS):
                waiting.append(name)
    return tests


def likeness(test: str, module: str) -> int:
    """The number of words in the names of a test module and of a module that are the same, but for the package's."""
    words = {*module.replace(".", "_").split("_")} - {*PACKAGE.split("_")}
    return len(words & {*test.replace(".", "_").split("_")})


def module_of(file: str, known: dict[str, Path]) -> str:
    """The module in a file."""
    path = Path(file).resolve()
    for name, each in known.items():
        if each == path:
            return name
    sys.exit(f"error: {file}: no module of {', '.join(FOLDERS)}")


def main(files: list[str]) -> None:
    known = modules()
    found = importers(known)
    tests = [test for file in files for test in needed_tests(module_of(file, known), found)]
    for test in dict.fromkeys(tests):
        print(known[test].relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
