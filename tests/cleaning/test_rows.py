"""The rows of several inputs: their numbers, their part and the columns of all."""

from pathlib import Path

from hf_vanilla_transformer.cleaning.rows import CleaningInput
from hf_vanilla_transformer.corpora.columns import Columns


def test_lines_are_counted_over_all_inputs(tmp_path: Path) -> None:
    tables = {
        "a.tsv": ["source\ttarget", "one\teins", "two\tzwei"],
        "b.tsv": ["source\ttarget\tnote", "four\tvier\tx", "five\tfünf\ty"],
    }
    for name, lines in tables.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    opened = CleaningInput.open([str(tmp_path / name) for name in tables], Columns())
    rows = list(opened)
    assert [row.line for row in rows] == [2, 3, 5, 6], "as in one file, with both headers"
    assert [row.part for row in rows] == [0, 0, 1, 1]
    assert [row.source for row in rows] == ["one", "two", "four", "five"]
    assert opened.names[-1] == "note"
