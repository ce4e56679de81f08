"""Loading sentence pairs from every format, and errors in the input."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import zipfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.corpora.data_arguments import DataArguments
from hf_vanilla_transformer.utils.errors import UserError
from tests.damaged_files import DAMAGES, DAMAGES_OF_TABLES

# the second contains line separators of other readers; the third and fourth, the missing values of CSV readers
PAIRS = [
    ("a dog runs", "ein Hund rennt"),
    ("one\u2028line\x0bwith\x0c\x85strange\rmarks", "eine Zeile\u2029"),
    ("zero", "null"),
    ("NA", "nan"),
    (' he said "hi", twice  ', 'er sagte "hallo", 2-mal'),
    ("007", "中文 😀 cafe\u0301"),
]


def write_text(path, lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def parallel(folder, pairs=PAIRS, end="\n"):
    return [
        write_text(folder / f"x.{name}", lines, end)
        for name, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True)
    ]


def text_of(pairs):
    return [(row["source"], row["target"]) for row in pairs]


def write_as(kind, folder, pairs=PAIRS):
    """Write the pairs in a format and return the arguments of `load_pairs` that read them."""
    path = folder / f"pairs.{kind}"
    rows = [{"en": source, "de": target} for source, target in pairs]
    if kind == "jsonl":
        write_text(path, [json.dumps({"translation": row}, ensure_ascii=False) for row in rows])
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as handle:
            csv.writer(handle, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
                [("en", "de"), *pairs]
            )
    elif kind == "tsv":
        write_text(path, ["en\tde", *("\t".join(pair) for pair in pairs)])
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    return {"inputs": path, "source_lang": "en", "target_lang": "de"}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_pairs(tmp_path, kind):
    pairs, report = load_pairs(**write_as(kind, tmp_path))
    assert isinstance(pairs, Dataset)
    assert text_of(pairs) == PAIRS
    assert report.summary() == f"kept {len(PAIRS)} of {len(PAIRS)} pairs"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv"])
def test_gzip_is_recognised_by_its_content(tmp_path, kind):
    arguments = write_as(kind, tmp_path, PAIRS[2:])
    arguments["inputs"] = arguments["inputs"].rename(tmp_path / f"zipped.{kind}.gz")
    arguments["inputs"].write_bytes(gzip.compress(arguments["inputs"].read_bytes(), mtime=0))
    assert text_of(load_pairs(**arguments)[0]) == PAIRS[2:]


def test_only_a_newline_ends_a_line_of_text(tmp_path):
    pairs, _ = load_pairs(parallel(tmp_path))
    assert text_of(pairs) == PAIRS
    assert pairs["line"][:] == [1, 2, 3, 4, 5, 6]
    assert sorted(pairs.column_names) == ["line", "source", "target"]


def test_windows_line_ends_byte_order_mark_and_gzip(tmp_path):
    files = parallel(tmp_path, PAIRS, end="\r\n")
    files[0].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes())
    files[1].write_bytes(gzip.compress(files[1].read_bytes(), mtime=0))
    assert text_of(load_pairs(files)[0]) == PAIRS


def test_last_line_may_lack_its_newline(tmp_path):
    files = parallel(tmp_path)
    files[0].write_bytes(files[0].read_bytes().removesuffix(b"\n"))
    assert text_of(load_pairs(files)[0]) == PAIRS


def test_fingerprint_depends_on_the_text_and_its_order(tmp_path):
    reports = [load_pairs(**write_as(kind, tmp_path))[1] for kind in ("jsonl", "csv", "parquet")]
    reports.append(load_pairs(parallel(tmp_path))[1])
    assert len({report.fingerprint for report in reports}) == 1
    moved = [("a", "bc"), ("ab", "c"), ("d", "e")]
    fingerprints = set()
    for order in ([0, 1, 2], [1, 0, 2], [0, 2], [1, 2]):
        fingerprints.add(load_pairs(parallel(tmp_path, [moved[i] for i in order]))[1].fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".json", each) for each in DAMAGES] + [(".arrow", each) for each in DAMAGES_OF_TABLES],
)
def test_damaged_table_in_the_cache_is_made_again(
    suffix, damage, tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = parallel(tmp_path)
    first, report = load_pairs(files)
    table = Path(first.cache_files[0]["filename"])
    content = table.read_bytes()
    rows = first[:]
    del first
    DAMAGES_OF_TABLES[damage](table.with_suffix(suffix))
    again, report_again = load_pairs(files)
    assert (again[:], report_again) == (rows, report)
    assert table.read_bytes() == content
    assert caplog.messages[1:] == []
    assert [f"{table} is damaged" in each for each in caplog.messages] == [True] * (
        damage != "missing"
    )
    load_pairs(files)
    assert caplog.messages[1:] == []


def test_damaged_text_in_both_directions_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = parallel(tmp_path)
    arguments = DataArguments(train=list(map(str, files)), bidirectional=True)
    rows = load_corpus(arguments, 0, None, print).pairs["train"][:]
    assert rows["source"] == [*map(itemgetter(0), PAIRS), *map(itemgetter(1), PAIRS)]
    [doubled] = tmp_path.rglob("cache-*.arrow")
    for damage in DAMAGES_OF_TABLES.values():
        damage(doubled)
        assert load_corpus(arguments, 0, None, print).pairs["train"][:] == rows


def test_table_is_memory_mapped_and_reused_until_the_file_changes(tmp_path):
    files = parallel(tmp_path)
    first, report = load_pairs(files)
    again, report_again = load_pairs(files)
    assert first.cache_files and first.cache_files == again.cache_files
    assert first._fingerprint == again._fingerprint and report == report_again
    write_text(files[1], ["neu"] * len(PAIRS))  # same path, same number of lines
    assert load_pairs(files)[0]["target"][:] == ["neu"] * len(PAIRS)


BAD_ROWS = [
    {"source": "good", "target": "gut"},
    {"source": "no target"},
    {"source": " \t ", "target": "leer"},
    {"source": "number", "target": 7},
    {"source": None, "target": "nichts"},
    {"source": "lone surrogate \ud83d", "target": "halb"},
    {"source": "good", "target": " "},
    {"source": "fine", "target": "fein"},
]


def test_invalid_rows_are_dropped_and_reported_with_their_lines(tmp_path):
    path = write_text(tmp_path / "bad.jsonl", map(json.dumps, BAD_ROWS))
    pairs, report = load_pairs(path)
    for _ in range(2):  # a second pass of a stream resets the counts
        assert text_of(pairs) == [("good", "gut"), ("fine", "fein")]
        assert [row["line"] for row in pairs] == [1, 8]
        assert (report.seen, report.kept) == (8, 2)
    for reason, line in {
        "missing target": 2,
        "empty source": 3,
        "target is not text": 4,
        "missing source": 5,
        "source is not valid Unicode": 6,
        "empty target": 7,
    }.items():
        assert f"1 {reason} (line {line})" in report.summary()
    assert report.summary().startswith("kept 2 of 8 pairs; dropped 6: ")


@pytest.mark.parametrize("delimiter", ";\t,")
def test_delimiter_of_csv_is_that_of_its_header_with_any_case(tmp_path, delimiter):
    rows = [" Source|TARGET", '"a, b; c"|d', "e|f"]
    pairs, _ = load_pairs(
        write_text(tmp_path / "x.csv", [row.replace("|", delimiter) for row in rows])
    )
    assert (pairs["source"], pairs["target"]) == (["a, b; c", "e"], ["d", "f"])


def test_ragged_csv_rows_are_counted(tmp_path):
    path = write_text(
        tmp_path / "x.csv", ["source,target", "a,b", "a,b, c", "a", '"two\nlines",b', "c,"]
    )
    pairs, report = load_pairs(path)
    assert text_of(pairs) == [("a", "b"), ("two\nlines", "b")]
    assert pairs["line"][:] == [2, 5]
    assert report.first_lines == {
        "more cells than the header": [3],
        "missing target": [4],
        "empty target": [7],
    }


def zipped(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("x"), content)  # of no time
    return stream.getvalue()


def error_of(*inputs, **settings):
    with pytest.raises(UserError) as caught:
        for _ in load_pairs(*inputs, **settings)[0]:
            pass
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_of_different_lengths_are_an_error_with_both_counts(tmp_path):
    files = parallel(tmp_path, [("a", "b")] * 1000)
    write_text(files[1], ["b"] * 999)
    message = error_of(files)
    assert all(part in message for part in ("x.en", "1,000", "x.de", "999"))
    write_text(files[1], ["b"] * 1203)
    message = error_of(files)
    assert all(part in message for part in ("x.en", "1,000", "x.de", "1,203"))


def test_latin1_error_names_file_line_and_remedy(tmp_path):
    files = parallel(tmp_path, [("a", "b")] * 3)
    files[1].write_bytes("ja\nschön\nnein\n".encode("latin1"))
    message = error_of(files)
    assert all(part in message for part in ("x.de", "UTF-8", "line 2", "iconv -f latin1 -t utf-8"))


def test_column_of_two_spellings_is_refused(tmp_path):
    (tmp_path / "pairs.tsv").write_text("Source\tSOURCE\ttarget\na\tb\tc\n", encoding="utf-8")
    assert "'Source' and 'SOURCE': name one by source_column" in error_of(tmp_path / "pairs.tsv")
    pairs, _ = load_pairs(tmp_path / "pairs.tsv", source_column="SOURCE")
    assert pairs["source"][:] == ["b"]


def test_missing_columns_error_lists_those_that_exist(tmp_path):
    rows = write_as("csv", tmp_path)["inputs"]
    assert "'source'" in error_of(rows)
    assert "'german'" in error_of(rows, source_column="en", target_column="german")
    assert "'fr'" in error_of(rows, source_lang="en", target_lang="fr")
    assert "target" in error_of(rows, source_column="en")
    nested = write_as("jsonl", tmp_path)["inputs"]
    assert "'fr'" in error_of(nested, source_lang="en", target_lang="fr")
    assert "'translation'" in error_of(nested)
    flat = write_text(tmp_path / "flat.jsonl", ['{"translation": "a"}'])
    message = error_of(flat, source_lang="en", target_lang="de")
    assert "its 'translation' is str, not texts by language, such as that of 'en'" in message


def test_translations_can_be_a_map_of_parquet(tmp_path):
    kind = pa.map_(pa.string(), pa.string())
    rows = [[("en", source), ("de", target)] for source, target in PAIRS]
    table = pa.table({"translation": pa.array([*rows, [("en", "x")]], kind), "id": [1] * 7})
    parquet.write_table(table, tmp_path / "x.parquet")
    languages = {"source_lang": "en", "target_lang": "de"}
    pairs, report = load_pairs(tmp_path / "x.parquet", **languages)
    assert text_of(pairs) == PAIRS
    assert report.dropped == {"missing target": 1}
    message = error_of(tmp_path / "x.parquet", source_lang="en", target_lang="fr")
    assert "has the languages 'en', 'de', not 'fr'" in message


@pytest.mark.parametrize("name", ["x.en", "x.tsv", "x.csv", "x.jsonl"])
@pytest.mark.parametrize(
    ("compress", "program"),
    [(bz2.compress, "bzip2 -d"), (lzma.compress, "xz -d"), (zipped, "unzip")],
)
def test_compressed_content_is_named(tmp_path, name, compress, program):
    """Whatever the suffix, which is that of the program or of the text."""
    files = [tmp_path / name]
    if name == "x.en":
        files.append(write_text(tmp_path / "x.de", ["eins", "zwei"]))
    files[0].write_bytes(compress(b"source\ttarget\none\teins\n" * 9))
    expected = f"is compressed: decompress it with {program}"
    assert error_of(files) == f"{files[0]} {expected}"
    suffix = {"bzip2 -d": ".bz2", "xz -d": ".xz", "unzip": ".zip"}[program]
    files[0] = files[0].rename(tmp_path / f"{name}{suffix}")
    assert error_of(files) == f"{files[0]} {expected}"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        (
            "x.jsonl",
            b'{"source": "a", "target": "b"}\n{"source": oops}\n',
            ["x.jsonl, line 2, column 12"],
        ),
        ("x.jsonl", b'{"source": "a", "target": "b"}\n["a", "b"]\n', ["x.jsonl", "line 2", "list"]),
        ("x.json", b'[{"source": "a", "target": "b"}, 3]', ["element 2", "number"]),
        ("x.parquet", b"PAR1 no, not really", ["x.parquet"]),
        ("x.csv.gz", gzip.compress(b"source,target\na,b\n" * 99, mtime=0)[:-9], ["x.csv.gz"]),
        ("x.csv", b"source,target\n", ["x.csv", "0 of 0"]),
        ("x.csv", b"source,target\na,\n", ["x.csv", "empty target (line 2)"]),
        ("x.csv", b'source,target\na,"b\n', ["x.csv, line 2"]),
    ],
)
def test_damaged_files_are_one_line_errors(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    assert all(part in message for part in parts), message


def test_dataset_of_save_to_disk_with_splits(tmp_path):
    data = Dataset.from_list([{"en": source, "de": target, "id": 1} for source, target in PAIRS])
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "saved"))
    arguments: dict[str, Any] = {
        "inputs": str(tmp_path / "saved"),
        "source_lang": "en",
        "target_lang": "de",
    }
    assert text_of(load_pairs(**arguments)[0]) == PAIRS
    assert text_of(load_pairs(**arguments, split="test")[0]) == PAIRS[:1]
    assert "'dev'" in error_of(**arguments, split="dev")
    assert "'fr'" in error_of(**{**arguments, "target_lang": "fr"})


def test_dataset_of_a_folder_of_data_files(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_as("jsonl", folder)["inputs"].rename(folder / "train.jsonl")
    arguments: dict[str, Any] = {
        "inputs": str(folder),
        "source_lang": "de",
        "target_lang": "en",
    }
    assert text_of(load_pairs(**arguments)[0]) == [(target, source) for source, target in PAIRS]
    assert "'test'" in error_of(**arguments, split="test")


ODD_CELLS = [
    ('zero "', '"null'),
    ("two", "zwei"),
    ("null", "n/a"),
    ("007", "k.A."),
    ("1e3", "2020-01-01"),
]


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_cells_of_a_folder_are_those_that_were_written(tmp_path, kind):
    """pandas and pyarrow read quotation marks, numbers, dates and missing values into them."""
    write_as(kind, tmp_path, ODD_CELLS)["inputs"].rename(tmp_path / f"train-00000-of-00002.{kind}")
    write_as(kind, tmp_path, PAIRS)["inputs"].rename(tmp_path / f"train-00001-of-00002.{kind}")
    arguments: dict[str, Any] = {
        "inputs": str(tmp_path),
        "source_lang": "en",
        "target_lang": "de",
    }
    data, report = load_pairs(**arguments)
    assert text_of(data) == [*ODD_CELLS, *PAIRS]
    assert sorted(set(data["line"])) == data["line"][:]
    assert report.name == str(tmp_path)


def test_changed_file_of_a_folder_is_read_again(tmp_path):
    """`datasets` keeps the rows of a file of the same size and time."""
    file = tmp_path / "train.tsv"
    for text in "ab":
        file.write_text(f"source\ttarget\n{text}\tb\n")
        os.utime(file, (1, 1))
        assert text_of(load_pairs(str(tmp_path))[0]) == [(text, "b")]


@pytest.mark.parametrize("name", ["train.csv.xz", "train.ndjson"])
def test_data_files_of_a_folder_in_other_formats_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert error_of(str(tmp_path), field="train").startswith(f"train: {tmp_path} has data files of")


def test_line_that_moves_to_the_other_file_is_seen(tmp_path):
    """Both files together have the same bytes as before."""
    files = write_text(tmp_path / "one", "ab"), write_text(tmp_path / "two", "xy")
    assert text_of(load_pairs(files)[0]) == [("a", "x"), ("b", "y")]
    write_text(files[0], "a")
    write_text(files[1], "bxy")
    assert "has 1 lines" in error_of(files)


def test_missing_dataset_is_refused(tmp_path):
    assert error_of("nobody/nothing", field="test").startswith("test: nobody/nothing: ")


def test_multi30k_loads_completely(shared_data):
    files = {side: shared_data / f"train.lc.norm.tok.{side}.gz" for side in ("en", "de")}
    pairs, report = load_pairs(list(files.values()))
    with gzip.open(files["de"], "rb") as handle:
        assert [text.encode() for text in pairs["target"][:]] == handle.read().split(b"\n")[:-1]
    assert report.summary() == "kept 29,000 of 29,000 pairs"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.csv", "source,target,target\na,b,c\n"),
        ("pairs.tsv", "source\ttarget\tsource\na\tb\tc\n"),
        ("pairs.jsonl", '{"source": "a", "target": "b", "target": "c"}\n'),
        ("pairs.jsonl", '{"translation": {"source": "a", "target": "b", "source": "c"}}\n'),
    ],
)
def test_repeated_column_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="'(source|target)'"):
        load_pairs(tmp_path / name)
