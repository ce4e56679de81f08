"""Public collections as they are published: columns by number, several columns, patterns of lines."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.columns import Columns
from hf_vanilla_transformer.inference.sentences import (
    labels_in,
    read_sentence_pairs,
    read_sentences,
)
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

BY_NUMBER = {"source_column": "1", "target_column": "2"}
SCAN = r"IN: (?P<source>.*) OUT: (?P<target>.*)"
REACTION = r"[^,]*,(?P<class>\d+),(?P<target>[^,>]*)>>(?P<source>[^,>]*)"

#: file, its content, the arguments, and the pairs. In the order of sigmorphon/2020, conll2017, 2023InflectionST,
#: histnorm, COGS, SCAN, CMUdict 0.7b and its repository, and USPTO-50k.
COLLECTIONS = [
    (
        "fre_train.tsv",
        'abandonner\ta b ɑ̃ d ɔ n e\nd"\td e\nabby\ta b i\n',
        BY_NUMBER,
        [("abandonner", "a b ɑ̃ d ɔ n e"), ('d"', "d e"), ("abby", "a b i")],
    ),
    (
        "german-train-high",
        "Abfalleimer\tAbfalleimer\tN;NOM;PL\nsich ausruhen\truhte mich aus\tV;IND;PST;1;SG\n",
        {"source_column": "{1}{3:;}", "target_column": "2"},
        [
            ("Abfalleimer[N][NOM][PL]", "Abfalleimer"),
            ("sich ausruhen[V][IND][PST][1][SG]", "ruhte mich aus"),
        ],
    ),
    (
        "deu.trn",
        "Aa machen\tV.PTCP;PRS\tAa machend\nAikido\tN;ACC(SG)\tAikido\n",
        {"source_column": "{2:;}{1}", "target_column": "3"},
        [("[V.PTCP][PRS]Aa machen", "Aa machend"), ("[N][ACC(SG)]Aikido", "Aikido")],
    ),
    (
        "deu.dev",  # analysis: the target has several columns
        "Aikido\tN;ACC(SG)\tAikidos\n",
        {"source_column": "3", "target_column": "{1} {2:;}"},
        [("Aikidos", "Aikido [N][ACC(SG)]")],
    ),
    (
        "german-anselm.train.txt",
        "yn\tihn\nůge\tsähe\n",
        BY_NUMBER,
        [("yn", "ihn"), ("ůge", "sähe")],
    ),
    (
        "gen.tsv",
        "A rose was helped by Emma .\trose ( x _ 1 ) AND help . agent ( x _ 3 , Emma )\tsubj_to_obj\n",
        BY_NUMBER,
        [("A rose was helped by Emma .", "rose ( x _ 1 ) AND help . agent ( x _ 3 , Emma )")],
    ),
    (
        "tasks_train_simple.txt",
        "IN: jump opposite left OUT: I_TURN_LEFT I_TURN_LEFT I_JUMP\nIN: run OUT: I_RUN\n",
        {"line_pattern": SCAN},
        [("jump opposite left", "I_TURN_LEFT I_TURN_LEFT I_JUMP"), ("run", "I_RUN")],
    ),
    (
        "cmudict-0.7b",
        ";;; # CMUdict\n!EXCLAMATION  EH2 K S\n'BOUT  B AW1 T\nA(1)  EY1\n#HASH  HH AE1 SH\n;SEMI-COLON  S EH1\n",
        {"line_pattern": "cmudict"},
        [
            ("!EXCLAMATION", "EH2 K S"),
            ("'BOUT", "B AW1 T"),
            ("A", "EY1"),
            ("#HASH", "HH AE1 SH"),
            (";SEMI-COLON", "S EH1"),
        ],
    ),
    (
        "cmudict.dict",
        "aalborg AO1 L B AO0 R G # place, danish\naalborg(2) AA1 L B AO0 R G\n(paren P ER0 EH1 N\n",
        {"line_pattern": "cmudict"},
        [("aalborg", "AO1 L B AO0 R G"), ("aalborg", "AA1 L B AO0 R G"), ("(paren", "P ER0 EH1 N")],
    ),
    (
        "raw_train.csv",
        "id,class,reactants>reagents>production\nUS08163899B2,1,CC(=O)Cl.[NH2:1]C>>CC(=O)[NH:1]C\n",
        {"line_pattern": REACTION},
        [("CC(=O)[NH:1]C", "CC(=O)Cl.[NH2:1]C")],
    ),
    (
        "reactions.smi",
        "CCO\tethanol\nC[Na]\tmethylsodium\n",
        BY_NUMBER,
        [("CCO", "ethanol"), ("C[Na]", "methylsodium")],
    ),
]


@pytest.mark.parametrize(("name", "content", "columns", "expected"), COLLECTIONS)
def test_collection_is_read_as_it_is_published(tmp_path, name, content, columns, expected):
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    pairs, report = load_pairs(file, **columns)
    assert list(zip(pairs["source"], pairs["target"], strict=True)) == expected
    lines = content.count("\n")
    assert report.seen == lines and sum(report.dropped.values()) == lines - len(expected)
    # what predict and evaluate read
    sources, targets, cells = read_sentence_pairs(file, file, Columns(**columns))
    assert (sources, targets, len(cells)) == (
        *map(list, zip(*expected, strict=True)),
        len(expected),
    )


def test_two_files_of_pcfg_need_no_columns(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("train.src", "train.tgt")]
    for file, text in zip(files, ("repeat append A B , C\n", "A B C A B C\n"), strict=True):
        file.write_text(text)
    pairs, _ = load_pairs(files)
    assert (pairs["source"][0], pairs["target"][0]) == ("repeat append A B , C", "A B C A B C")


@pytest.mark.parametrize("name", ["x.tsv", "x.tst"])
def test_lines_that_have_no_pair_are_counted_by_their_number(tmp_path, name):
    file = tmp_path / name
    file.write_text("a\tb\tV;[X]\nc\n d\te\tV\n\tf\tV\ng\th\tV\ti\n")
    pairs, report = load_pairs(file, source_column="{1}{3:;}", target_column="2")
    assert pairs["source"][:] == [" d[V]"]
    assert report.first_lines == {
        "bracket in the tags of column 3": [1],
        "missing source": [2],
        "empty source": [4],
        "more cells than the first line": [5],
    }
    read = read_sentences(file, "target", Columns(**BY_NUMBER))
    assert next(read) == "b" and "line 2: missing target" in error_of(next, read)


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (
            {"source_column": "1", "target_column": "4"},
            ["'4'", "target_column", "row is 'Hund', 'Hunde', 'N;PL'"],
        ),
        ({"source_column": "{5:;}{1}", "target_column": "2"}, ["'5'", "'Hunde'"]),
        ({"source_column": "0", "target_column": "1"}, ["0", "from 1"]),
        ({"source_column": "1", "target_column": "form"}, ["1, form", "without a header"]),
        ({"source_column": "{1}{3", "target_column": "2"}, ["source_column: {1}{3", "{3:;}{1}"]),
        ({"line_pattern": "(?P<source>.*"}, ["line_pattern", "unterminated"]),
        ({"line_pattern": ".*"}, ["line_pattern", "(?P<source>.*)"]),
        ({"line_pattern": r"(?P<source>\S+)\t.*"}, ["'source'", "target_column"]),
        ({"line_pattern": SCAN}, ["no usable pair", "no match of line_pattern (lines 1, 2)"]),
        ({}, ["lines have tabs", "source_column=1"]),
    ],
)
def test_wrong_columns_are_refused_by_name(tmp_path, columns, parts):
    file = tmp_path / "german.trn"
    file.write_text("Hund\tHunde\tN;PL\nTag\tTage\tN;PL\n")
    message = error_of(load_pairs, file, **columns)
    assert all(part in message for part in parts) and "\n" not in message, message


def test_formats_with_names_of_columns_keep_them(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"lemma": "run", "tags": "V|PST", "form": "ran"}\n')
    pairs, _ = load_pairs(file, source_column="{tags:|}{lemma}", target_column="form")
    assert (pairs["source"][0], pairs["target"][0]) == ("[V][PST]run", "ran")
    with pytest.raises(UserError, match="line_pattern: .*jsonl"):
        load_pairs(file, line_pattern=SCAN)


def test_other_columns_group_the_scores(tmp_path: Path) -> None:
    file = tmp_path / "gen.tsv"
    file.write_text("a\tb\tcp_recursion\nc\td\tpp_recursion\n")
    _, _, cells = read_sentence_pairs(file, file, Columns(**BY_NUMBER))
    assert labels_in(cells, "3", file) == ["cp_recursion", "pp_recursion"]


def test_tags_are_whole_tokens_between_characters() -> None:
    text = "[V][NOM(1,SG)]Aa [ma"
    tokenizer = train_symbol_tokenizer([(text, 1)], "tagged")
    assert tokenizer.tokenize(text) == ["[V]", "[NOM(1,SG)]", *"Aa [ma"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_smiles_have_rings_from_100() -> None:
    text = "C%(100)CC%10C%(100)C%10"
    tokenizer = train_symbol_tokenizer([(text, 1)], "smiles")
    assert tokenizer.tokenize(text) == ["C", "%(100)", "C", "C", "%10", "C", "%(100)", "C", "%10"]
