"""The cost of large jobs: computed from the figures of the report, as the guide shows it."""

import sys
from pathlib import Path

import pytest

from hf_vanilla_transformer.benchmarks import cost

ROOT = Path(__file__).parents[2]


def test_guide_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    recipes = sorted((ROOT / "scripts" / "recipes").glob("wmt14_*.yaml"))
    monkeypatch.setattr(sys, "argv", ["cost", *map(str, recipes)])
    cost.main()
    printed = capsys.readouterr().out
    assert printed in (ROOT / "scripts" / "docs" / "scale.md").read_text("utf-8")
    cells = [cell.strip().replace(",", "") for cell in printed.splitlines()[2].strip("|").split("|")]
    # the report has 1,414 tokens/s of two cores
    assert float(cells[1]) == pytest.approx(1e10 * 30 / (1414 / 2) / 3600, rel=1e-4)
    assert float(cells[3]) == pytest.approx(float(cells[1]) / 168, rel=1e-2)


def test_a_figure_that_is_not_in_the_report_is_an_error() -> None:
    with pytest.raises(StopIteration):
        cost.measured("no such row")
