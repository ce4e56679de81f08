"""Passages of text in a document, whatever its format, and their translations in its markup.

A format gives its texts and its markup as events. A passage is the text between two events that end one. Its inline
elements, such as links, enclose the words of the translation that are aligned with their words
(`inference.placement`).
"""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ..inference.placement import Element, Place, Placement, TranslatedPart, TranslateTexts

#: White space that collapses in HTML. A no-break space does not.
_SPACES = re.compile(r"[ \t\n\r\f]+")

#: Escapes a text for a format, or reads an escaped one.
ChangeText: TypeAlias = Callable[[str], str]

_MAX_DEPTH = 64  # of inline elements. Deeper tags are elements without an end


def names(text: str) -> frozenset[str]:
    """The names in a text, as a set."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Event:
    """A tag, a text, or other markup, verbatim."""

    kind: str  # "start", "end", "text", "point" (inline, verbatim: a comment or a whole element) or "other"
    tag: str
    raw: str
    kept: bool = False  # the start tag of an element that is not translated
    block: bool = False
    written: str | None = None  # in a translation, if it is not `raw`
    wanted: bool = False  # the start tag of an element that is translated, also in a kept one


@dataclass(frozen=True)
class Passage:
    """The text between two events that end one, and its inline elements."""

    text: str
    elements: list[Element]
    raw: str
    #: for the pieces of the translation
    escape: ChangeText = partial(html.escape, quote=False)

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        """The escaped translation with every inline tag exactly once, or the passage verbatim if it has not changed.

        The joined sources of the parts are its text. Their links matter only if there are inline elements.
        """
        if all(part.target == part.source for part in parts):
            return self.raw
        return with_elements(self.text, self.elements, parts, self.escape)


def with_elements(
    text: str,
    elements: list[Element],
    parts: Sequence[TranslatedPart],
    escape: ChangeText,
) -> str:
    """The translation of a text with its inline elements, each exactly once, where the alignment places it."""
    placement = Placement(text, parts, elements)

    def inside(outer: Place | None, position: int, end: int) -> str:
        pieces = []
        for place in placement.places(outer):
            element = place.element
            inner = inside(place, place.opens, place.closes)
            pieces += [
                escape(placement.target[position : place.opens]),
                element.opening,
                inner,
                element.closing,
            ]
            position = place.closes
        return "".join(pieces) + escape(placement.target[position:end])

    return inside(None, 0, len(placement.target))


def split_events(
    events: Iterable[Event], passages: Callable[[list[Event]], list["str | Passage"]]
) -> list["str | Passage"]:
    """Verbatim markup, and the passages that a function makes of the events between block-level markup."""
    pieces: list[str | Passage] = []
    run: list[Event] = []
    for event in events:
        if (
            event.kind == "start"
            and event.tag == "a"
            and run
            and (run[-1].kind, run[-1].tag) == ("end", "a")
        ):
            pieces += passages(run)  # links of a menu
            run = []
        if event.kind in ("text", "point") or (event.kind != "other" and not event.block):
            run.append(event)
            continue
        pieces += [*passages(run), event.raw]
        run = []
    return [piece for piece in pieces + passages(run) if piece != ""]


def passage_of(
    run: list[Event],
    unescape: ChangeText = html.unescape,
    collapse: bool = True,
    passage: Callable[[str, list[Element], str], Passage] = Passage,
) -> list["str | Passage"]:
    """A passage between its outer white space and tags, or only the markup if there is no text.

    With `collapse`, white space on both sides of a tag collapses, and becomes part of the tag. `passage` makes the
    passage of its text, its outermost elements and its markup.
    """
    texts = [
        index
        for index, event in enumerate(run)
        if event.kind == "text" and unescape(event.raw).strip()
    ]
    if not texts:
        return [raw_of(run)]
    start, stop = extent(run, texts[0], texts[-1])
    raw = raw_of(run[start:stop])
    content = _Content(run[start:stop], unescape, collapse)
    before = content.space_before
    after = content.space_after
    if not (raw.startswith(before) and raw.endswith(after)):  # white space as an entity
        before = ""
        after = ""
    inner = raw[len(before) : len(raw) - len(after)]
    made = passage(content.text, content.roots, inner)
    return [raw_of(run[:start]) + before, made, after + raw_of(run[stop:])]


def raw_of(events: Iterable[Event]) -> str:
    return "".join(event.raw for event in events)


class _Content:
    """The text of some events, and its elements.

    Attributes:
        text: the text.
        roots: the outermost elements.
        space_before, space_after: white space around the text, if it collapses and no tag has it.
    """

    def __init__(self, run: list[Event], unescape: ChangeText, collapse: bool):
        self.text = ""
        self.roots: list[Element] = []
        self.space_before = ""
        self.space_after = ""
        self._collapse = collapse
        self._ends = matching_ends(run)
        self._open: list[tuple[int, Element]] = []  # with the index of the end tag
        # The first and the last tag since the last text, with the name of its field.
        self._first_tag: tuple[Element, str] | None = None
        self._last_tag: tuple[Element, str] | None = None
        for index, event in enumerate(run):
            if event.kind == "text":
                self._add_text(unescape(event.raw))
            else:
                markup = event.raw if event.written is None else event.written
                self._add_tag(index, event.tag, markup)
        if collapse and self.text.endswith(" "):
            self._drop_last_space()
        else:
            self.space_after = ""

    def _add_text(self, text: str) -> None:
        space = _SPACES.match(text)
        follows_space = not self.text or self.text.endswith(" ")
        if space and follows_space and (self._collapse or self._last_tag):
            text = text[space.end() :]
            if self._last_tag:
                _add_space(*self._last_tag, after=space[0])
            elif not self.text:
                self.space_before += space[0]
        if text:
            self.text += _SPACES.sub(" ", text) if self._collapse else text
            self.space_after = text[len(text.rstrip(" \t\n\r\f")) :]
            self._first_tag = None
            self._last_tag = None

    def _add_tag(self, index: int, name: str, markup: str) -> None:
        if self._open and self._open[-1][0] == index:
            _, element = self._open.pop()
            element.closing = markup
            element.end = len(self.text)
            self._last_tag = element, "closing"
        else:
            element = Element(markup, len(self.text), end=len(self.text), name=name)
            siblings = self._open[-1][1].children if self._open else self.roots
            siblings.append(element)
            self._last_tag = element, "opening"
            if index in self._ends:
                self._open.append((self._ends[index], element))
        self._first_tag = self._first_tag or self._last_tag

    def _drop_last_space(self) -> None:
        """Take a space off the end of the text. A tag after it has it."""
        self.text = self.text[:-1]
        _clip(self.roots, len(self.text))
        if self._first_tag:
            _add_space(*self._first_tag, before=self.space_after)
            self.space_after = ""


def extent(run: list[Event], first: int, last: int) -> tuple[int, int]:
    """The part of a run that is a passage with the texts from `first` to `last`.

    Tags without a partner and white space that stand before or after all text, and in no element with text, must not
    move with a word.
    """
    ends = matching_ends(run)
    starts = {end: start for start, end in ends.items()}

    def is_loose(index: int) -> bool:
        event = run[index]
        is_tag = event.kind in ("start", "end")
        return event.kind == "text" or (is_tag and index not in ends and index not in starts)

    start = 0
    stop = len(run)
    closed = -1
    opened = len(run)
    for index in range(first):
        if is_loose(index) and closed < index:
            start = index + 1
        closed = max(closed, ends.get(index, -1))
    for index in reversed(range(last + 1, len(run))):
        if is_loose(index) and opened > index:
            stop = index
        opened = min(opened, starts.get(index, opened))
    return start, stop


def _add_space(element: Element, tag: str, before: str = "", after: str = "") -> None:
    setattr(element, tag, before + getattr(element, tag) + after)


def _clip(elements: list[Element], end: int) -> None:
    for element in elements:
        element.start = min(element.start, end)
        element.end = min(element.end, end)
        _clip(element.children, end)


def matching_ends(run: list[Event]) -> dict[int, int]:
    """Index of a start tag -> index of its end tag, for properly nested elements."""
    ends: dict[int, int] = {}
    stack: list[int] = []
    open_tags: Counter[str] = Counter()  # of the stack
    for index, event in enumerate(run):
        if event.kind == "start":
            stack.append(index)
            open_tags[event.tag] += 1
        elif event.kind == "end" and open_tags[event.tag]:
            while run[stack[-1]].tag != event.tag:
                open_tags[run[stack.pop()].tag] -= 1
            start = stack.pop()
            open_tags[event.tag] -= 1
            if len(stack) < _MAX_DEPTH:
                ends[start] = index
    return ends


def passages_of(documents: Iterable[Sequence["str | Passage"]]) -> list[Passage]:
    return [piece for pieces in documents for piece in pieces if isinstance(piece, Passage)]


def join_pieces(
    pieces: Sequence["str | Passage"], translated: Iterator[Sequence[TranslatedPart]]
) -> str:
    """Join a document, with the translated parts of its passages in place of these."""
    return "".join(
        piece if isinstance(piece, str) else piece.translated(next(translated)) for piece in pieces
    )


def translate_pieces(pieces: Sequence["str | Passage"], translate: TranslateTexts) -> str:
    """Translate the passages of a document in one call, and join it."""
    return join_pieces(pieces, iter(translate([passage.text for passage in passages_of([pieces])])))
