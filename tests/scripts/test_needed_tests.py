"""Which tests a changed module needs, and which random faults change what it does."""

import signal

import pytest

from scripts.mutants import __main__ as mutants
from scripts.mutants.__main__ import Mutant, meaning, outcome
from scripts.mutants.needed_tests import importers, modules, needed_tests

IMPORTERS = {
    "package.words": {"package.lines", "tests.helpers"},
    "package.lines": {"tests.test_lines", "tests.test_pages"},
    "package.pages": set(),
    "tests.helpers": {"tests.test_spelling", "tests.test_words"},
    "tests.test_lines": set(),
    "tests.test_pages": set(),
    "tests.test_spelling": set(),
    "tests.test_words": set(),
}


def test_needed_tests_import_the_module_or_a_helper_that_does() -> None:
    few = [
        "tests.test_words",
        "tests.test_lines",
        "tests.test_pages",
        "tests.test_spelling",
    ]  # of package.lines, too
    assert needed_tests("package.words", IMPORTERS) == few
    own_folder = {**IMPORTERS, "package.words": {"other.lines", "tests.helpers"}}
    assert needed_tests("package.words", own_folder) == ["tests.test_words", "tests.test_spelling"]
    more = {
        **IMPORTERS,
        "package.words": {"package.lines", "tests.test_a", "tests.helpers"},
        "tests.test_a": set(),
    }
    assert needed_tests("package.words", more) == [
        "tests.test_words",
        "tests.test_a",
        "tests.test_spelling",
    ]


def test_tests_of_importers_are_needed_where_no_test_imports_the_module() -> None:
    without_helper = {**IMPORTERS, "package.words": {"package.lines"}}
    assert needed_tests("package.words", without_helper) == ["tests.test_lines", "tests.test_pages"]
    assert needed_tests("package.pages", IMPORTERS) == []


@pytest.mark.slow
def test_names_of_a_face_lead_to_their_modules() -> None:
    found = importers(modules())
    module = "hf_vanilla_transformer.inference.translator"
    assert "tests.inference.test_translator" in needed_tests(module, found)


@pytest.mark.slow
def test_modules_that_are_imported_by_name_have_tests() -> None:
    found = importers(modules())
    assert "tests.interop.test_argos" in needed_tests("hf_vanilla_transformer.interop.argos", found)
    assert "tests.scripts.test_main" in needed_tests("vanilla_transformer_cli.merge", found)


def test_annotations_of_types_have_no_meaning() -> None:
    assert meaning("def f(x: int | None = 1) -> int:\n    y: int = x\n    return y") == meaning(
        "def f(x: int + None = 1) -> str:\n    y: str = x\n    return y"
    )
    assert meaning("x = 1") != meaning("x = 2")


def test_fault_is_undecided_if_the_time_was_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "mutated", lambda *_: "")
    monkeypatch.setattr(mutants, "copy_repository", lambda _, folder: folder)
    known = {name: mutants.ROOT / "README.md" for name in ("module", "test_a")}
    statuses = {
        1: "noticed",
        2: "noticed",
        0: "missed",
        5: "missed",
        -signal.SIGALRM: "undecided",
        -signal.SIGPROF: "undecided",
    }
    for status, expected in statuses.items():
        assert (
            outcome(
                Mutant("module", "", 0),
                known,
                {"module": {"test_a"}, "test_a": set()},
                lambda *_, of=status: (of, ""),
            )
            == expected
        )


def test_nearest_tests_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "mutated", lambda *_: "")
    monkeypatch.setattr(mutants, "copy_repository", lambda _, folder: folder)
    names = [f"test_{letter}" for letter in "abcd"]
    known = {name: mutants.ROOT / name for name in names} | {"module": mutants.ROOT / "README.md"}
    for statuses, expected in (
        ([0, 1], "noticed"),
        ([0, 0], "missed"),
        ([1], "noticed"),
        ([-14], "undecided"),
    ):
        runs: list[list[str]] = []

        def run(
            _: object, files: list[str], runs: list = runs, statuses: list = statuses
        ) -> tuple[int, str]:
            runs.append(files)
            return statuses[len(runs) - 1], ""

        found = {name: set() for name in names} | {"module": {*names}}
        assert outcome(Mutant("module", "", 0), known, found, run) == expected
        assert runs == [names[:2], names[2:]][: len(statuses)]
