"""The text of an element of XML with its inline elements, read as events, and written again from a translation.

In the markup of a passage each element is a mark: two control characters that XML does not allow, with a number
between them. So a translation cannot contain or break one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from ..utils.safe_xml import XmlElement, local_name, xml_characters
from .passages import Event, Passage, matching_ends, names, passage_of, split_events

_MARK = re.compile("\x01(\\d+)\x02")

#: Styles of code by the names that Word, LibreOffice and pandoc give them, without case and spaces.
_CODE = names(
    "htmlcode htmlkeyboard htmlpreformatted htmlsample htmlvariable preformattedtext sourcecode sourcetext "
    "verbatimchar"
)
_TAGS = names("start end")
#: Elements of DOCX between a container and its words.
_INNER = (("sdt", "sdtContent"), ("r", "ruby"), ("ruby", "rubyBase"))

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


class Role(NamedTuple):
    """How an element stands in the text around it."""

    #: "text", "container" (it encloses words, as a link does), "start" or "end" (one of two elements around words),
    #: "point" (inside a sentence), "other" (between sentences) or "dropped"
    kind: str
    name: str = ""  #: of a start and its end, or of the format of a text
    text: str = ""  #: that the element stands for


class _Mark(NamedTuple):
    """A node of a passage, or the start or the end of a container or a format."""

    kind: str  # "start", "end" or "node"
    node: "XmlElement | None" = None
    form: str = ""  # of the words in it that have no format of their own


class InlineText:
    """The text of an element. A format of documents says by `role` how the children are read."""

    is_mixed = True  #: whether texts stand between elements
    collapses = False  #: whether white space does

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        #: the numbers of the marks at the ends of each range, such as a bookmark
        self._ranges: dict[str, dict[str, int]] = {}

    def role(self, element: XmlElement) -> Role:
        """How a child of a container is read."""
        raise NotImplementedError

    def filling(self, source: XmlElement, target: XmlElement) -> Filling:
        """The pieces of an element, whose nodes move to `target` when their translation is written."""
        events, form = self.content(source)
        passage = partial(Passage, escape=xml_characters)
        make = partial(passage_of, unescape=str, collapse=self.collapses, passage=passage)
        return split_events(events, make), partial(self._write, target, form)

    def content(self, container: XmlElement) -> tuple[list[Event], str]:
        """The events of a container, and the format of its words without a format of their own."""
        events = self._text(container.text)
        for child in container:
            events += self._child(child) + self._text(child.tail)
        return events, ""

    def _text(self, text: str | None) -> list[Event]:
        return [Event("text", "", text)] if text and self.is_mixed else []

    def _child(self, child: XmlElement) -> list[Event]:
        kind, name, text = self.role(child) if local_name(child) else Role("point")
        if kind == "dropped":
            return []
        if kind == "text":
            return [Event("text", name, text)]
        if kind == "container":
            return self._enclosed(child)
        if kind in _TAGS:
            self._ranges.setdefault(name, {})[kind] = len(self._marks)
        return [self.event(kind, name, _Mark("node", child))]

    def event(self, kind: str, tag: str, mark: _Mark) -> Event:
        """An event for a mark."""
        self._marks.append(mark)
        return Event(kind, tag, f"\x01{len(self._marks) - 1}\x02")

    def between(
        self, events: list[Event], name: str, form: str, node: "XmlElement | None" = None
    ) -> list[Event]:
        """Events between the marks of a container or of a format."""
        start = self.event("start", name, _Mark("start", node, form))
        return [start, *events, self.event("end", name, _Mark("end"))]

    def _enclosed(self, container: XmlElement) -> list[Event]:
        """The events of a container between its tags.

        Ends of ranges that are not both in the container are points.
        """
        inner, form = self.content(_inner(container))
        ends = matching_ends(inner)
        paired = {*ends, *ends.values()}
        for number, event in enumerate(inner):
            if event.kind in _TAGS and number not in paired:
                inner[number] = replace(event, kind="point")
        return whole_or_apart(self.between(inner, local_name(container), form, container))

    def _write(self, target: XmlElement, form: str, markup: str) -> None:
        """Replace the content of an element by a translated one."""
        _empty(target)
        open_elements = [(target, form)]
        for piece in self._pieces(markup):
            parent, form = open_elements[-1]
            if isinstance(piece, str):
                self.add_text(parent, xml_characters(piece), form)
                continue
            if piece.node is not None:
                piece.node.tail = None
                parent.append(piece.node)
            if piece.kind == "start":
                if piece.node is not None:
                    parent = _inner(piece.node)
                    _empty(parent)
                open_elements.append((parent, piece.form))
            elif piece.kind == "end" and len(open_elements) > 1:
                open_elements.pop()

    def _pieces(self, markup: str) -> Iterator["str | _Mark"]:
        """The texts and marks of a translation. Each range starts before it ends."""
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

    def add_text(self, parent: XmlElement, text: str, form: str) -> None:
        """Add a text at the end of an element."""
        last = next(parent.iterchildren(reversed=True), None)  # `len` counts the children
        if last is None:
            parent.text = (parent.text or "") + text
        else:
            last.tail = (last.tail or "") + text


def whole_or_apart(events: list[Event]) -> list[Event]:
    """The events of an element. If one between its tags ends a passage, these do, so that no word crosses them."""
    if any(event.kind == "other" for event in events):
        events[0] = replace(events[0], kind="other")
        events[-1] = replace(events[-1], kind="other")
    return events


def _inner(container: XmlElement) -> XmlElement:
    """The element with the words of a container: in a ruby annotation of DOCX those of the annotated text."""
    for outer, name in _INNER:
        content = child_of(container, name) if local_name(container) == outer else None
        container = container if content is None else content
    return container


def _empty(element: XmlElement) -> None:
    """Remove the text and the children of an element but its properties."""
    element.text = None
    for child in list(element):
        if not local_name(child).endswith("Pr"):
            element.remove(child)


def joined_markup(pieces: Sequence["str | Passage"]) -> str:
    """The markup of pieces without a translation."""
    return "".join(piece if isinstance(piece, str) else piece.raw for piece in pieces)
