"""Build the notebooks of the lessons from `source/`: python scripts/docs/lessons/build.py [NAME…]

A source is Markdown. Its Python blocks are the code of every edition. The text between them is English up to a line
`<!-- zh -->`, then Chinese. The notebooks contain the output of their code. A block ```` ```python exercise ```` has a
function to fill in. The block after it, ```` ```python test ````, fails until that is done, and is not executed here.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

# The same numbers on any machine.
os.environ |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FOLDER = Path(__file__).parent
LANGUAGES = ("en", "zh")
INSTALL = """\
# Installs the package from the clone that this notebook lies in, if it is missing.
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("hf_vanilla_transformer") is None:
    clones = [folder for folder in Path.cwd().parents if (folder / "hf_vanilla_transformer").is_dir()]
    if not clones:
        raise SystemExit("Open this notebook in a clone of the repository: clone it first, also in Colab.")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"{clones[0]}[plot,serve]"], check=True)"""
_CELLS = re.compile(
    r"^```python *(\w*)\n(.*?)\n```$|((?:(?!^```python).)+)", re.MULTILINE | re.DOTALL
)


class Cell(NamedTuple):
    kind: str  #: "text", "code", "exercise" or "test"
    text: dict[str, str]  #: by language. The code is the same in all


class Output(NamedTuple):
    printed: str
    pictures: list[str]  #: PNG in base64


def read_cells(name: str) -> list[Cell]:
    """Return the cells of a source, after its first text the one that installs the package."""
    cells: list[Cell] = []
    for kind, code, text in _CELLS.findall(
        (FOLDER / "source" / f"{name}.md").read_text(encoding="utf-8")
    ):
        if code:
            cells.append(Cell(kind or "code", dict.fromkeys(LANGUAGES, code)))
        elif text.strip():
            editions = (part.strip() for part in text.split("<!-- zh -->"))
            cells.append(Cell("text", dict(zip(LANGUAGES, editions, strict=True))))
    cells.insert(1, Cell("code", dict.fromkeys(LANGUAGES, INSTALL)))
    return cells


def execute(code: str, namespace: dict[str, Any]) -> Output:
    """Run the code of a cell. Its figures are closed, as a notebook does."""
    from matplotlib import pyplot

    printed, pictures = io.StringIO(), []
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
        exec(compile(code, "<cell>", "exec"), namespace)
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(
            picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None}
        )
        pictures.append(base64.b64encode(picture.getvalue()).decode())
    pyplot.close("all")
    return Output(printed.getvalue(), pictures)


def execute_all(cells: list[Cell]) -> dict[int, Output]:
    """Run the code of a lesson in order. Return outputs by the numbers of their cells."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    runs = [
        (number, cell.text["en"])
        for number, cell in enumerate(cells)
        if cell.kind in ("code", "exercise")
    ]
    return {number: execute(code, namespace) for number, code in runs}


def notebook(cells: list[Cell], outputs: dict[int, Output], language: str) -> dict[str, Any]:
    """Return an edition in nbformat 4.5."""
    entries: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        entry = {
            "id": f"cell-{number}",
            "metadata": {},
            "source": cell.text[language].splitlines(keepends=True),
        }
        if cell.kind == "text":
            entries.append(entry | {"cell_type": "markdown"})
            continue
        printed, pictures = outputs.get(number, Output("", []))
        shown: list[dict[str, Any]] = [
            {"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}}
            for picture in pictures
        ]
        if printed:
            shown.insert(
                0,
                {
                    "output_type": "stream",
                    "name": "stdout",
                    "text": printed.splitlines(keepends=True),
                },
            )
        if cell.kind == "test":  # an unsolved exercise does not stop "run all"
            entry["metadata"] = {"tags": ["raises-exception"]}
        entries.append(entry | {"cell_type": "code", "execution_count": None, "outputs": shown})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": entries,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in (FOLDER / "source").glob("*.md"))
    parser.add_argument(
        "names", nargs="*", default=names, metavar="NAME", help="lessons to build (default: all)"
    )
    for name in parser.parse_args().names:
        cells = read_cells(name)
        outputs = execute_all(cells)
        for language in LANGUAGES:
            path = FOLDER / language / f"{name}.ipynb"
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(
                notebook(cells, outputs, language), ensure_ascii=False, indent=1, sort_keys=True
            )
            path.write_text(f"{text}\n", encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
