"""Text with inline elements in a tree of XML, as events for passages, and the tree of its translation.

In the markup of a passage each element is a mark: two control characters that XML does not allow, with a number
between them. So a translation cannot contain or break one.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from ..utils.safe_xml import XmlElement, local_name
from .passages import Event, Passage, matching_ends, names, passage_of

_MARK = re.compile("\x01(\\d+)\x02")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: Styles of code by the names that Word, LibreOffice and pandoc give them, without case and spaces.
_CODE = names(
    "htmlcode htmlkeyboard htmlpreformatted htmlsample htmlvariable preformattedtext sourcecode sourcetext "
    "verbatimchar"
)

_TAGS = names("start end")

#: The namespace of pictures, text boxes and shapes of ODT. Those at an end of a passage stay there.
_DRAWING = "opendocument:xmlns:drawing"

#: The pieces of a text of a document, and the function that writes their translation in its place.
Filling: TypeAlias = "tuple[list[str | Passage], Callable[[str], None]]"


def child_of(element: XmlElement, name: str) -> "XmlElement | None":
    """The first child of an element with a name, in any namespace."""
    return next((child for child in element if local_name(child) == name), None)


def attribute_of(element: XmlElement, name: str) -> str | None:
    """An attribute of an element, in any namespace."""
    values = (value for key, value in element.attrib.items() if key.rpartition("}")[2] == name)
    return next(values, None)


def is_code_style(style: str | None) -> bool:
    """Return whether a style of a word processor is one of code, by its name."""
    return style is not None and re.sub("_20_|[ _]", "", style).lower() in _CODE


def xml_passage(run: list[Event], collapse: bool = False) -> "list[str | Passage]":
    """A passage of XML, as `passage_of` makes it."""
    plain = partial(Passage, escape=xml_characters)
    return passage_of(run, unescape=str, collapse=collapse, passage=plain)


def xml_characters(text: str) -> str:
    """A text without the characters that XML does not allow."""
    return _NOT_XML.sub("", text)


@dataclass
class Mark:
    """A start tag, an end tag, or whole elements of a passage."""

    kind: str  # "start", "end", "nodes" or "part": a run and one of its children
    nodes: list[XmlElement] = field(default_factory=list)
    form: Any = None  # for the format of runs


class Marks:
    """The marks of a document."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        #: the numbers of the marks at the ends of each range, such as a bookmark, by kind
        self._ranges: dict[str, dict[str, int]] = {}

    def event(self, kind: str, tag: str, mark: Mark) -> Event:
        """An event of `passages` for a mark."""
        number = len(self._marks)
        self._marks.append(mark)
        return Event(kind, tag, f"\x01{number}\x02")

    def range_event(self, kind: str, name: str, mark: Mark) -> Event:
        """An event for an end of a range, which may cross other ranges. Its kind is "start" or "end"."""
        self._ranges.setdefault(name, {})[kind] = len(self._marks)
        return self.event(kind, name, mark)

    def read(self, markup: str) -> Iterator["str | Mark"]:
        """The texts and marks of a translated passage. Each range starts before it ends."""
        pieces = _MARK.split(markup)
        places = {int(pieces[place]): place for place in range(1, len(pieces), 2)}
        for ends in self._ranges.values():
            start = places.get(ends.get("start", -1), 0)
            end = places.get(ends.get("end", -1), start)
            if end < start:
                pieces[start], pieces[end] = pieces[end], pieces[start]
        for number, piece in enumerate(pieces):
            if number % 2:
                yield self._marks[int(piece)]
            elif piece:
                yield piece


def enclosed(start: Event, events: Iterable[Event], end: Event) -> list[Event]:
    """The events of an element between its tags.

    Ends of ranges that are not both in the element are points. If an event in it ends a passage, its tags do, too, so
    that no word moves into it or out of it.
    """
    inner = list(events)
    ends = matching_ends(inner)
    paired = {*ends, *ends.values()}
    for number, event in enumerate(inner):
        if event.kind in _TAGS and number not in paired:
            inner[number] = replace(event, kind="point")
    return whole_or_apart([start, *inner, end])


def whole_or_apart(events: list[Event]) -> list[Event]:
    """The events of an element. Its tags end a passage if an event between them does."""
    if any(event.kind == "other" for event in events):
        events[0] = replace(events[0], kind="other")
        events[-1] = replace(events[-1], kind="other")
    return events


@dataclass(frozen=True)
class Inline:
    """How the children of an element with text are read."""

    is_container: Callable[[XmlElement], bool]  #: whether it encloses words, as a link does
    is_kept: Callable[[XmlElement], bool]  #: whether it stays as it is, inside a sentence
    #: "start" or "end" and a name for both, if it is one of two elements around words
    end_of_range: Callable[[XmlElement], tuple[str, str] | None]
    #: the text that an element stands for
    as_text: Callable[[XmlElement], str | None] = lambda element: None
    copies: bool = False  #: for a translation next to its source


def element_events(element: XmlElement, marks: Marks, inline: Inline) -> Iterator[Event]:
    """The events of the content of an element. Elements that are neither kept nor containers end a passage."""
    if element.text:
        yield Event("text", "", xml_characters(element.text) if inline.copies else element.text)
    for child in element:
        text = inline.as_text(child)
        name = local_name(child)
        tail = child.tail
        end_of_range = inline.end_of_range(child)
        nodes = [copy.deepcopy(child) if inline.copies else child]
        nodes[0].tail = None if inline.copies else nodes[0].tail
        if text is not None:
            yield Event("text", "", text)
        elif end_of_range is not None:
            yield marks.range_event(*end_of_range, Mark("nodes", nodes))
        elif name and inline.is_container(child):
            inner = list(element_events(child, marks, inline))
            start = marks.event("start", name, Mark("start", [child]))
            yield from enclosed(start, inner, marks.event("end", name, Mark("end")))
        elif _DRAWING in str(child.tag):
            # An event without an end: see `extent`.
            yield marks.event("start", "drawing", Mark("nodes", nodes))
        elif not name or inline.is_kept(child):
            yield marks.event("point", name, Mark("nodes", nodes))
        else:
            yield marks.event("other", name, Mark("nodes", nodes))
        if tail:
            yield Event("text", "", tail)


def fill(element: XmlElement, markup: str, marks: Marks) -> None:
    """Replace the content of an element by a translated one."""
    pieces = list(marks.read(markup))
    for child in list(element):
        element.remove(child)
    element.text = None
    open_elements = [element]
    for piece in pieces:
        parent = open_elements[-1]
        if isinstance(piece, str):
            add_text(parent, xml_characters(piece))
        elif piece.kind == "start":
            shallow = parent.makeelement(
                piece.nodes[0].tag, piece.nodes[0].attrib, piece.nodes[0].nsmap
            )
            parent.append(shallow)
            open_elements.append(shallow)
        elif piece.kind == "end":
            if len(open_elements) > 1:
                open_elements.pop()
        else:
            for node in piece.nodes:
                node.tail = None
                parent.append(node)


def add_text(parent: XmlElement, text: str) -> None:
    """Add a text at the end of an element."""
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def joined_markup(pieces: Sequence["str | Passage"]) -> str:
    """The markup of pieces without a translation."""
    return "".join(piece if isinstance(piece, str) else piece.raw for piece in pieces)
