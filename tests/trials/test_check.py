"""The trial of public implementations, `python -m scripts.trials.check`, with one of the tests' own in their place."""

import json
from pathlib import Path

import pytest

from scripts.docs.lessons.check.report import UNKNOWN
from scripts.trials import check, public_plants, public_transformers
from scripts.trials.public_plants import HARMLESS, PLANTS, plant
from scripts.trials.public_transformers import IMPLEMENTATIONS, Cut, Edit, Implementation
from tests.conftest import REPOSITORY

OWN = Implementation(
    "own/styles", "HEAD", "from styles import Transformer as Mine\n", ("styles.py",), "tests/check"
)


def test_every_implementation_has_plants_of_its_own() -> None:
    assert PLANTS.keys() == IMPLEMENTATIONS.keys() and HARMLESS.keys() <= PLANTS.keys()
    assert len({each.owner for each in IMPLEMENTATIONS.values()}) == len(IMPLEMENTATIONS) == 16
    assert sum(map(len, PLANTS.values())) >= 101


def test_outcome_compares_the_reports_with_and_without_a_mistake() -> None:
    before = {"mistakes": ["old"]}
    decoder = plant("kind", "file", "old", "new", "decoder")
    unknown = f"decoder layer 1 (§3): {UNKNOWN.explanation}"
    for after, outcome in (
        ({"mistakes": ["old"]}, "missed"),
        ({"mistakes": []}, "missed"),
        ({"crash": "KeyError()"}, "missed"),
        ({"error": "shapes"}, "stopped"),
        ({"mistakes": ["old", "new, in decoder layer 1"]}, "named"),
        ({"mistakes": ["old", unknown]}, "placed"),
        ({"mistakes": ["old", "new, in encoder layer 1"]}, "misplaced"),
    ):
        assert check.outcome_of(decoder, before, after) == outcome


def test_definitions_are_cut_from_notebooks_and_pages(tmp_path: Path) -> None:
    cells = [["!pip install x\n"], ["class A:\n", "    pass\n"], ["def b():\n", "    return 1\n"]]
    notebook = {"cells": [{"cell_type": "code", "source": each} for each in cells]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    block = "```{.python .input}\n%%tab TAB\nclass C:\n    tab = 'TAB'\n```\n"
    (tmp_path / "c.md").write_text(
        "".join(block.replace("TAB", tab) for tab in ("mxnet", "pytorch"))
    )
    implementation = Implementation(
        "own/own",
        "HEAD",
        "from both import A as Mine\n",
        files=(),
        cuts={"both.py": (Cut("a.ipynb", "A", "import torch\n"), Cut("c.md", "C"))},
    )
    public_transformers.write(implementation, tmp_path, tmp_path / "out", ())
    text = (tmp_path / "out" / "both.py").read_text()
    assert "class A" in text and "tab = 'pytorch'" in text and "def b" not in text
    with pytest.raises(ValueError, match="no 'missing'"):
        public_transformers.write(
            implementation, tmp_path, tmp_path / "out", [Edit("both.py", "missing", "")]
        )


@pytest.mark.parametrize(
    ("text", "is_read"), [(None, False), ("another commit", False), ("size = 512", True)]
)
def test_checkout_without_what_is_stated_is_left_out(
    tmp_path, capsys, monkeypatch, text, is_read
) -> None:
    port = Edit("model.py", "512", "32")
    own = Implementation(
        "own/own", "abc", "from model import Mine\n", files=("model.py",), ports=(port,)
    )
    monkeypatch.setitem(public_transformers.IMPLEMENTATIONS, "own", own)
    monkeypatch.setitem(public_plants.PLANTS, "own", ())
    monkeypatch.setattr(check, "answer_of", lambda _: {"error": "it was read"})
    monkeypatch.setattr("sys.argv", ["check", str(tmp_path), "--only", "own"])
    if text is not None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "model.py").write_text(text)
    assert check.main() == 0
    printed = capsys.readouterr().out
    assert ("| own | it was read |" in printed) == is_read
    assert (own.commands in printed) != is_read


@pytest.mark.slow
def test_trial_tells_found_and_missed_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plant("right", "styles.py", "functional.dropout(x)", "functional.dropout(x, 0.5)")
    wrong = plant("scale", "styles.py", "math.sqrt(self.d_k))", "self.d_k)")
    residual = plant(
        "residual",
        "styles.py",
        "self.norm1(x + self.dropout(",
        "self.norm1(self.dropout(",
        "decoder",
    )
    monkeypatch.setitem(public_plants.PLANTS, "own", (right, wrong, residual))
    row = check.try_implementation("own", OWN, REPOSITORY)
    assert not row.refusal and not row.alarms
    assert row.outcomes == {"missed": 1, "named": 1, "misplaced": 1}
    assert [each.partition(":")[0] for each in row.lost] == ["missed", "misplaced"]
    assert "| own | yes | 0 | 3 | 1 | 0 | 0 | 1 | 1 |" in check.table([row])
