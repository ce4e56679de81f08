"""The tables of exports and imports can be printed, and notice what is not the same."""

from pathlib import Path

import pytest

from tests.interop import exports_table
from tests.interop.exports import LINES, write_model


def test_the_table_of_exports(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    write_model(tmp_path / "model")
    same, other = ["CTranslate2, float32", "MarianMTModel"], "CTranslate2, int8"
    found, largest = exports_table.compare(tmp_path / "model", LINES, [*same, other], batch_size=2)
    ours = found[exports_table.OURS]
    assert len(ours.lines) == len(LINES) and largest > 1
    for name in same:
        assert found[name].lines == ours.lines
        assert found[name].difference <= 1e-5 * largest
    assert 1e-3 < found[other].difference < largest / 2
    rows = exports_table.table(found, ours.lines).splitlines()[2:]
    assert [row.split(" | ")[0][2:] for row in rows] == list(found)
    assert all("100.0 % | 100.00 | 3 of 3 |" in row for row in rows[:-1])
