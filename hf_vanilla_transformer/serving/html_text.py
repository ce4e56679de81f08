"""Split HTML into passages of text, and put their translations in their place. Tags and comments stay verbatim.

A passage is the text between two block-level tags. Its inline elements, such as links, enclose the words of the
translation that are aligned with their words. White space separates words, as in `inference.alignment`. Punctuation at
the ends of a word is aligned separately. Translations are escaped, so that none of their text becomes a tag.
"""

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..inference.alignment import Link
from .html_scanner import scan

#: Elements that end a passage. Every other element is inline, as in HTML, also an unknown one.
_BLOCK = frozenset(
    ("address", "area", "article", "aside", "audio", "base", "blockquote", "body", "br", "caption", "center", "col")
    + ("colgroup", "dd", "details", "dialog", "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer")
    + ("form", "frame", "frameset", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hgroup", "hr", "html")
    + ("iframe", "legend", "li", "link", "main", "map", "menu", "meta", "nav", "noframes", "noscript", "object", "ol")
    + ("optgroup", "option", "p", "param", "pre", "section", "select", "source", "style", "summary", "table", "tbody")
    + ("td", "template", "textarea", "tfoot", "th", "thead", "title", "tr", "track", "ul", "video")
)
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "frame", "hr", "img", "input", "link", "meta", "param", "source", "track")
    + ("wbr",)
)

#: Elements with content that is not translated, like elements with `translate="no"`.
_KEPT = frozenset(
    ("script", "style", "pre", "textarea", "svg", "math", "template", "noscript", "iframe", "code", "kbd", "samp")
    + ("var", "time")
)

#: Elements without a required end tag, and the start tags that end them.
_ENDED_BY: dict[str, frozenset[str]] = {
    "p": _BLOCK - {"br"},
    "li": frozenset(["li"]),
    **dict.fromkeys(["dt", "dd"], frozenset(["dt", "dd"])),
    **dict.fromkeys(["option", "optgroup"], frozenset(["option", "optgroup"])),
    **dict.fromkeys(["td", "th"], frozenset(["td", "th", "tr", "tbody", "tfoot"])),
    **dict.fromkeys(["tr", "thead", "tbody", "tfoot"], frozenset(["tr", "thead", "tbody", "tfoot"])),
}

_SPACES = re.compile(r"[ \t\n\r\f]+")  # HTML collapses these, but not the no-break space

_MAX_UNITS = 16  # units of a word, but a longer word, such as an address, is one unit
_MAX_DEPTH = 64  # of inline elements. Deeper tags are elements without an end

_UNIT = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")  # a word without its punctuation, or one punctuation mark


@dataclass(frozen=True)
class _Event:
    """A tag, a text, or other markup, verbatim."""

    kind: str  # "start", "end", "text", "point" (inline, verbatim: a comment or a whole element) or "other"
    tag: str
    raw: str
    kept: bool = False  # the start tag of an element that is not translated


def _events(document: str) -> Iterator[_Event]:
    """The events of a document. Their `raw` joined is the document."""
    for kind, tag, raw, attributes in scan(document):
        if kind == "start":
            marked = attributes.get("translate", "").lower() == "no" or "notranslate" in (
                attributes.get("class", "").split()
            )
            yield _Event(kind, tag, raw, tag in _KEPT or marked)
        elif kind == "empty":
            yield _Event("other" if tag in _BLOCK else "point", tag, raw)
        else:
            yield _Event("point" if kind == "comment" else kind, tag, raw)


@dataclass
class _Element:
    """An inline element of a passage, or a tag without a counterpart."""

    opening: str
    start: int  # in the text of the passage
    closing: str = ""
    end: int = 0
    children: list["_Element"] = field(default_factory=list)

    def is_point_at(self, position: int) -> bool:
        return self.start == self.end == position and not self.closing


@dataclass(frozen=True)
class TranslatedPart:
    """A sentence of a passage, or layout with equal texts and no links."""

    source: str
    target: str
    links: Sequence[Link] | None = None  # (source word, target word), counted from 0 in this part


@dataclass(frozen=True)
class Passage:
    """The text between two block-level tags, and its inline elements."""

    text: str
    elements: list[_Element]

    def html(self, parts: Sequence[TranslatedPart]) -> str:
        """The escaped translation with every inline tag exactly once.

        Args:
            parts: their joined sources are the text of this passage. `links` matter only if there are inline elements.
        """
        target = "".join(part.target for part in parts)
        return _Placement(self.text, target, parts).html(self.elements) if self.elements else _escape(target)


def split_html(document: str) -> list["str | Passage"]:
    """Split a document into verbatim markup and passages to translate."""
    pieces: list[str | Passage] = []
    run: list[_Event] = []
    for event in _with_kept_elements_whole(list(_events(document))):
        if event.kind in ("text", "point") or (event.kind != "other" and event.tag not in _BLOCK):
            run.append(event)
            continue
        pieces += [*_passage(run), event.raw]
        run = []
    return [piece for piece in pieces + _passage(run) if piece != ""]


def _with_kept_elements_whole(events: list[_Event]) -> Iterator[_Event]:
    """The events, with each element that is not translated as one of them: a point if it is inline."""
    index = 0
    while index < len(events):
        event, stop = events[index], index + 1
        if event.kept and event.tag not in _VOID:
            stop = _end_of_element(events, index)
            raw = "".join(inner.raw for inner in events[index:stop])
            event = _Event("other" if event.tag in _BLOCK else "point", event.tag, raw)
        yield event
        index = stop


def _end_of_element(events: list[_Event], start: int) -> int:
    """The index after the element that starts at `start`: after its end tag, or where HTML implies its end."""
    open_tags = [events[start].tag]
    for index in range(start + 1, len(events)):
        kind, tag = events[index].kind, events[index].tag
        if kind == "end" and tag in open_tags:
            while open_tags.pop() != tag:
                pass
            if not open_tags:
                return index + 1
        elif kind == "end" and tag in _BLOCK and (open_tags[0] in _ENDED_BY or open_tags[0] not in _BLOCK):
            return index  # the end of the parent
        elif kind == "start" and tag not in _VOID:
            if tag in _ENDED_BY.get(open_tags[-1], ()):
                open_tags.pop()
                if not open_tags:
                    return index
            open_tags.append(tag)
    return len(events)


def join_html(pieces: Sequence["str | Passage"], translations: Iterable[str]) -> str:
    """Join a document, with `translations` in place of its passages."""
    following = iter(translations)
    return "".join(piece if isinstance(piece, str) else next(following) for piece in pieces)


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _passage(run: list[_Event]) -> list["str | Passage"]:
    """A passage between its outer white space, or only the markup if there is no text."""
    texts = [html.unescape(event.raw) for event in run if event.kind == "text"]
    if not "".join(texts).strip():
        return ["".join(event.raw for event in run)]
    ends, text = _matching_ends(run), ""
    roots: list[_Element] = []
    open_elements: list[tuple[int, _Element]] = []  # with the index of the end tag
    for index, event in enumerate(run):
        siblings = open_elements[-1][1].children if open_elements else roots
        if event.kind == "text":
            more = _SPACES.sub(" ", html.unescape(event.raw))
            if more.startswith(" ") and (not text or text.endswith(" ")):
                more = more[1:]
                if siblings and siblings[-1].is_point_at(len(text)):
                    siblings[-1].opening += " "  # the space after it
            text += more
        elif open_elements and open_elements[-1][0] == index:
            _, element = open_elements.pop()
            element.closing, element.end = event.raw, len(text)
        else:
            siblings.append(_Element(event.raw, len(text), end=len(text)))
            if index in ends:
                open_elements.append((ends[index], siblings[-1]))
    seen = [event for event in run if event.kind in ("text", "point")]
    before = _SPACES.match(texts[0]) if seen[0].kind == "text" else None
    ends_in_point = [event.kind for event in seen if event.raw.strip()][-1] == "point"
    after = _SPACES.search(texts[-1][len(texts[-1].rstrip(" \t\n\r\f")) :]) if not ends_in_point else None
    if text.endswith(" ") and ends_in_point:
        for number, element in enumerate(element for element in roots if element.is_point_at(len(text))):
            element.opening = " " * (number == 0) + element.opening  # the space before the last points
            element.start = element.end = len(text) - 1
    passage = Passage(text.rstrip(" "), roots)
    return [before[0] if before else "", passage, after[0] if after else ""]


def _matching_ends(run: list[_Event]) -> dict[int, int]:
    """Index of a start tag -> index of its end tag, for properly nested elements."""
    ends: dict[int, int] = {}
    stack: list[int] = []
    open_tags: Counter[str] = Counter()  # of the stack
    for index, event in enumerate(run):
        if event.kind == "start" and event.tag not in _VOID:
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


@dataclass(frozen=True)
class _TextUnit:
    start: int
    end: int
    text: str

    @property
    def is_word(self) -> bool:
        return self.text[0].isalnum() or self.text[0] == "_"


class _Placement:
    """Puts the inline elements of a passage around their translations."""

    def __init__(self, source: str, target: str, parts: Sequence[TranslatedPart]):
        self.target = target
        self.sources: list[_TextUnit] = []
        self.targets: list[_TextUnit] = []
        self.linked: list[set[int]] = []  # for each source unit, its target units
        source_start = target_start = 0
        for part in parts:
            self._add(part, source_start, target_start)
            source_start, target_start = source_start + len(part.source), target_start + len(part.target)
        self.source_length = len(source)
        self.starts, self.ends = [unit.start for unit in self.sources], [unit.end for unit in self.sources]

    def _add(self, part: TranslatedPart, source_start: int, target_start: int) -> None:
        """The units of a part, and the links between them."""
        sources, targets = _units_of_words(part.source, source_start), _units_of_words(part.target, target_start)
        first, numbers = len(self.targets), {}
        self.targets += [unit for word in targets for unit in word]
        for number, unit in enumerate(self.targets[first:], start=first):
            numbers[unit] = number
        links: dict[int, list[int]] = {}
        for i, j in [(i, i) for i in range(len(sources))] if part.links is None else part.links:
            links.setdefault(i, []).append(j)
        for i, word in enumerate(sources):
            linked: list[set[int]] = [set() for _ in word]
            for j in links.get(i, []):
                for of_unit, aligned in zip(linked, _corresponding(word, targets[j : j + 1]), strict=True):
                    of_unit.update(numbers[unit] for unit in aligned)
            self.sources += word
            self.linked += linked
        # the full stop of a sentence is often attached to a different word
        if sources and targets and not targets[-1][-1].is_word and sources[-1][-1].text == targets[-1][-1].text:
            self.linked[-1].add(numbers[targets[-1][-1]])

    def html(self, elements: list[_Element]) -> str:
        whole = _Element("", 0, "", self.source_length, elements)
        return self._inside(whole, 0, len(self.targets), 0, len(self.target))

    def _inside(self, parent: _Element, first: int, last: int, begin: int, end: int) -> str:
        """HTML of the target's units [first, last) and characters [begin, end), with the children of `parent`."""
        pieces, position = [], begin
        for element, start, stop in self._spans(parent, first, last):
            if start < last and not element.opening.startswith("</"):
                opens = self.targets[start].start
            else:
                opens = self.targets[start - 1].end if start > first else begin
            opens = max(opens, position)
            closes = self.targets[stop - 1].end if stop > start else opens
            inner = self._inside(element, start, stop, opens, closes)
            pieces += [_escape(self.target[position:opens]), element.opening, inner, element.closing]
            position = closes
        return "".join(pieces) + _escape(self.target[position:end])

    def _spans(self, parent: _Element, first: int, last: int) -> list[tuple[_Element, int, int]]:
        """Each child with its target units [start, stop), in the order of the translation, without overlap."""
        spans = []
        for order, element in enumerate(parent.children):
            units = self._units_within(element)
            targets = sorted(t for s in units for t in self.linked[s] if first <= t < last)
            if units and units == self._units_within(parent):
                spans.append((first, order, last))
            elif targets:
                spans.append((targets[0], order, targets[-1] + 1))
            else:
                at = self._next_target(element.start, first, last)
                spans.append((at, order, at))
        spans.sort()
        disjoint, position = [], first
        for index, (start, order, stop) in enumerate(spans):
            start = max(start, position)
            following = spans[index + 1][0] if index + 1 < len(spans) else last
            position = stop = max(start, min(stop, following) if following > start else stop)
            disjoint.append((parent.children[order], start, stop))
        return disjoint

    def _units_within(self, element: _Element) -> range:
        """The source units that share a character with an element."""
        return range(bisect_right(self.ends, element.start), bisect_left(self.starts, element.end))

    def _next_target(self, position: int, first: int, last: int) -> int:
        """The target unit of the first aligned source unit at or after `position`, or `last`."""
        for linked in self.linked[bisect_left(self.starts, position) :]:
            targets = [target for target in linked if first <= target < last]
            if targets:
                return min(targets)
        return last


def _units_of_words(text: str, start: int) -> list[list[_TextUnit]]:
    """The units of each word of a text that starts at position `start` of its passage."""
    words = []
    for word in re.finditer(r"\S+", text):
        units = [(word.start() + unit.start(), unit[0]) for unit in _UNIT.finditer(word[0])]
        if not 0 < len(units) <= _MAX_UNITS:
            units = [(word.start(), word[0])]
        words.append([_TextUnit(start + at, start + at + len(unit), unit) for at, unit in units])
    return words


def _corresponding(word: list[_TextUnit], aligned: list[list[_TextUnit]]) -> list[list[_TextUnit]]:
    """The units that correspond to each unit of a word: words to words, punctuation to the same punctuation.

    Args:
        aligned: the aligned word, or nothing. If either has punctuation only, all their units correspond.
    """
    other = aligned[0] if aligned else []
    alone = not any(unit.is_word for unit in word) or not any(unit.is_word for unit in other)
    return [
        [target for target in other if alone or (unit.is_word and target.is_word) or unit.text == target.text]
        for unit in word
    ]
