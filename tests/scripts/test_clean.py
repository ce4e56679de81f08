"""`vanilla-transformer clean`: which pairs are written where."""

from tests.data.test_cleaning import DAMAGE, GOOD


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_kept_and_dropped_pairs_are_written(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [*GOOD[:50], DAMAGE["copy"](*GOOD[60]), GOOD[3], DAMAGE["numbers"](*GOOD[61]), ("", "leer"), GOOD[62]]
    for name, side in (("train.en", 0), ("train.de", 1)):
        write(tmp_path / name, [pair[side] for pair in pairs])
    write(tmp_path / "test.en", [GOOD[62][0]])
    write(tmp_path / "test.de", ["ein anderer Satz"])
    flags = ["--exclude", "test.en", "test.de", "--dropped", "dropped.tsv", "--report", "report.html"]
    status, printed, errors = command("clean", "train.en", "train.de", "--output", "clean.en", "clean.de", *flags)
    assert (status, errors) == (0, "")
    assert (tmp_path / "clean.en").read_text(encoding="utf-8").splitlines() == [source for source, _ in GOOD[:50]]
    assert (tmp_path / "clean.de").read_text(encoding="utf-8").splitlines() == [target for _, target in GOOD[:50]]
    dropped = [line.split("\t") for line in (tmp_path / "dropped.tsv").read_text(encoding="utf-8").splitlines()]
    assert [(rule, line) for rule, line, *_ in dropped] == [
        ("copy", "51"),
        ("duplicate", "52"),
        ("numbers", "53"),
        ("overlap", "55"),
    ]
    assert "empty source" in printed and "kept 50 of 54 pairs" in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("copy", "overlap", "Seite 9002."))
    command("clean", "clean.en", "clean.de", "--output", "all.tsv", "--skip", "copy")
    lines = (tmp_path / "all.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "source\ttarget" and lines[1:] == ["\t".join(pair) for pair in GOOD[:50]]
