"""Sentences from tables and translation memories: what commands read is what training reads."""

import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.columns import Columns
from hf_vanilla_transformer.inference.sentences import (
    codes_in,
    labels_in,
    read_directed_sentences,
    read_sentence_pairs,
    read_sentences,
    stream_sentence_pairs,
)
from hf_vanilla_transformer.inference.text_io import input_lines
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.system_info import counted
from tests.model_helpers import error_of
from tests.pair_files import PAIRS, write_pairs

SOURCES = [source for source, _ in PAIRS]
TARGETS = [target for _, target in PAIRS]
FORMATS = [
    "x.csv",
    "x.CSV",
    "x.csv.gz",
    "x.tsv",
    "x.jsonl",
    "x.json",
    "x.parquet",
    "x.tmx",
    "x.tmx.gz",
    "x.xlf",
]


@pytest.mark.parametrize("name", FORMATS)
def test_commands_read_the_sentences_that_training_reads(tmp_path, name):
    path = write_pairs(tmp_path, name)
    pairs, _ = load_pairs(path)
    assert list(zip(pairs["source"][:], pairs["target"][:], strict=True)) == PAIRS
    assert list(read_sentences(path)) == SOURCES
    assert list(read_sentences(path, "target")) == TARGETS
    assert read_sentence_pairs(path, path)[:2] == (SOURCES, TARGETS)
    text = tmp_path / "x.txt"
    text.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    assert read_sentence_pairs(text, path) == (SOURCES, TARGETS, [{}] * len(SOURCES))


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
@pytest.mark.parametrize(
    "columns",
    [
        Columns("en", "de"),
        Columns(source_lang="en", target_lang="de"),
        Columns(languages=("en", "de")),
        Columns("en", languages=("fr", "de")),
    ],
)
def test_columns_are_named_or_those_of_the_languages(tmp_path, name, columns):
    path = write_pairs(tmp_path, name, "en", "de")
    assert read_sentence_pairs(path, path, columns)[:2] == (SOURCES, TARGETS)
    with pytest.raises(UserError, match="'number', 'en', 'de'.*source_column"):
        list(read_sentences(path))


def test_incomplete_rows_are_dropped_from_pairs_and_refused_alone(tmp_path, caplog):
    path = tmp_path / "x.csv"
    path.write_text('source,target\na,b\n"c\nd",e\nf\n,g\n')
    same = tmp_path / "x" / ".." / "x.csv"
    assert read_sentence_pairs(path, same) == (["a", "c d"], ["b", "e"], [{}, {}])
    assert "kept 2 of 4 pairs" in caplog.text
    assert "missing target" in caplog.text
    assert list(read_sentences(path)) == ["a", "c d", "f", ""]
    assert "line 5" in error_of(lambda: list(read_sentences(path, "target")))


def test_pairs_are_read_as_they_are_needed(tmp_path):
    paths = tmp_path / "x.en", tmp_path / "x.de"
    lines = "".join(f"{number}\n" for number in range(100_000))
    for path in paths:
        path.write_bytes(lines.encode() + b"\xff")
    pairs = stream_sentence_pairs(*paths)
    for number in ("0", "1", "2"):
        assert next(pairs)[:2] == (number, number)
    with pytest.raises(UserError, match="line 100001"):
        list(pairs)


@pytest.mark.parametrize("lines", [(5, 3), (3, 5)])
def test_texts_of_other_lengths_are_refused(tmp_path, lines):
    paths = tmp_path / "x.en", tmp_path / "x.de"
    for path, count in zip(paths, lines, strict=True):
        path.write_text("a\n" * count)
    with pytest.raises(
        UserError, match=f"x.en has {lines[0]} lines, .*x.de has {lines[1]}: each needs its other"
    ):
        read_sentence_pairs(*paths)


def test_languages_and_labels_are_those_of_the_rows_that_are_read(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text(
        "source\ttarget\tsource_lang\ttarget_lang\tkind\n"
        "a\tb\ten\tde\t1\n"
        "c\td\tde\tfr\t2\n"
        "e\t\ten\tfr\t3\n"
        "g\th\ten\tfr\t4\n"
    )
    columns = Columns(target_lang="fr")
    sentences, codes = read_directed_sentences(path, columns)
    rows = list(zip(sentences, codes["source_lang"], codes["target_lang"], strict=True))
    assert rows == [("c", "de", "fr"), ("e", "en", "fr"), ("g", "en", "fr")]
    sources, targets, cells = read_sentence_pairs(path, path, columns)
    assert sources == ["c", "g"]
    assert targets == ["d", "h"]
    assert labels_in(cells, "kind", path) == ["2", "4"]
    assert codes_in(cells) == {"source_lang": ["de", "en"], "target_lang": ["fr", "fr"]}
    assert "'kind'" in error_of(labels_in, cells, "sort", path)


def test_text_has_no_languages_and_labels(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a\n")
    sentences, codes = read_directed_sentences(path)
    assert list(sentences) == ["a"]
    assert codes == {}
    assert "'sort'" in error_of(labels_in, [{}], "sort", path)


@pytest.mark.parametrize(
    "suffix",
    ["html", "srt", "docx", "xlsx", "xml", "sgm", "pdf", "po", "zip", "tmx", "csv", "json"],
)
def test_other_formats_are_refused_by_name(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\na\n")  # `srt` is a language, too
    text = tmp_path / "x.txt"
    text.write_text("a\n")
    assert f"x.{suffix}" in error_of(lambda: list(input_lines(path)))
    if suffix not in ("tmx", "csv", "json"):
        for names in ([path, text], [text, path]):
            assert f"x.{suffix}" in error_of(load_pairs, names)


# Blank lines

NUMBERED = Columns("1", "2")
PATTERN = Columns(line_pattern="(?P<source>.*) = (?P<target>.*)")


@pytest.mark.parametrize(
    ("name", "text", "columns", "expected"),
    [
        ("x.tsv", "\none\teins\n\n\ntwo\tzwei\n\n", NUMBERED, ["", "one", "", "", "two", ""]),
        ("x.txt", "one\teins\n\ntwo\tzwei\r\n\r\n", NUMBERED, ["one", "", "two", ""]),
        ("x.csv", '"one",eins\n\ntwo,zwei\n', NUMBERED, ["one", "", "two"]),
        ("x.txt", "\none = eins\n\ntwo = zwei\n", PATTERN, ["", "one", "", "two"]),
        ("x.tsv", "\nsource\ttarget\n\none\teins\n\ntwo\tzwei\n", None, ["", "one", "", "two"]),
        ("x.csv", "source,target\none,eins\n\ntwo,zwei\n", None, ["one", "", "two"]),
        (
            "x.jsonl",
            '\n{"source": "one", "target": "eins"}\n \n{"source": "two", "target": "zwei"}\n',
            None,
            ["", "one", "", "two"],
        ),
        (
            "x.json",
            '\n[{"source": "one", "target": "eins"},\n\n{"source": "two", "target": "zwei"}]\n',
            None,
            ["one", "two"],
        ),
    ],
)
def test_blank_line_stays_empty_and_is_no_pair(tmp_path, caplog, name, text, columns, expected):
    path = tmp_path / name
    path.write_text(text)
    assert list(read_sentences(path, columns=columns)) == expected
    targets = [{"one": "eins", "two": "zwei", "": ""}[text] for text in expected]
    assert list(read_sentences(path, "target", columns)) == targets
    fields = (
        {}
        if columns is None
        else {name: value for name, value in vars(columns).items() if value is not None}
    )
    pairs, report = load_pairs(path, **fields)
    assert pairs["source"][:] == ["one", "two"] and report.seen == 2
    assert read_sentence_pairs(path, path, columns)[:2] == (["one", "two"], ["eins", "zwei"])
    blank = expected.count("")
    lines = [f"{path}: {counted(blank, 'blank line')} left out, as in training"] if blank else []
    assert caplog.messages == lines


def test_blank_line_has_the_languages_of_no_row(tmp_path):
    path = tmp_path / "x.jsonl"
    row = '{"source": "one", "target": "eins", "source_lang": "en", "target_lang": "de"}'
    path.write_text(f"\n{row}\n\n")
    texts, codes = read_directed_sentences(path)
    assert list(zip(texts, codes["source_lang"], codes["target_lang"], strict=True)) == [
        ("", None, None),
        ("one", "en", "de"),
        ("", None, None),
    ]
    cells = [{}, {"kind": "a", "target_lang": "de"}, {}]
    assert codes_in(cells) == {"target_lang": [None, "de", None]}
    assert labels_in(cells, "kind", path) == ["", "a", ""]
