"""Documents of each format keep every byte but their text."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.inference.document_files import SUFFIXES, text_translator, translate_document
from hf_vanilla_transformer.inference.placement import TranslatedPart
from tests.serving_helpers import echo_folder, echo_translator

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>Hello my dear</i>

2
00:00:03,000 --> 00:00:04,000 X1:10
friend, how
are you?

3
00:00:05,000 --> 00:00:06,000
{\\an8}- Fine.
- And you?
"""
VTT = """WEBVTT - x

NOTE a --> note

STYLE
::cue {}

id1
00:01.000 --> 00:04.000 line:0
<v Bob>Never drink it.</v>

00:05.000 --> 00:09.000
It will
hurt"""
HTML = (
    '<!DOCTYPE html><title>One</title><p class="x">Hello <b>big</b> world!<br>\n<img src=1> Two.</p><script>x</script>'
)

#: document, its texts, and the document with each text in upper case
DOCUMENTS = {
    ".html": (HTML, ["One", "Hello big world!", "Two."],
              HTML.replace("One", "ONE").replace("Hello <b>big</b> world", "HELLO <b>BIG</b> WORLD")
              .replace("Two", "TWO")),
    ".srt": (SRT, ["Hello my dear friend, how are you?", "- Fine.", "- And you?"],
             SRT.replace("Hello my dear", "HELLO MY DEAR").replace("friend, how\nare", "FRIEND, HOW\nARE")
             .replace("you", "YOU").replace("Fine", "FINE").replace("And", "AND")),
    ".vtt": (VTT, ["Never drink it.", "It will hurt"],
             VTT.replace("Never drink it", "NEVER DRINK IT").replace("It will\nhurt", "IT WILL\nHURT")),
}  # fmt: skip


def translator_by(function, seen=None):
    def translate(texts):
        if seen is not None:
            seen.extend(texts)
        return [[TranslatedPart(text, function(text))] for text in texts]

    return translate


@pytest.mark.parametrize("suffix", DOCUMENTS)
def test_documents_keep_all_but_their_text(suffix: str) -> None:
    document, texts, upper = DOCUMENTS[suffix]
    seen: list[str] = []
    for newline in ("\n", "\r\n"):
        data = document.replace("\n", newline).encode()
        assert translate_document(data, suffix.upper(), translator_by(str, seen)) == data
        assert translate_document(data, suffix, translator_by(str.upper)).decode() == upper.replace("\n", newline)
    assert seen == 2 * texts
    assert translate_document(b"", suffix, translator_by(str)) == b""


def test_encoding_of_a_document_stays() -> None:
    page = '<meta charset="latin-1"><p>café'
    assert translate_document(page.encode("latin-1"), ".html", translator_by(str.upper)) == page.replace(
        "café", "CAFÉ"
    ).encode("latin-1")
    assert translate_document(page.encode("latin-1"), ".html", translator_by(lambda _: "日")).endswith(b"&#26085;")
    for encoding in ("utf-16", "utf-8-sig"):
        data = SRT.encode(encoding)
        assert translate_document(data, ".srt", translator_by(str)) == data
    with pytest.raises(UserError, match="utf-8"):
        translate_document(b"\xe9", ".srt", translator_by(str))


@pytest.mark.parametrize("words", [0, 1, 2, 9, 40])
def test_sentence_over_several_cues_leaves_none_empty(words: int) -> None:
    translated = translate_document(SRT.encode(), ".srt", translator_by(lambda _: " ".join(["word"] * words))).decode()
    assert [line for line in translated.split("\n") if "-->" in line] == [
        line for line in SRT.split("\n") if "-->" in line
    ]
    assert translated.count("word") == 3 * words
    assert words < 3 or "<i>word" in translated and translated.count("\n") == SRT.count("\n")


def test_other_formats_are_refused_by_name() -> None:
    for suffix in (".pdf", "", ".odp"):
        with pytest.raises(UserError, match="documents"):
            translate_document(b"x", suffix, translator_by(str))


def test_document_is_translated_sentence_by_sentence(tmp_path: Path, monkeypatch, capfdbinary) -> None:
    pytest.importorskip("sentencex", reason="needs the extra `documents`")
    from vanilla_transformer_cli.main import main

    translator = echo_translator()
    one, two = translator.translate(["seven dogs.", "two hundred"])
    page = "<ul><li>seven dogs. <b>two hundred</b> {x}</li></ul>"
    expected = f"<ul><li>{one} <b>{two}</b> {{x}}</li></ul>"
    assert translate_document(page.encode(), ".html", text_translator(translator, "en", "de")).decode() == expected
    (tmp_path / "page.html").write_text(page)
    common = ["translate", "--model", str(echo_folder(tmp_path / "model")), "--input", str(tmp_path / "page.html")]
    assert pytest.raises(SystemExit, main, common).value.code == 0
    assert capfdbinary.readouterr().out.decode() == expected
    assert pytest.raises(SystemExit, main, [*common, "--output", str(tmp_path / "new.html")]).value.code == 0
    assert (tmp_path / "new.html").read_text() == expected
    assert set(SUFFIXES) == set(DOCUMENTS) | {".htm", ".xhtml"}
