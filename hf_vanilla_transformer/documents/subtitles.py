"""Translate subtitles in SubRip (.srt) and WebVTT (.vtt). Times, numbers, settings, comments and styles stay."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
from itertools import accumulate

from ..inference.placement import TranslatedPart, TranslateTexts
from ..text.words import break_points
from ..utils.errors import UserError
from .passages import Event, Passage, passage_of, raw_of

_LINE = re.compile(r"([^\r\n]*)(\r\n|[\r\n]|\Z)")
_TIME = r"-?(?:\d+:){1,2}\d+(?:[,.]\d+)?"
_TIMES = re.compile(rf"\s*({_TIME})\s*-->\s*({_TIME})")
_DAMAGED_TIMES = re.compile(r"\s*-?\d+[:.,][\d:.,\s]*-+>\s*-?\d")

#: Tags such as <i>, <v Bob> and <00:01.000>, and the codes {\\i1} and {y:i}.
_TAG = re.compile(r"(</?[A-Za-z\d][^<>]*>|</>|\{\\[^{}]*\}|\{[A-Za-z]:[^{}]*\})")
_CLOCK = re.compile(r"<(?:\d+:){1,2}\d+\.\d+>")
_VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]*)>|</v>")
_COMMENT = re.compile(r"[\r\n]NOTE\b")
_SWITCH = re.compile(r"\{\\([bisu])([01])\}")  # of italics, for example
#: Marks of a line that stands alone: of a speaker, a song or a sound.
_OWN_LINE = re.compile(r"[-–—♪♫]|>>|&gt;&gt;|\[")

_ENDS = re.compile(r"[.!?…。！？♪:\]][\"'”’»)\]]*$")
#: A speaker in the text of a line: "ANN: "
_NAME = re.compile(r"[^\W\d_][^:.,!?]{0,30}:\s")
_MOST_CUES = 8  # that a sentence can span
_LONGEST_PAUSE = 5.0  # seconds in a sentence


@dataclass
class _Cue:
    start: int  # of its text in the file
    end: int
    opens: float  # seconds
    closes: float
    follows_comment: bool = False


@dataclass
class _Line:
    """A text of a cue, which several lines share unless each starts with a mark or stands after an empty line."""

    cue: _Cue
    voice: str  # the speaker by a tag, or ""
    start: int  # in the file
    passage: Passage
    rows: list[int]  # their lengths

    @property
    def text(self) -> str:
        return self.passage.text


def translate_subtitles(subtitles: str, translate: TranslateTexts) -> str:
    """Translate the text of each cue.

    A sentence that spans several cues is translated as a whole. Its translation is cut between words, in the same
    proportions as the sentence, and so are the lines of a cue. Tags inside a text go with their words.

    Raises:
        UserError: there are no cues.
    """
    is_vtt = subtitles.removeprefix("\ufeff").startswith("WEBVTT")
    cues = list(_cues(subtitles, is_vtt))
    if not cues and not is_vtt and subtitles.strip("\ufeff \t\r\n"):
        raise UserError(
            "documents: there are no cues, such as 00:00:01,000 --> 00:00:02,500 and a text, in this file"
        )
    groups: list[list[_Line]] = []
    for line in (line for cue in cues for line in _lines(subtitles, cue, is_vtt)):
        if groups and len(groups[-1]) < _MOST_CUES and _goes_on(groups[-1][-1], line):
            groups[-1].append(line)
        else:
            groups.append([line])
    translations = translate([" ".join(line.text for line in group) for group in groups])
    newline = next((mark for mark in ("\r\n", "\n", "\r") if mark in subtitles), "\n")
    pieces = []
    position = 0
    for group, parts in zip(groups, translations, strict=True):
        for line, text in zip(group, _shared(group, parts), strict=True):
            rows = _cut(text, line.rows)
            pieces += [subtitles[position : line.start], newline.join(filter(None, rows))]
            position = line.start + len(line.passage.raw)
    return "".join(pieces) + subtitles[position:]


def _cues(subtitles: str, is_vtt: bool) -> Iterator[_Cue]:
    """The cues.

    A text ends before the times of the next cue and their number. In WebVTT it ends at an empty line, too. In SubRip,
    as editors read it, empty lines are part of a text.
    """
    lines = list(_LINE.finditer(subtitles))
    cue: _Cue | None = None
    last = 0  # where the text of the cue before ends
    for number, line in enumerate(lines):
        following = lines[number + 1][1] if number + 1 < len(lines) else ""
        times = _TIMES.match(line[1])
        if not times and _DAMAGED_TIMES.match(line[1]):
            raise UserError(
                f"documents: line {number + 1} has no times of a cue: {line[1].strip()[:60]!r}"
            )
        is_number = line[1].strip().isdigit() and _TIMES.match(following) is not None
        ends = times or is_number or (is_vtt and not line[1])
        if cue is not None and ends:
            last = cue.end = line.start()
            yield cue
            cue = None
        if times:
            opens, closes = map(_seconds, times.groups())
            comment = _COMMENT.search(subtitles, last, line.start()) if is_vtt else None
            cue = _Cue(line.end(), len(subtitles), opens, closes, comment is not None)
    if cue is not None:
        yield cue


def _seconds(time: str) -> float:
    seconds = 0.0
    for part in time.lstrip("-").split(":"):
        seconds = 60 * seconds + float(part.replace(",", "."))
    return -seconds if time.startswith("-") else seconds


def _lines(subtitles: str, cue: _Cue, is_vtt: bool) -> Iterator[_Line]:
    """The texts of a cue. The data of a metadata track are none."""
    if is_vtt and _is_data(subtitles[cue.start : cue.end]):
        return
    voice = ""
    for rows in _rows(subtitles, cue):
        yield from _line_of(rows, cue, voice, is_vtt)
        voice = _voice_after(subtitles, rows[0].start(), rows[-1].end(), voice)


def _rows(subtitles: str, cue: _Cue) -> Iterator[list[re.Match[str]]]:
    """The rows of each text of a cue."""
    rows: list[re.Match[str]] = []
    for row in _LINE.finditer(subtitles, cue.start, cue.end):
        is_empty = not row[1].strip()
        if rows and (is_empty or _OWN_LINE.match(_TAG.sub("", row[1]).lstrip())):
            yield rows
            rows = []
        if not is_empty:
            rows.append(row)
    if rows:
        yield rows


def _voice_after(subtitles: str, start: int, end: int, voice: str) -> str:
    """The speaker after a part of a cue, before which `voice` spoke."""
    voices = _VOICE.findall(subtitles, start, end)
    return voices[-1] if voices else voice


def _is_data(cue: str) -> bool:
    """Return whether a cue is an object of JSON."""
    if not cue.lstrip().startswith("{"):
        return False
    try:
        json.loads(cue)
    except ValueError:
        return False
    return True


def _line_of(rows: Sequence[re.Match[str]], cue: _Cue, voice: str, is_vtt: bool) -> Iterator[_Line]:
    """The text of some rows, if they have one. Tags around it are no part of it, unless there are tags in it."""
    start = rows[0].start()
    events = list(_events(rows[0].string[start : rows[-1].end(1)]))
    decode = unescape if is_vtt else str
    texts = [
        number
        for number, event in enumerate(events)
        if event.kind == "text" and decode(event.raw).strip()
    ]
    if not texts:
        return
    first = texts[0]
    last = texts[-1] + 1
    if any(event.kind != "text" for event in events[first:last]):
        first = 0
        last = len(events)
    make = partial(Passage, escape=partial(escape, quote=False) if is_vtt else str)
    lengths = [len(_TAG.sub("", row[1]).strip()) for row in rows]
    start += len(raw_of(events[:first]))
    for piece in passage_of(events[first:last], decode, passage=make):
        if isinstance(piece, Passage):
            own = _voice_after(rows[0].string, rows[0].start(), start, voice)
            yield _Line(cue, own, start, piece, lengths)
        else:
            start += len(piece)


def _events(content: str) -> Iterator[Event]:
    """The texts and tags of a cue."""
    for number, piece in enumerate(_TAG.split(content)):
        if number % 2:
            yield _tag_event(piece)
        elif piece:
            yield Event("text", "", piece)


def _tag_event(tag: str) -> Event:
    switch = _SWITCH.fullmatch(tag)
    if switch is not None:
        return Event("start" if switch[2] == "1" else "end", f"\\{switch[1]}", tag)
    name = re.match(r"</?([A-Za-z]+)", tag)
    if name is None:
        return Event("point", "", tag)
    return Event("end" if tag.startswith("</") else "start", f"<{name[1].lower()}", tag)


def _shared(group: list[_Line], parts: Sequence[TranslatedPart]) -> list[str]:
    """The markup of the translation of each line of a group."""
    if len(group) == 1:
        passage = group[0].passage
        return [_with_clocks_in_order(passage.raw, passage.translated(parts))]
    translation = "".join(part.target for part in parts)
    texts = _cut(translation, [len(line.text) for line in group])
    return [line.passage.escape(text) for line, text in zip(group, texts, strict=True)]


def _with_clocks_in_order(source: str, translation: str) -> str:
    """A translation whose times between words increase as those of the source do. Players need that."""
    clocks = iter(_CLOCK.findall(source))
    return _CLOCK.sub(lambda clock: next(clocks, clock[0]), translation)


def _goes_on(line: _Line, following: _Line) -> bool:
    """Return whether a sentence goes on in the next cue. A text with tags is translated alone."""
    if line.passage.elements or following.passage.elements:
        return False
    if line.voice != following.voice or _NAME.match(following.text):
        return False
    if following.cue.follows_comment or following.cue.opens < line.cue.opens:
        return False
    if following.cue.opens > line.cue.closes + _LONGEST_PAUSE:
        return False
    goes_on = following.text[:1].islower() or line.text.endswith((",", "，", "、"))
    return goes_on and not _ENDS.search(line.text)


def _cut(text: str, lengths: Sequence[int]) -> list[str]:
    """A text in pieces of about these proportions, cut between words."""
    first = next((place for place, letter in enumerate(text) if letter.isalnum()), 0)
    breaks = [place for place in break_points(text) if place > first]
    inside = {place for tag in _TAG.finditer(text) for place in range(*tag.span())}
    if inside:
        breaks = [
            place for place in breaks if place - 1 not in inside and text[place - 1].isspace()
        ]
    # the letters outside tags before each place
    shown = [*accumulate((place not in inside for place in range(len(text))), initial=0)]
    pieces = []
    start = 0
    for number, length in enumerate(accumulate(lengths[:-1]), start=1):
        goal = shown[len(text)] * length / sum(lengths)
        free = [place for place in breaks if place > start]
        # Places for the pieces after this one, if there are enough.
        free = free[: max(1, len(free) - len(lengths) + number + 1)]
        end = min(free, key=lambda place: abs(shown[place] - goal), default=len(text))
        pieces.append(text[start:end].strip())
        start = end
    return [*pieces, text[start:].strip()]
