"""Translate subtitles in SubRip (.srt) and WebVTT (.vtt). Times, numbers, settings and styles stay."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..data.words import break_points
from ..inference.placement import TranslateTexts
from ..utils.errors import UserError

_NEWLINE = r"(?:\r\n|[\r\n])"
_TIME = r"(?:\d+:){1,2}\d+(?:[,.]\d+)?"
_TIMES = rf"[^\S\r\n]*{_TIME}[^\S\r\n]*-->[^\S\r\n]*{_TIME}[^\r\n]*"
#: A time line and the lines after it. Cues end at a blank line, or before the number and the times of the next one.
_CUE = re.compile(
    rf"(?:\A|(?<=[\r\n]))({_TIMES}(?:{_NEWLINE}|\Z))"
    rf"((?:(?!\d+[^\S\r\n]*{_NEWLINE}{_TIMES})(?!{_TIMES})[^\S\r\n]*[^\s][^\r\n]*(?:{_NEWLINE}|\Z))*)"
)

_TAGS = r"(?:<[^<>]*>|\{[^{}]*\})*"
_WRAPPED = re.compile(rf"(\s*{_TAGS}\s*)(.*?)(\s*{_TAGS}\s*)", re.DOTALL)
_ENDS = re.compile(r"[.!?…。！？♪:\]][\"'”’»)\]]*$")
_MOST_CUES = 8  # that a sentence can span


@dataclass
class _Line:
    """A text of a cue, which several lines share unless each starts with a dash."""

    start: int  # in the file
    end: int
    before: str  # tags around it
    text: str
    after: str
    rows: list[int]  # their lengths


def translate_subtitles(subtitles: str, translate: TranslateTexts) -> str:
    """Translate the text of each cue.

    A sentence that spans several cues is translated as a whole. Its translation is cut between words, in the same
    proportions as the sentence, and so are the lines of a cue.

    Raises:
        UserError: there are no cues.
    """
    content = subtitles.strip("\ufeff \t\r\n")
    if content and not content.startswith("WEBVTT") and not _CUE.search(subtitles):
        raise UserError(
            "documents: there are no cues, such as 00:00:01,000 --> 00:00:02,500 and a text, in this file"
        )
    lines = [line for cue in _CUE.finditer(subtitles) for line in _lines(cue.start(2), cue[2])]
    groups: list[list[_Line]] = []
    for line in lines:
        if groups and len(groups[-1]) < _MOST_CUES and _goes_on(groups[-1][-1].text, line.text):
            groups[-1].append(line)
        else:
            groups.append([line])
    translations = translate([" ".join(line.text for line in group) for group in groups])
    pieces = []
    position = 0
    for group, parts in zip(groups, translations, strict=True):
        translation = "".join(part.target for part in parts)
        for line, text in zip(
            group, _cut(translation, [len(line.text) for line in group]), strict=True
        ):
            rows = _cut(text, line.rows)
            newline = "\r\n" if "\r\n" in subtitles else "\n"
            pieces += [
                subtitles[position : line.start],
                line.before,
                newline.join(filter(None, rows)),
                line.after,
            ]
            position = line.end
    return "".join(pieces) + subtitles[position:]


def _lines(start: int, text: str) -> list[_Line]:
    rows = list(re.finditer(r"[^\r\n]+", text))
    starts = [
        row.start() for row in rows if row is rows[0] or re.match(rf"{_TAGS}\s*[-–—]", row[0])
    ]
    lines = []
    for begin, end in pairwise([*starts, len(text)]):
        content = text[begin:end].rstrip("\r\n")
        match = _WRAPPED.fullmatch(content)
        before, inner, after = match.groups() if match else ("", content, "")
        lines.append(
            _Line(
                start + begin,
                start + begin + len(content),
                before,
                " ".join(inner.split()),
                after,
                [len(row) for row in inner.splitlines()],
            )
        )
    return [line for line in lines if line.text]


def _goes_on(text: str, following: str) -> bool:
    """Return whether a sentence goes on in the next cue."""
    return not _ENDS.search(text) and (following[:1].islower() or text.endswith((",", "，", "、")))


def _cut(text: str, lengths: Sequence[int]) -> list[str]:
    """A text in pieces of about these proportions, cut between words."""
    words = [text[start:end] for start, end in pairwise([0, *break_points(text)[1:], len(text)])]
    pieces = []
    start = 0
    size = 0
    total = 0
    for number, length in enumerate(lengths):
        total += length
        end = start
        # Pieces after this one, each with a word if there are enough.
        spare = len(lengths) - number - 1
        while end < len(words) - spare and (
            end == start or size + len(words[end]) / 2 < len(text) * total / sum(lengths)
        ):
            size += len(words[end])
            end += 1
        pieces.append("".join(words[start : end if spare else None]).strip())
        start = end
    return pieces
