"""Plant random faults in the package, one at a time, and count those that its tests notice.

  pip install cosmic-ray==8.7.0
  python -m scripts.mutants --count 50 --seed 1
  python -m scripts.mutants --count 15 --room cleaning

The faults are those of cosmic-ray: another operator, comparison or number, a `not` more, a decorator less, a loop that
does not run. They are drawn evenly from the rooms of the package. Each is planted in a copy, where the tests that the
module needs run until one fails (needed_tests.py). Prints each other fault at once, and then a table of the rooms. A
fault that is missed is a hole in the tests, or a change that nobody can see. One is undecided if the time was over.
"""

import argparse
import ast
import difflib
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faulty_copies import RunTests, copy_repository, running_tests

from .needed_tests import PACKAGE, ROOT, Graph, importers, modules, needed_tests

NEAREST = 2  # test files that run first
SECONDS = 300  # of the processor, for the tests of one fault
# by the status of pytest, or of SIGALRM or SIGPROF
OUTCOMES = {0: "missed", 5: "missed", -14: "undecided", -27: "undecided"}


class Mutant(NamedTuple):
    module: str
    operator: str  # of cosmic-ray
    occurrence: int  # of the places where the operator applies


def room_of(module: str) -> str:
    """The folder of a module in the package, or the bundle."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else "bundle"


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """All faults that can be planted in a module."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        if name.startswith("core/Variable"):  # needs a configuration
            continue
        operator = get_operator(name)()
        places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from (Mutant(module, name, place) for place in range(places))


def mutated(mutant: Mutant, source: str) -> str | None:
    """The source with the fault, or None if it is no Python, or if only annotations of types differ."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    try:
        wrong = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    except AttributeError:  # cosmic-ray cannot replace an exception with a dotted name
        return None
    if wrong is None:
        return None
    try:
        changed = meaning(wrong) != meaning(source)
    except SyntaxError:
        return None
    return wrong if changed else None


class WithoutAnnotations(ast.NodeTransformer):
    """Removes the annotations of types."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """A text that is the same for sources that do the same."""
    return ast.dump(WithoutAnnotations().visit(ast.parse(source)))


def drawn(
    count: int, rooms: list[str], known: dict[str, Path], rng: random.Random
) -> Iterator[Mutant]:
    """Draw faults, as many from each room."""
    of_room: dict[str, list[Mutant]] = {room: [] for room in rooms}
    for name, path in known.items():
        if name.startswith(PACKAGE) and room_of(name) in of_room:
            of_room[room_of(name)] += mutants_of(name, path.read_text(encoding="utf-8"))
    for room, mutants in of_room.items():
        rng.shuffle(mutants)
        wanted = count // len(rooms) + (rooms.index(room) < count % len(rooms))
        for mutant in mutants:
            if wanted and mutated(mutant, known[mutant.module].read_text(encoding="utf-8")):
                wanted -= 1
                yield mutant


def outcome(mutant: Mutant, known: dict[str, Path], found: Graph, run: RunTests) -> str:
    """Plant a fault in a copy, run the tests that its module needs, and return "noticed" or one of `OUTCOMES`."""
    source = known[mutant.module]
    wrong = mutated(mutant, source.read_text(encoding="utf-8"))
    assert wrong is not None
    tests = [str(known[name].relative_to(ROOT)) for name in needed_tests(mutant.module, found)]
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(ROOT, Path(folder))
        (copy / source.relative_to(ROOT)).write_text(wrong, encoding="utf-8")
        # Most faults are noticed by the nearest. All test files together take long to be imported.
        for files in filter(None, (tests[:NEAREST], tests[NEAREST:])):
            status, _ = run(copy, files)
            if (result := OUTCOMES.get(status, "noticed")) != "missed":
                return result
    return "missed"


def difference(mutant: Mutant, known: dict[str, Path]) -> str:
    """The line of a fault, as it is and as it was planted."""
    right = known[mutant.module].read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        right.splitlines(), (mutated(mutant, right) or "").splitlines(), n=0, lineterm=""
    )
    _, _, place, *changes = lines
    number = place.split()[1].lstrip("-").split(",")[0]
    file = known[mutant.module].relative_to(ROOT)
    return "\n".join([f"{file}:{number}", *(f"  {change}" for change in changes)])


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=50, help="faults in all (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--room", nargs="*", help="folders of the package, or bundle (default: all)"
    )
    return parser.parse_args(arguments)


def main(arguments: argparse.Namespace) -> None:
    known = modules()
    found = importers(known)
    rooms = arguments.room or sorted({room_of(name) for name in known if name.startswith(PACKAGE)})
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder, running_tests(Path(folder), SECONDS) as run:
        for mutant in drawn(arguments.count, rooms, known, random.Random(arguments.seed)):
            result = outcome(mutant, known, found, run)
            counts[room_of(mutant.module), result] += 1
            if result != "noticed":
                print(f"{result}: {difference(mutant, known)}\n", flush=True)
    print("| room | noticed | missed | undecided |\n|---|---|---|---|")
    for room in rooms:
        numbers = [str(counts[room, result]) for result in ("noticed", "missed", "undecided")]
        print(f"| {room} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main(parse_arguments(None, "python -m scripts.mutants"))
