"""The one notation for inputs: the meaning of each name, and errors about missing and ambiguous ones."""

import gzip
import os
from pathlib import Path

import pytest

from hf_vanilla_transformer.corpora import load_pairs, number_pairs, parse_inputs, read_lines
from hf_vanilla_transformer.corpora.directions import parse_directions
from hf_vanilla_transformer.corpora.readers import require_plain_text
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of


@pytest.fixture
def folder(tmp_path: Path, in_tmp_path: Path) -> Path:
    """A folder with one of each kind of input. It is the working directory."""
    for name in ("a.en", "a.de", "notes", "b.en", "b.de.gz", "c.tsv", "d.tmx", "e.en", "only.en"):
        (tmp_path / name).write_text("x\n")
    for name in ("data", "distilled", "e"):
        (tmp_path / name).mkdir()
    for name in (SOURCE, TARGET):
        (tmp_path / "distilled" / name).write_text("x\n")
    return tmp_path


def parsed(
    *values: str | Path, languages: tuple[str | None, str | None] = ("en", "de")
) -> list[tuple[str, ...]]:
    """The files of each input, or its dataset and configuration."""
    return [
        tuple(map(str, each.files))
        if each.files
        else (str(each.dataset), *filter(None, [each.configuration]))
        for each in parse_inputs(values, *languages)
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a.en", "a.de"], [("a.en", "a.de")]),
        (["a.en", "notes"], [("a.en", "notes")]),
        (["a"], [("a.en", "a.de")]),
        (["b"], [("b.en", "b.de.gz")]),
        (["c.tsv", "a.en", "a.de", "d.tmx"], [("c.tsv",), ("a.en", "a.de"), ("d.tmx",)]),
        (["distilled", "data"], [(f"distilled/{SOURCE}", f"distilled/{TARGET}"), ("data",)]),
        (["e/"], [("e",)]),
        (["numbers"], [("numbers",)]),
        (["user/name", "wmt/wmt14:de-en"], [("user/name",), ("wmt/wmt14", "de-en")]),
    ],
)
def test_names_stand_for_files_and_datasets(folder, values, expected):
    assert parsed(*values) == expected


def test_one_path_is_one_input(folder: Path) -> None:
    (single,) = parse_inputs(folder / "c.tsv")
    assert single.files == (folder / "c.tsv",) and not single.on_hub
    assert [each.on_hub for each in parse_inputs(["data", "numbers", "user/name:de-en"])] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (["a.en"], ["a.en is plain text"]),
        (["a.en", "c.tsv"], ["a.en is plain text", "c.tsv is no plain-text file"]),
        (["a.en", "ade"], ["a.en is plain text", "ade does not exist"]),
        (["a.de", "a.en"], ["a.de a.en", "exchange"]),
        (["e"], ["e is a folder", "e.en", "e/"]),
        (["only"], ["only.en is there", "only.de"]),
        (["no.en", "no.de"], ["no.en: no such file"]),
        (["data/no.jsonl"], ["data/no.jsonl: no such file"]),
        (["../x/y/z"], ["../x/y/z: no such file"]),
    ],
)
def test_wrong_inputs_are_refused(folder: Path, values: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_inputs(values, "en", "de", field="train")
    message = str(caught.value)
    assert message.startswith("train: ") and all(part in message for part in parts), message


@pytest.mark.parametrize(
    "values", [["pipe"], ["pipe", "a.de"], ["a.en", "pipe"], ["c.tsv", os.devnull]]
)
def test_pipes_and_devices_are_named(folder: Path, values: list[str]) -> None:
    """Training reads its text several times, a pipe such as `<(zcat x.en.gz)` gives it once."""
    os.mkfifo("pipe")
    name = next(value for value in values if value in ("pipe", os.devnull))
    message = error_of(parse_inputs, values, field="train")
    assert message == f"train: {name}: a pipe or a device: write its text to a file, and name that"


def test_prefix_needs_languages(folder: Path) -> None:
    assert "source_lang and target_lang" in error_of(parse_inputs, "a")


def test_any_order_is_taken_if_the_languages_are_unknown(folder: Path) -> None:
    assert parsed("a.de", "a.en", languages=(None, None)) == [("a.de", "a.en")]


def test_numbers_are_mixed_with_files(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("en\tde\nhello\thallo\n")
    pairs, report = load_pairs(
        ["numbers", tmp_path / "x.tsv"], source_lang="en", target_lang="de", numbers_size=5, seed=3
    )
    assert pairs["source"][:] == [*number_pairs(5, 3)["train"]["source"], "hello"]
    assert "numbers × 1: kept 5 of 5 pairs" in report.summary()


def test_every_language_is_a_suffix_of_plain_text(tmp_path):
    """ISO 639-1, and Standard Arabic of FLORES. An archive or a document is none."""
    iso = (
        "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de "
        "dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id "
        "ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu "
        "lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu "
        "rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr "
        "ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu arb ara"
    )
    for code in iso.split():
        path = tmp_path / f"train.{code}"
        path.write_text("text\n", encoding="utf-8")
        assert list(read_lines(path)) == ["text"]
    (tmp_path / "app.arb").write_text('{"@@locale": "en"}', encoding="utf-8")
    for name in ("app.arb", "train.tar", "train.tgz"):
        assert "plain text" in error_of(require_plain_text, tmp_path / name)


#: documents whose suffix is a language in ISO 639-2 or 639-3
DOCUMENTS = {
    "arb": b'\xef\xbb\xbf\n{"@@locale": "en"}',
    "ass": b"\xef\xbb\xbf[Script Info]\nTitle: x\n",
    "doc": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0\0",
    "pot": b'# comment\nmsgid ""\nmsgstr ""\n',
    "ppt": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0\0",
    "rar": b"Rar!\x1a\x07\x01\x00",
    "srt": b"1\n00:00:01,000 --> 00:00:02,000\nHello\n",
    "sub": b"{10}{20}Hello\n",
    "tar": b"name.txt" + 100 * b"\0",
    "tex": b"% comment\n\\documentclass{article}\n",
}


def test_byte_order_mark_is_no_text_at_the_start_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.en"
    path.write_text("\ufeffone\n\ufefftwo\n", encoding="utf-8")
    assert list(read_lines(path)) == ["one", "\ufefftwo"]


@pytest.mark.parametrize("suffix", DOCUMENTS)
def test_content_tells_a_document_from_a_language(suffix: str, tmp_path: Path) -> None:
    document = tmp_path / f"document.{suffix}"
    document.write_bytes(DOCUMENTS[suffix])
    assert "plain text" in error_of(require_plain_text, document)
    text = tmp_path / f"train.{suffix}"
    for content in ("Ko te aroha, 1,5.\nE noho ra!\n", ""):
        text.write_text(content, encoding="utf-8")
        assert list(read_lines(text)) == content.splitlines()
    zipped = tmp_path / f"train.{suffix}.gz"
    zipped.write_bytes(gzip.compress(b"Ko te aroha\n"))
    assert list(read_lines(zipped)) == ["Ko te aroha"]


@pytest.mark.parametrize(
    "code", ["zh-Hant", "sr_Latn", "pt-BR", "pt_BR", "deu", "zho_Hant", "yue", "es-419"]
)
def test_regions_and_scripts_are_suffixes(code: str, tmp_path: Path) -> None:
    for name, text in ((f"train.{code}", "a"), ("train.en", "b")):
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    pairs, _ = load_pairs(tmp_path / "train", source_lang=code, target_lang="en")
    assert (pairs["source"][:], pairs["target"][:]) == (["a"], ["b"])
    exchanged = [tmp_path / "train.en", tmp_path / f"train.{code}"]
    assert "exchange the two files" in error_of(
        load_pairs, exchanged, source_lang=code, target_lang="en"
    )
    assert parse_directions([f"en-{code.replace('-', '_')}"]) == [("en", code.replace("-", "_"))]
