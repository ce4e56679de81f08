"""A metric as a user writes it for `evaluate.load`, and the figures that are saved."""

from pathlib import Path
from typing import Any

import pytest

LENGTH = """
import datasets
import evaluate


class Length(evaluate.Metric):
    def _info(self):
        features = datasets.Features(predictions=datasets.Value("string"), references=datasets.Value("string"))
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        lengths = [len(text) for text in predictions]
        return {"longest": max(lengths), "shortest": min(lengths), "all": lengths}
"""


@pytest.fixture
def length_metric(tmp_path: Path) -> str:
    """The file of a metric with two numbers and a list."""
    file = tmp_path / "length.py"
    file.write_text(LENGTH, encoding="utf-8")
    return str(file)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, which takes no time: the files are empty."""
    from matplotlib.figure import Figure

    saved: list[Any] = []

    def keep(figure: Any, path: Any, **settings: Any) -> None:
        saved.append(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved
