"""Defects of text files: counted and reported, never fatal, never silent."""

import csv
import gzip
import io
import json
import os
import random
import time

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.columns import Columns, read_sides
from hf_vanilla_transformer.corpora.pairs import defect
from hf_vanilla_transformer.corpora.readers import BadRow, read_rows, repaired_lines
from hf_vanilla_transformer.inference.sentences import read_sentences
from hf_vanilla_transformer.utils.dataset_cache import cache_file
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

GOOD = [(f"sentence {number}", f"Satz {number}") for number in range(40)]


def text_of(pairs):
    return [(row["source"], row["target"]) for row in pairs]


def parallel(folder, sources, targets):
    for name, lines in (("x.en", sources), ("x.de", targets)):
        (folder / name).write_bytes(b"".join(lines))
    return [folder / "x.en", folder / "x.de"]


def lines_of(side, end=b"\n"):
    return [pair[side].encode() + end for pair in GOOD]


def test_repairs_are_counted(tmp_path):
    sources, targets = lines_of(0, b"\r\n"), lines_of(1)
    for number in (0, 20):  # two files with byte order marks, concatenated
        sources[number] = b"\xef\xbb\xbf" + sources[number]
    pairs, report = load_pairs(parallel(tmp_path, sources, targets))
    assert text_of(pairs) == GOOD
    summary = (
        "kept 40 of 40 pairs; removed 2 × byte order mark, 40 × carriage return at the line end"
    )
    assert report.repaired == {"byte order mark": 2, "carriage return at the line end": 40}
    assert sorted(report.summary()) == sorted(summary)


def test_defective_lines_are_dropped_with_their_numbers(tmp_path):
    sources, targets = lines_of(0), lines_of(1)
    targets[6] = "schön\n".encode("latin1")
    sources[8] = b"a NUL \0 character\n"
    pairs, report = load_pairs(parallel(tmp_path, sources, targets))
    assert text_of(pairs) == [pair for number, pair in enumerate(GOOD) if number not in (6, 8)]
    assert report.first_lines == {"target is not UTF-8": [7], "NUL character in the source": [9]}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_tables_drop_defective_rows_and_keep_the_others(tmp_path, suffix):
    rows = [*GOOD, ("bad byte \udcf6", "x"), ("NUL \0", "x")]
    if suffix == "jsonl":
        lines = [json.dumps({"source": a, "target": b}, ensure_ascii=False) for a, b in rows]
        lines[-1] = lines[-1].replace("\\u0000", "\0")
    else:
        separator = "," if suffix == "csv" else "\t"
        lines = [separator.join(row) for row in [("source", "target"), *rows]]
        lines.insert(3, separator.join(["one", "cell", "too", "many"]))
    path = tmp_path / f"x.{suffix}"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
    pairs, report = load_pairs(path)
    assert text_of(pairs) == GOOD
    last = len(lines)
    expected = {"source is not UTF-8": [last - 1], "NUL character in the source": [last]}
    assert report.first_lines == expected | (
        {} if suffix == "jsonl" else {"more cells than the header": [4]}
    )


def test_tsv_cell_may_contain_a_carriage_return(tmp_path):
    (tmp_path / "x.tsv").write_bytes(b"source\ttarget\none\rcell\teine Zelle\n")
    assert text_of(load_pairs(tmp_path / "x.tsv")[0]) == [("one\rcell", "eine Zelle")]


def test_csv_record_that_is_malformed_is_counted(tmp_path):
    (tmp_path / "x.csv").write_bytes(b'source,target\na,b\none\rcell,c\n"d" d,e\nf,g\n')
    pairs, report = load_pairs(tmp_path / "x.csv")
    assert text_of(pairs) == [("a", "b"), ("f", "g")]
    assert [
        lines for reason, lines in report.first_lines.items() if reason.startswith("malformed CSV")
    ] == [[3], [4]]


def test_json_integer_of_5000_digits_is_dropped(tmp_path):
    lines = [
        '{"source": "a", "target": "b", "id": ' + "7" * 5000 + "}",
        '{"source": "c", "target": ' + "7" * 5000 + "}",
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pairs, report = load_pairs(tmp_path / "x.jsonl")
    assert text_of(pairs) == [("a", "b")] and report.dropped == {"target is not text": 1}


def test_json_nested_too_deeply_is_one_line(tmp_path):
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "x.jsonl").write_text(
        f'{{"source": "a", "target": "b"}}\n{{"source": {deep}}}\n', encoding="utf-8"
    )
    assert "x.jsonl, line 2" in error_of(load_pairs, tmp_path / "x.jsonl")


def parquet_bytes(**options):
    buffer = io.BytesIO()
    source, target = map(list, zip(*GOOD, strict=True))
    parquet.write_table(pa.table({"source": source, "target": target}), buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_damaged_parquet_is_one_line(tmp_path, compression):
    whole, dice, refused = (
        parquet_bytes(compression=compression, write_page_checksum=True),
        random.Random(1),
        0,
    )
    for trial in range(60):
        content = bytearray(whole)
        content[dice.randrange(4, len(whole) // 2)] ^= dice.randrange(
            1, 256
        )  # the pages, not the schema at the end
        path = tmp_path / f"{trial}.parquet"
        path.write_bytes(content)
        try:
            load_pairs(path)
        except UserError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            refused += 1
    assert refused >= 50  # some bytes of a page's header mean nothing


def test_parquet_text_that_is_not_utf8_is_dropped(tmp_path):
    source = pa.array([text.encode() for text, _ in GOOD] + [b"sch\xf6n"]).view(pa.string())
    parquet.write_table(pa.table({"source": source, "target": ["x"] * 41}), tmp_path / "x.parquet")
    pairs, report = load_pairs(tmp_path / "x.parquet")
    assert len(pairs) == 40 and report.first_lines == {"not UTF-8": [41]}


@pytest.mark.parametrize(("copies", "rows"), [(1, "8 of 40"), (75, "200 of 1,000")])
def test_mostly_latin1_file_is_refused_before_training(tmp_path, copies, rows):
    targets = [
        "schön\n".encode("latin1") if number % 5 == 0 else line
        for number, line in enumerate(lines_of(1) * copies)
    ]
    with pytest.raises(UserError, match=f"{rows}.*UTF-8.*iconv -f latin1"):
        load_pairs(parallel(tmp_path, lines_of(0) * copies, targets))


def test_home_directory_in_paths_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    parallel(tmp_path, lines_of(0), lines_of(1))
    assert text_of(load_pairs(["~/x.en", "~/x.de"])[0]) == GOOD
    assert text_of(load_pairs("~/x", source_lang="en", target_lang="de")[0]) == GOOD
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *GOOD])
    assert text_of(load_pairs("~/train.csv")[0]) == GOOD
    assert text_of(load_pairs("~/")[0]) == GOOD


def test_cache_files_can_be_read_by_other_users(tmp_path):
    before = os.umask(0o022)
    try:
        pairs, _ = load_pairs(parallel(tmp_path, lines_of(0), lines_of(1)[::-1]))
    finally:
        os.umask(before)
    assert [os.stat(file["filename"]).st_mode & 0o777 for file in pairs.cache_files] == [0o644]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    names = [".0123abcd.table.arrow", "tmpx1y2z3"]
    for age, seconds in (("old", 7200), ("new", 60)):
        for name in names:
            path = cache_file(f"{name}.{age}")
            path.write_bytes(b"half a table")
            os.utime(path, (time.time() - seconds,) * 2)
    load_pairs(parallel(tmp_path, lines_of(0)[::-1], lines_of(1)))
    left = {name for name in os.listdir(cache_file("")) if name.startswith(tuple(names))}
    assert left == {f"{name}.new" for name in names}
    for name in left:
        cache_file(name).unlink()


def test_line_ends_of_a_csv_are_no_defect(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"source,target\r\none,eins\r\n\xef\xbb\xbftwo,zwei\r\n")
    repairs = {}
    assert [row for _, row in read_rows(file, repairs)] == [
        {"source": a, "target": b} for a, b in (("one", "eins"), ("two", "zwei"))
    ]
    assert repairs == {"byte order mark": 1}


@pytest.mark.parametrize("ends", ["\r", "\r\n", "\n"])
def test_carriage_returns_in_the_place_of_line_ends_are_refused(tmp_path, ends):
    file = tmp_path / "a.txt"
    file.write_bytes(ends.join(["one", "two", "three", ""]).encode())
    if ends == "\r":
        with pytest.raises(UserError, match=r"a\.txt is one line with 2 carriage returns.*tr "):
            list(repaired_lines(file, {}))
    else:
        assert list(repaired_lines(file, {})) == ["one", "two", "three"]


def test_quoted_cells_of_a_tsv_are_text_with_a_warning(tmp_path, caplog):
    file = tmp_path / "a.tsv"
    file.write_text(
        'source\ttarget\n"one, two"\t"eins ""zwei"""\n"a"\tb\n"c"\td\n', encoding="utf-8"
    )
    rows = [row for _, row in read_rows(file, {})]
    assert rows[0] == {"source": '"one, two"', "target": '"eins ""zwei"""'}
    (message,) = caplog.messages
    assert "3 of 4 lines" in message and ".csv" in message
    caplog.clear()
    file.write_text('source\ttarget\n"one\ttwo"\nsay "a"\tb\n"a" and "b"\tc\n', encoding="utf-8")
    assert len(list(read_rows(file, {}))) == 3 and not caplog.messages


def test_reason_of_an_unreadable_row_is_no_text(tmp_path):
    """A reader that forgets to check for it cannot train on the reason."""
    file = tmp_path / "a.tsv"
    file.write_text("source\ttarget\na\tb\tc\n", encoding="utf-8")
    ((_, row),) = read_rows(file, {})
    assert row == BadRow("more cells than the header") and not isinstance(row, str)
    assert defect("source", row) == "more cells than the header"


def test_header_of_a_concatenated_table_is_no_pair(tmp_path):
    for name, separator in (("a.tsv", "\t"), ("a.csv", ",")):
        (tmp_path / name).write_text(
            "\n".join(separator.join(row) for row in [("source", "target"), ("a", "b")] * 2),
            encoding="utf-8",
        )
        pairs, report = load_pairs(tmp_path / name)
        assert text_of(pairs) == [("a", "b")] * 2
        assert report.first_lines == {"the header again": [3]}


def test_side_without_a_visible_character_is_empty(tmp_path):
    sources, targets = lines_of(0), lines_of(1)
    for number, blank in enumerate(("\u200b", "\ufeff\u200e", "\u3000\u00ad", "\u2060 \u200f")):
        sources[number] = f"{blank}\n".encode()
    sources[5] = "\u200eשלום\u200f\n".encode()
    pairs, report = load_pairs(parallel(tmp_path, sources, targets))
    assert report.first_lines == {"empty source": [1, 2, 3, 4]}
    assert "\u200eשלום\u200f" in pairs["source"]


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_rows_without_the_code_of_their_language_are_counted(tmp_path, suffix):
    """Ragged rows and rows of JSON lack cells. They belong to no direction."""
    rows = [
        {"source": "a", "target": "b"},
        {"source": "c", "target": "d", "source_lang": "EN", "target_lang": "de"},
        {"source": "e", "target": "f", "source_lang": "en", "target_lang": "fr"},
        {"source": "g", "target": "h", "source_lang": "en", "target_lang": ""},
    ]
    lines = [json.dumps(row) for row in [rows[1], *rows]]
    if suffix == "tsv":
        names = ("source", "target", "source_lang", "target_lang")
        lines = ["\t".join(names), *("\t".join(row.values()) for row in rows)]
    (tmp_path / f"x.{suffix}").write_text("\n".join(lines), encoding="utf-8")
    pairs, report = load_pairs(tmp_path / f"x.{suffix}", source_lang="en", target_lang="de")
    assert set(text_of(pairs)) == {("c", "d")}
    assert report.first_lines == {"missing source_lang": [2], "missing target_lang": [5]}


def test_delimiter_is_looked_for_outside_quotation_marks(tmp_path):
    (tmp_path / "x.csv").write_text('"source, text";target\n"a;b";c\n', encoding="utf-8")
    assert text_of(load_pairs(tmp_path / "x.csv", source_column="source, text")[0]) == [
        ("a;b", "c")
    ]


def test_suffixes_may_be_in_capitals(tmp_path):
    (tmp_path / "X.TSV.GZ").write_bytes(gzip.compress(b"source\ttarget\na\tb\n"))
    assert text_of(load_pairs(tmp_path / "X.TSV.GZ")[0]) == [("a", "b")]


def test_delimiter_is_the_most_frequent_one_of_the_header(tmp_path):
    (tmp_path / "x.csv").write_text("source;target;notes, if any\na,b;c;d\n", encoding="utf-8")
    assert text_of(load_pairs(tmp_path / "x.csv")[0]) == [("a,b", "c")]


@pytest.mark.parametrize(("suffix", "sign"), [("csv", ","), ("tsv", "\t")])
def test_columns_without_a_name_are_kept_apart(tmp_path, suffix, sign):
    rows = [["", "source", "target", ""], ["7", "a", "b", "x"]]
    (tmp_path / f"x.{suffix}").write_text("\n".join(map(sign.join, rows)), encoding="utf-8")
    ((_, row),) = read_rows(tmp_path / f"x.{suffix}", {})
    assert list(row.values()) == ["7", "a", "b", "x"]


def test_columns_that_nobody_uses_are_not_read(tmp_path):
    path = tmp_path / "x.parquet"
    sources, targets = map(list, zip(*GOOD, strict=True))
    table = {
        "source": sources,
        "target": targets,
        "source_lang": ["en"] * 40,
        "target_lang": ["de"] * 40,
    }
    table["embedding"] = [[number / 7] * 50 for number in range(40)]
    parquet.write_table(pa.table(table), path, write_page_checksum=True, use_dictionary=False)
    chunk = parquet.ParquetFile(path).metadata.row_group(0).column(4)
    assert chunk.path_in_schema.startswith("embedding")
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= (
        255  # reading the column would fail
    )
    path.write_bytes(content)
    for languages in ({}, {"source_lang": "en"}, {"source_lang": "en", "target_lang": "de"}):
        assert load_pairs(path, **languages)[0]["source"][:] == sources
    assert list(read_sentences(path, "target")) == targets
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(read_sides(path, Columns(), {}))
