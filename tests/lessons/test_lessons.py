"""The lessons: their code prints what they show, and an exercise accepts the right answer and no wrong one."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

LESSONS = REPOSITORY / "scripts" / "docs" / "lessons"
NAMES = sorted(path.stem for path in (LESSONS / "source").glob("*.md"))
SECTIONS = Path(__file__).with_name("solutions.md").read_text(encoding="utf-8").split("\n## ")[1:]
#: function -> its answers, the right one first
ANSWERS = {
    text.split()[0]: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for text in SECTIONS
}


@pytest.fixture(scope="module")
def build() -> Any:
    spec = importlib.util.spec_from_file_location("build_lessons", LESSONS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def edition(name: str, language: str) -> Any:
    return json.loads((LESSONS / language / f"{name}.ipynb").read_text(encoding="utf-8"))


def stored_outputs(build: Any, name: str) -> dict[int, Any]:
    outputs = {}
    for number, cell in enumerate(edition(name, "en")["cells"]):
        printed = ["".join(each["text"]) for each in cell.get("outputs", ()) if "text" in each]
        pictures = [each["data"]["image/png"] for each in cell.get("outputs", ()) if "data" in each]
        outputs[number] = build.Output("".join(printed), pictures)
    return outputs


def test_index_lists_ten_lessons() -> None:
    assert len(NAMES) == 10
    index = (LESSONS / "README.md").read_text(encoding="utf-8")
    assert all(
        f"]({language}/{name}.ipynb)" in index for name in NAMES for language in ("en", "zh")
    )


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_built_from_the_source(name: str, build: Any) -> None:
    cells, outputs = build.read_cells(name), stored_outputs(build, name)
    for language in ("en", "zh"):
        assert edition(name, language) == build.notebook(cells, outputs, language)
    kinds = [cell.kind for cell in cells]
    assert kinds.count("exercise") >= 2 and any(outputs[number].pictures for number in outputs)
    assert [kinds[at + 1] for at, kind in enumerate(kinds) if kind == "exercise"] == [
        "test"
    ] * kinds.count("exercise")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_the_text_are_in_the_code_or_its_output(name: str, build: Any) -> None:
    cells, outputs = build.read_cells(name), stored_outputs(build, name)
    decimal = r"(?<![\d.])\d+\.\d+(?!\.?\d)"
    known = " ".join(
        [cell.text["en"] for cell in cells if cell.kind != "text"]
        + [o.printed for o in outputs.values()]
    )
    editions = []
    for language in ("en", "zh"):
        prose = "\n".join(cell.text[language] for cell in cells if cell.kind == "text")
        prose = re.sub(
            r"\$\$?.*?\$|https?://\S+|第 [\d.]+ 节(和第 [\d.]+ 节)?|Sections? [\d. and]+", "", prose
        )
        editions.append(sorted(re.findall(decimal, prose)))
        assert [number for number in editions[-1] if number not in re.findall(decimal, known)] == []
    assert editions[0] == editions[1]


def test_reading_order_names_what_exists() -> None:
    page = LESSONS.parent / "reading_order.md"
    named = re.findall(r"\[`(\w+)`\]\(([\w./]+)\)", page.read_text(encoding="utf-8"))
    assert len(named) > 25
    for name, file in named:
        source = (page.parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", source, re.M), f"{name} in {file}"


def run(build: Any, code: str, namespace: dict[str, Any]) -> str:
    return build.execute(code, dict(namespace)).printed


@pytest.mark.slow  # a training of a minute among them
@pytest.mark.parametrize("name", NAMES)
def test_lesson_runs_and_its_exercises_judge(
    name: str, build: Any, tmp_path: Path, in_tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    cells, stored = build.read_cells(name), stored_outputs(build, name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = cell.text["en"]
        if cell.kind == "test":
            (function,) = re.findall(r"^def (\w+)", cells[number - 1].text["en"], re.M)
            right, *wrong = ANSWERS[function]
            with pytest.raises(NotImplementedError):
                run(build, code, namespace)
            assert run(build, f"{right}\n{code}", namespace) == "right\n"
            assert wrong
            for answer in wrong:
                with pytest.raises(AssertionError, match="."):
                    run(build, f"{answer}\n{code}", namespace)
        elif cell.kind != "text":
            output = build.execute(code, namespace)
            assert output.printed == stored[number].printed
            assert len(output.pictures) == len(stored[number].pictures)


def test_first_cell_installs_a_missing_package(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[Any] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    exec(build.INSTALL, {})
    assert commands == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(LESSONS / "en")
    exec(build.INSTALL, {})
    assert commands[0] == [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        f"{REPOSITORY}[plot,serve]",
    ]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="clone"):
        exec(build.INSTALL, {})


def test_chinese_text_has_chinese_quotation_marks() -> None:
    for name in NAMES:
        for cell in edition(name, "zh")["cells"]:
            text = re.sub(r"`[^`]*`|\$[^$]*\$", "", "".join(cell["source"]))
            marks = re.findall('["“”]', text) if cell["cell_type"] == "markdown" else []
            assert marks == ["“", "”"] * (len(marks) // 2), name
