"""Subtitles as players and editors read them: tags, empty lines, comments, styles and characters."""

import pytest

from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.inference.placement import TranslatedPart
from tests.documents.translators import backwards, translator_by, upper
from tests.model_helpers import error_of

FIRST = "00:00:01,000 --> 00:00:02,000\n"
SECOND = "00:00:03,000 --> 00:00:04,000\n"


def translated(document: str, suffix: str, translate=upper) -> str:
    return translate_document(document.encode(), suffix, translate).decode()


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("cue", "expected"),
    [
        # Subtitle Edit reads an empty line as a part of the text, unless a number and times follow
        ("one\n\ntwo", "ONE\n\nTWO"),
        ("one.\n \n\ntwo\nthree\n", "ONE.\n \n\nTWO\nTHREE\n"),
        ("one\n7\ntwo", "ONE\n7\nTWO"),
        ("{\\i1}five{\\i0} six", "{\\i1}FIVE{\\i0} SIX"),
        ("{\\an8}<i>five</i>", "{\\an8}<i>FIVE</i>"),
        ("<i>five</i> six <b>seven</b>", "<i>FIVE</i> SIX <b>SEVEN</b>"),
        ('<font color="red">five</font> six', '<font color="red">FIVE</font> SIX'),
        ("<i>five\nsix</i> seven", "<i>FIVE\nSIX</i> SEVEN"),
        ("- <i>one</i>\n- two", "- <i>ONE</i>\n- TWO"),
        ("<i>- one</i>\n<i>- two</i>", "<i>- ONE</i>\n<i>- TWO</i>"),
        ("{laughs} five & six", "{LAUGHS} FIVE & SIX"),
        ("one &lt;b> two &amp; three", "ONE &LT;B> TWO &AMP; THREE"),  # SubRip has no entities
        ("1 < 2 and 3 > 2", "1 < 2 AND 3 > 2"),
        ("{y:i}one", "{y:i}ONE"),
        ("♪ one ♪", "♪ ONE ♪"),
        ("<i></i>one", "<i></i>ONE"),
        ("<i>one", "<i>ONE"),
    ],
)
def test_texts_of_subrip_are_translated(cue: str, expected: str, newline: str) -> None:
    document, wanted = (
        f"1\n{FIRST}{text}\n\n2\n{SECOND}end\n".replace("\n", newline) for text in (cue, expected)
    )
    assert translated(document, ".srt") == wanted.replace("end", "END")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("NOTE a comment\nof two lines", None),
        ("NOTE\nnobody reads this", None),
        ("STYLE\n::cue(.x) { color: red }", None),
        ("REGION\nid:fred\nwidth:40%", None),
        ("id of a cue\n00:01.000 --> 00:02.000 align:start size:35%\none", "ONE"),
        ("00:01.000 --> 00:02.000\n<v Bob Smith>one</v>", "<v Bob Smith>ONE</v>"),
        ("00:01.000 --> 00:02.000\n<v Bob>one\n<v Ann>two", "<v Bob>ONE\n<v Ann>TWO"),
        ("00:01.000 --> 00:02.000\n<c.yellow.bg_blue>one</c> two", "<c.yellow.bg_blue>ONE</c> TWO"),
        ("00:01.000 --> 00:02.000\n<00:01.200>one <00:01.500>two", "<00:01.200>ONE <00:01.500>TWO"),
        ("00:01.000 --> 00:02.000\n<ruby>one<rt>two</rt></ruby>", "<ruby>ONE<rt>TWO</rt></ruby>"),
        ("00:01.000 --> 00:02.000\n<lang fr>one</lang>", "<lang fr>ONE</lang>"),
        ("00:01.000 --> 00:02.000\none &amp; two &lt;3&nbsp;x", "ONE &amp; TWO &lt;3\xa0X"),
        ("00:01.000 --> 00:02.000\n- one\n- two", "- ONE\n- TWO"),
    ],
)
def test_blocks_of_webvtt_stay(block: str, expected: str | None) -> None:
    document = f"WEBVTT Kind: captions\nLanguage: en\n\n{block}\n\n00:03.000 --> 00:04.000\nend\n"
    source = block.split(".000", 2)[-1].partition("\n")[2]
    wanted = document.replace("\nend\n", "\nEND\n")
    wanted = wanted if expected is None else wanted.replace(source, expected)
    assert translated(document, ".vtt") == wanted


def test_tags_of_subtitles_go_with_their_words() -> None:
    document = f"1\n{FIRST}one <i>two</i> three\n"
    assert translated(document, ".srt", backwards) == f"1\n{FIRST}THREE <i>TWO</i> ONE\n"


def test_translation_is_no_markup_of_webvtt() -> None:
    document = "WEBVTT\n\n00:01.000 --> 00:02.000\none\n"
    result = translated(
        document,
        ".vtt",
        lambda texts: [[TranslatedPart(text, "a <b> & c --> d")] for text in texts],
    )
    assert result == document.replace("one", "a &lt;b&gt; &amp; c --&gt; d")


def test_lines_of_speakers_and_songs_stay_apart() -> None:
    lines = [">> one two", ">> three", "\u266a four five \u266a", "[six seven]"]
    document = f"1\n{FIRST}" + "\n".join(lines) + "\n"
    assert translated(document, ".srt") == document.upper()


@pytest.mark.parametrize(
    "times", ["00:00:01,000 ---> 00:00:02,000", "00:00:01,000 -> 00:00:02,000"]
)
def test_damaged_times_are_refused(times: str) -> None:
    assert "line 6 has no times" in error_of(
        translated, f"1\n{FIRST}one\n\n2\n{times}\ntwo\n", ".srt"
    )


def test_data_of_a_metadata_track_stay() -> None:
    document = f'WEBVTT\n\n{FIRST}{{"one": "two",\n"three": 4}}\n\n{SECOND}{{one}} six\n'
    assert translated(document, ".vtt") == document.replace("{one} six", "{ONE} SIX")


def test_translation_of_two_cues_is_cut_where_it_is_nearest_to_their_lengths() -> None:
    """Half of the ten characters is five, of which the second space is one away and the first one two."""
    document = f"1\n{FIRST}abcd,\n\n2\n{SECOND}efghi\n"
    translate = translator_by(lambda text: "aa bb cccc")
    assert translated(document, ".srt", translate) == f"1\n{FIRST}aa bb\n\n2\n{SECOND}cccc\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("00:01.000 --> 00:02.000\n<v Ann>one two,", "00:03.000 --> 00:04.000\n<v Bob>three."),
        (
            "00:01.000 --> 00:02.000\n<v Ann>one,</v>\n- two,",
            "00:03.000 --> 00:04.000\n<v Ann>three.",
        ),
        ("00:01.000 --> 00:02.000\none two,", "00:03.000 --> 00:04.000\nBOB: three."),
        ("00:01.000 --> 00:02.000\none two", "09:00.000 --> 09:04.000\nthree."),
        ("00:09.000 --> 00:10.000\none two", "00:01.000 --> 00:02.000\nthree."),
        ("00:01.000 --> 00:02.000\none two,", "NOTE scene\n\n00:03.000 --> 00:04.000\nthree."),
    ],
)
def test_sentence_ends_with_its_speaker_and_scene(first: str, second: str) -> None:
    seen: list[str] = []
    translated(f"WEBVTT\n\n{first}\n\n{second}\n", ".vtt", translator_by(str, seen))
    assert seen[-1].endswith("three.") and "two" not in seen[-1]


def test_sentence_of_a_speaker_goes_on() -> None:
    seen: list[str] = []
    cues = "00:01.000 --> 00:02.000\n<v Ann>one,\n\n00:03.000 --> 00:04.000\n<v Ann>two."
    translated(f"WEBVTT\n\n{cues}\n", ".vtt", translator_by(str, seen))
    assert seen == ["one, two."]


def test_times_between_words_increase_in_another_order() -> None:
    """https://www.w3.org/TR/webvtt1/#webvtt-cue-timestamp"""
    webvtt = pytest.importorskip("webvtt", reason="needs webvtt-py")
    cue = "one <00:01.200>two <00:01.400>three <00:01.600>four"
    document = f"WEBVTT\n\n00:01.000 --> 00:02.000\n{cue}\n"
    (found,) = webvtt.from_string(translated(document, ".vtt", backwards)).captions
    clocks = [part.split(">")[0] for part in found.raw_text.split("<")[1:]]
    assert clocks == ["00:01.200", "00:01.400", "00:01.600"]
    assert found.text.split() == ["FOUR", "THREE", "TWO", "ONE"]
