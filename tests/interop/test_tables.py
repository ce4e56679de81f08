"""The tables of exports and imports, and the differences that they report."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.interop.converting import FORMATS
from tests.interop import exports_table, imports_table
from tests.interop.exports import LINES, write_model


@pytest.mark.slow
def test_exports_table_compares_every_engine(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    write_model(tmp_path / "model")
    same = ["CTranslate2, float32", "MarianMTModel"]
    other = "CTranslate2, int8"
    found, largest = exports_table.compare(tmp_path / "model", LINES, [*same, other], batch_size=2)
    ours = found[exports_table.OURS]
    assert len(ours.lines) == len(LINES)
    assert largest > 1
    for name in same:
        assert found[name].lines == ours.lines
        assert found[name].difference <= 1e-5 * largest
    assert 1e-3 < found[other].difference < largest / 2
    rows = exports_table.table(found, ours.lines).splitlines()[2:]
    assert [row.split(" | ")[0][2:] for row in rows] == list(found)
    assert all("100.0 % | 100.00 | 3 of 3 |" in row for row in rows[:-1])
    records = imports_table.run(exports_table.REFUSALS.values())
    assert not records.failed
    assert not records.found["test_marian.py", "refused"]
    marian = exports_table.refusals(records)[-1]
    assert marian.startswith(
        "Refused by MarianMTModel: position_encoding_type=learned; attention_bias=False; "
    )


@pytest.mark.slow
def test_imports_table_has_a_row_for_each_format() -> None:
    assert imports_table.TESTS.keys() == FORMATS.keys()
    names = ["joeynmt", "opennmt"]
    records = imports_table.run(imports_table.TESTS[name][1] for name in names)
    assert not records.failed
    rows = imports_table.table(records, names).splitlines()[2:]
    first, second = ([cell.strip() for cell in row.split("|")[2:-1]] for row in rows)
    judge, models, difference, tokens, refused, _ = first
    assert judge.startswith("NumPy restatement of JoeyNMT")
    assert int(models) > 3
    assert 0 < float(difference) <= 1e-5
    assert tokens.startswith("sentencepiece ")
    assert "encoder.layer_norm=pre" in refused
    assert second[0].startswith("NumPy restatement of OpenNMT-py")
    assert int(second[1]) > 3
    assert 0 < float(second[2]) <= 1e-5
    assert "-max_relative_positions 20" in second[4]
