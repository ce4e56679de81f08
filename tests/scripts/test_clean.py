"""`vanilla-transformer clean`: which pairs are written where."""

import os
from functools import partial

import datasets
import pytest

from hf_vanilla_transformer.cleaning import duplicates, judging
from hf_vanilla_transformer.cleaning.rules import RULES
from hf_vanilla_transformer.utils.process_pool import in_order
from tests.cleaning.test_cleaning import DAMAGE, GOOD
from tests.killed_runs import check_kills
from vanilla_transformer_cli.main import main


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_kept_and_dropped_pairs_are_written(command, tmp_path, in_tmp_path):
    pairs = [
        *GOOD[:50],
        DAMAGE["copy"](*GOOD[60]),
        GOOD[3],
        DAMAGE["numbers"](*GOOD[61]),
        ("", "leer"),
        GOOD[62],
    ]
    for name, side in (("train.en", 0), ("train.de", 1)):
        write(tmp_path / name, [pair[side] for pair in pairs])
    write(tmp_path / "test.en", [GOOD[62][0]])
    write(tmp_path / "test.de", ["ein anderer Satz"])
    flags = [
        "--exclude",
        "test.en",
        "test.de",
        "--dropped",
        "dropped.tsv",
        "--report",
        "report.html",
    ]
    status, printed, errors = command(
        "clean", "train.en", "train.de", "--output", "clean.en", "clean.de", *flags
    )
    assert (status, errors) == (0, "")
    assert (tmp_path / "clean.en").read_text(encoding="utf-8").splitlines() == [
        source for source, _ in GOOD[:50]
    ]
    assert (tmp_path / "clean.de").read_text(encoding="utf-8").splitlines() == [
        target for _, target in GOOD[:50]
    ]
    dropped = [
        line.split("\t")
        for line in (tmp_path / "dropped.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert [(rule, line) for rule, line, *_ in dropped] == [
        ("copy", "51"),
        ("duplicate", "52"),
        ("numbers", "53"),
        ("empty source", "54"),
        ("overlap", "55"),
    ]
    assert "empty source" in printed and "kept 50 of 54 pairs" in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("copy", "overlap", "Seite 9002."))
    command("clean", "clean.en", "clean.de", "--output", "all.tsv", "--skip", "copy")
    lines = (tmp_path / "all.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "source\ttarget" and lines[1:] == ["\t".join(pair) for pair in GOOD[:50]]


def test_table_of_many_languages_keeps_its_columns(command, tmp_path, in_tmp_path):
    rows = [["en", "de", str(number), *GOOD[number]] for number in range(40)]
    rows += [
        ["en", "zh", str(number), GOOD[number][0], f"我们看到了{number}本书"]
        for number in range(40)
    ]
    rows += [
        ["en", "th", str(number), GOOD[number][0], f"เราเห็นหนังสือ{number}เล่ม"] for number in range(9)
    ]
    damaged = ["en", "th", "9", GOOD[9][0], "我们看到了书"]
    header = ["source_lang", "target_lang", "score", "source", "target"]
    write(tmp_path / "mix.tsv", ["\t".join(row) for row in [header, *rows, damaged]])
    rules = ["--skip", "numbers", "ratio"]
    status, printed, errors = command(
        "clean", "mix.tsv", "--output", "m.tsv", "--dropped", "d.tsv", *rules
    )
    assert (status, errors) == (0, "") and "kept 89 of 90 pairs" in printed
    lines = [
        line.split("\t") for line in (tmp_path / "m.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert lines[0] == ["source", "target", "source_lang", "target_lang", "score"]
    assert lines[1:] == [[row[3], row[4], *row[:3]] for row in rows]
    dropped = (tmp_path / "d.tsv").read_text(encoding="utf-8").splitlines()
    assert dropped == ["\t".join(["script", "91", damaged[3], damaged[4], *damaged[:3]])]
    _, printed, _ = command("clean", "mix.tsv", "--output", "m.en", "m.xx", *rules)
    assert "left out the columns source_lang, target_lang, score" in printed


def test_spaces_of_a_pair_stay_as_they_are(command, tmp_path, in_tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"source": "a\\tb\\u00a0c", "target": "d\\u3000e", "id": 7, "tags": ["x"]}\n',
        encoding="utf-8",
    )
    status, printed, _ = command("clean", "a.jsonl", "--output", "a.tsv")
    assert status == 0 and printed.count("kept") == 1
    lines = (tmp_path / "a.tsv").read_text(encoding="utf-8").splitlines()
    assert lines == ["source\ttarget\tid\ttags", 'a b\u00a0c\td\u3000e\t7\t["x"]']


def test_sequences_are_compared_whole_and_left_as_they_are(command, tmp_path, in_tmp_path):
    pairs = [
        ("c1ccccc1", "C1CCCCC1"),
        ("C1CCCCC1", "C1CCCCC1"),  # a copy is a reaction like others
        ("c1ccccc1", "C1CCCCC1"),
        ("CC&amp;", "CC&"),
        ("N" * 1001, "N"),
        ("OCC", "12 34"),
        ("CCO", "34 12"),
    ]
    write(tmp_path / "train.tsv", ["source\ttarget", *("\t".join(pair) for pair in pairs)])
    write(tmp_path / "test.tsv", ["source\ttarget", "occ\tF", "CCO\tF"])
    flags = ["--task", "sequence", "--exclude", "test.tsv", "--dropped", "dropped.tsv"]
    status, printed, errors = command("clean", "train.tsv", "--output", "clean.tsv", *flags)
    assert (status, errors) == (0, "")
    kept = (tmp_path / "clean.tsv").read_text(encoding="utf-8").splitlines()[1:]
    assert kept == ["\t".join(pairs[row]) for row in (0, 1, 3, 5)]
    dropped = [
        line.split("\t")[:2]
        for line in (tmp_path / "dropped.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert dropped == [["duplicate", "4"], ["length", "6"], ["overlap", "8"]]
    assert "kept 4 of 7 pairs" in printed


def test_output_and_report_are_the_same_for_any_number_of_workers(
    command, tmp_path, in_tmp_path, monkeypatch
):
    monkeypatch.setattr(judging, "BLOCK", 40)
    damaged = [damage(*GOOD[row]) for row, damage in enumerate(DAMAGE.values(), start=100)]
    loud = [(source.upper(), target.upper() + " !!") for source, target in GOOD[:4]]
    pairs = [*loud, *GOOD, ("", "leer"), *damaged, *GOOD[350:355], *loud, ("A &amp; B", "A & B")]
    write(tmp_path / "train.tsv", ["en\tde", *("\t".join(pair) for pair in pairs)])
    write(tmp_path / "test.tsv", ["en\tde", "x\t" + DAMAGE["overlap"]("", "")[1]])
    flags = [
        "--exclude",
        "test.tsv",
        "--source_lang",
        "en",
        "--target_lang",
        "de",
        "--dropped",
        "d.tsv",
    ]
    results = []
    for workers in ("1", "2", "3"):
        arguments = ["clean", "train.tsv", "--output", "clean.tsv", *flags]
        arguments += ["--report", "r.html", "--workers", workers]
        status, printed, errors = command(*arguments)
        assert (status, errors) == (0, "")
        results.append(
            [
                printed,
                *((tmp_path / name).read_bytes() for name in ("clean.tsv", "d.tsv", "r.html")),
            ]
        )
    assert results[0] == results[1] == results[2]
    dropped = {line.split(b"\t")[0].decode() for line in results[0][2].splitlines()}
    assert dropped == {"empty source", *RULES} - {"language"}  # py3langid takes seconds

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(judging, "in_order", lambda _, *rest: in_order(os._exit, [(1,)], *rest[1:]))
    status, _, errors = command(*arguments)
    assert (
        status == 2
        and errors.count("\n") == 1
        and "workers: one of 3 processes was ended" in errors
    )
    assert sorted(tmp_path.iterdir()) == before


def kill_cleaning(folder, workers, kills):
    """In a process of its own, which has no threads."""
    judging.BLOCK, duplicates._IN_MEMORY = 40, 64
    pairs = [*GOOD[:150], *GOOD[100:110], DAMAGE["copy"](*GOOD[200]), ("", "leer")]
    write(folder / "train.tsv", ["source\ttarget", *("\t".join(pair) for pair in pairs)])
    write(folder / "test.tsv", ["source\ttarget", f"{GOOD[7][0]}\tx"])

    def clean(case, workers=workers):
        datasets.config.HF_DATASETS_CACHE = case / "cache"
        names = (
            "a.en",
            "a.de",
            "--exclude",
            folder / "test.tsv",
            "--dropped",
            "d.tsv",
            "--report",
            "r.html",
        )
        os.chdir(case)
        main(
            [
                "clean",
                f"{folder}/train.tsv",
                "--output",
                *map(str, names),
                "--workers",
                str(workers),
            ]
        )

    check_kills(clean, partial(clean, workers=1), folder, kills)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")
@pytest.mark.parametrize(("workers", "kills"), [(2, 4), (1, 12), (4, 12)])
def test_killed_cleaning_leaves_no_half_file(python, repository, tmp_path, workers, kills):
    call = f"kill_cleaning(Path({str(tmp_path)!r}), {workers}, {kills})"
    program = (
        f"from pathlib import Path\nfrom {kill_cleaning.__module__} import kill_cleaning\n{call}"
    )
    done = python.run(["-c", program], cwd=repository, seconds=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "a.tsv --output b.tsv --task sequence --skip numbers",
            "skip: 'numbers' is no rule of --task sequence",
        ),
        ("a.tsv --output b.tsv --detect --skip language", "detect: it has no effect"),
        ("a.tsv --output b.tsv --detect --task sequence", "detect: it has no effect"),
        ("a.en a.de --output b.en b.de --target_column x", "--target_column has no effect"),
        ("a.tsv --output b.csv", "--output b.csv: give two text files"),
        ("a.tsv --output b.tsv --dropped c.csv", "dropped: c.csv: pairs and rules are a table"),
    ],
)
def test_wrong_flags_are_refused(command, tmp_path, in_tmp_path, arguments, message):
    for name in ("a.tsv", "a.en", "a.de"):
        write(tmp_path / name, ["source\ttarget", "a\tb"])
    status, _, errors = command("clean", *arguments.split())
    assert status == 2 and errors.startswith(f"error: {message}") and errors.count("\n") == 1


def test_workers_are_at_least_one(command, tmp_path, in_tmp_path):
    write(tmp_path / "a.tsv", ["source\ttarget", "a\tb"])
    assert command("clean", "a.tsv", "--output", "b.tsv", "--workers", "0")[::2] == (
        2,
        "error: workers: must be at least 1, not 0\n",
    )
