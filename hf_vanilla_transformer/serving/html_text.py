"""HTML as text to translate, and HTML again: every tag, comment and entity outside the text stays as it was written.

A passage is what stands between two block-level tags. Its inline elements, such as links, are put around the words of
the translation that are aligned with their words. Words are separated by white space, as in `inference.alignment`, and
punctuation at their ends counts for itself.

No text of a translation becomes a tag: it is escaped.
"""

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from ..inference.alignment import Link

_INLINE = frozenset(
    ("a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img", "ins", "kbd")
    + ("label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var")
    + ("wbr",)
)
_VOID = frozenset(["img", "wbr"])

#: Elements whose content is not translated, like those with `translate="no"`.
_KEPT = frozenset(["script", "style", "pre", "textarea", "svg", "math", "template", "noscript", "iframe"])

_SPACES = re.compile(r"[ \t\n\r\f]+")  # what HTML collapses; not the no-break space

_MAX_UNITS = 16  # of a word; a longer one, such as an address, is a unit
_MAX_DEPTH = 64  # of inline elements; tags of deeper ones stand alone

_UNIT = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")  # a word without its punctuation, or one punctuation mark


@dataclass(frozen=True)
class _Event:
    """A tag, a text, or other markup, as it is written."""

    kind: str  # "start", "end", "text" or "other"
    tag: str
    raw: str
    kept: bool = False  # a start tag whose element is not to be translated


class _Events(HTMLParser):
    """The events of a document, whose `raw`, one after the other, is the document."""

    def __init__(self, document: str):
        super().__init__(convert_charrefs=False)
        self._starts = [0, *(match.end() for match in re.finditer("\n", document))]  # of the lines
        self._found: list[tuple[int, str, str, bool]] = []
        self.feed(document)
        self.close()
        if document and (not self._found or self._found[0][0]):  # what the parser skips
            self._found.insert(0, (0, "text" if not self._found else "other", "", False))
        ends = [start for start, *_ in self._found[1:]] + [len(document)]
        self.events = [
            _Event(kind, tag, document[start:end], kept)
            for (start, kind, tag, kept), end in zip(self._found, ends, strict=False)
        ]

    def _add(self, kind: str, tag: str = "", kept: bool = False) -> None:
        line, column = self.getpos()
        self._found.append((self._starts[line - 1] + column, kind, tag, kept))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        marked = given.get("translate") == "no" or "notranslate" in (given.get("class") or "").split()
        self._add("start", tag, tag in _KEPT or marked)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add("other" if tag not in _INLINE else "point", tag)

    def handle_endtag(self, tag: str) -> None:
        self._add("end", tag)

    def handle_data(self, data: str) -> None:
        self._add("text")

    def handle_entityref(self, name: str) -> None:
        self._add("text")

    def handle_charref(self, name: str) -> None:
        self._add("text")

    def handle_comment(self, data: str) -> None:
        self._add("other")

    def handle_decl(self, decl: str) -> None:
        self._add("other")

    def handle_pi(self, data: str) -> None:
        self._add("other")

    def unknown_decl(self, data: str) -> None:
        self._add("other")


@dataclass
class _Element:
    """An inline element, or a tag without its counterpart, of a passage."""

    opening: str
    start: int  # in the text of the passage
    closing: str = ""
    end: int = 0
    children: list["_Element"] = field(default_factory=list)


@dataclass(frozen=True)
class TranslatedPart:
    """A sentence of a passage, or its layout, for which `links` is None and both texts are the same.

    `links` are (source word, target word), both counted from 0 in this part.
    """

    source: str
    target: str
    links: Sequence[Link] | None = None


@dataclass(frozen=True)
class Passage:
    """Text between two block-level tags, and its inline elements."""

    text: str
    elements: list[_Element]

    def html(self, parts: Sequence[TranslatedPart]) -> str:
        """The translation, escaped, with every inline tag exactly once.

        Args:
            parts: whose sources are, one after the other, the text of this passage; `links` only matter where there
                are inline elements.
        """
        target = "".join(part.target for part in parts)
        return _Placement(self.text, target, parts).html(self.elements) if self.elements else _escape(target)


def split_html(document: str) -> list["str | Passage"]:
    """Markup, which stays as it is, and passages to translate, in their order."""
    pieces: list[str | Passage] = []
    run: list[_Event] = []
    kept: list[str] = []  # tags of open elements that are not to be translated, and of their kin inside
    for event in _Events(document).events:
        if not (kept or event.kept) and (event.kind == "text" or event.tag in _INLINE):
            run.append(event)
            continue
        pieces += [*_passage(run), event.raw]
        run = []
        if event.kind == "start" and event.tag not in _VOID and (not kept or event.tag == kept[0]):
            kept += [event.tag] if kept or event.kept else []
        elif event.kind == "end" and kept and event.tag == kept[0]:
            kept.pop()
    return [piece for piece in pieces + _passage(run) if piece != ""]


def join_html(pieces: Sequence["str | Passage"], translations: Iterable[str]) -> str:
    """The document with its passages, in their order, replaced by this HTML."""
    following = iter(translations)
    return "".join(piece if isinstance(piece, str) else next(following) for piece in pieces)


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _passage(run: list[_Event]) -> list["str | Passage"]:
    """A passage between its outer white space; markup alone where there is no text."""
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
            text += more.lstrip(" ") if not text or text.endswith(" ") else more
        elif open_elements and open_elements[-1][0] == index:
            _, element = open_elements.pop()
            element.closing, element.end = event.raw, len(text)
        else:
            siblings.append(_Element(event.raw, len(text), end=len(text)))
            if index in ends:
                open_elements.append((ends[index], siblings[-1]))
    before, after = _SPACES.match(texts[0]), _SPACES.search(texts[-1][len(texts[-1].rstrip(" \t\n\r\f")) :])
    passage = Passage(text.rstrip(" "), roots)
    return [before[0] if before else "", passage, after[0] if after else ""]


def _matching_ends(run: list[_Event]) -> dict[int, int]:
    """Index of a start tag -> that of its end tag, for the elements that are nested properly."""
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
    """Where the inline elements of a passage stand in its translation."""

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
            found: list[set[int]] = [set() for _ in word]
            for j in links.get(i, []):
                for linked, others in zip(found, _corresponding(word, targets[j : j + 1]), strict=True):
                    linked.update(numbers[other] for other in others)
            self.sources += word
            self.linked += found
        # the full stop of a sentence, which is often attached to another word
        if sources and targets and not targets[-1][-1].is_word and sources[-1][-1].text == targets[-1][-1].text:
            self.linked[-1].add(numbers[targets[-1][-1]])

    def html(self, elements: list[_Element]) -> str:
        whole = _Element("", 0, "", self.source_length, elements)
        return self._inside(whole, 0, len(self.targets), 0, len(self.target))

    def _inside(self, parent: _Element, first: int, last: int, begin: int, end: int) -> str:
        """HTML of the target's characters [begin, end), which are those of its units [first, last), with children."""
        found, position = [], begin
        for element, start, stop in self._spans(parent, first, last):
            if start < last and not element.opening.startswith("</"):
                opens = self.targets[start].start
            else:
                opens = self.targets[start - 1].end if start > first else begin
            opens = max(opens, position)
            closes = self.targets[stop - 1].end if stop > start else opens
            inner = self._inside(element, start, stop, opens, closes)
            found += [_escape(self.target[position:opens]), element.opening, inner, element.closing]
            position = closes
        return "".join(found) + _escape(self.target[position:end])

    def _spans(self, parent: _Element, first: int, last: int) -> list[tuple[_Element, int, int]]:
        """The units [start, stop) of each child, which do not overlap, in the order of the translation."""
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
        found, position = [], first
        for index, (start, order, stop) in enumerate(spans):
            start = max(start, position)
            following = spans[index + 1][0] if index + 1 < len(spans) else last
            position = stop = max(start, min(stop, following) if following > start else stop)
            found.append((parent.children[order], start, stop))
        return found

    def _units_within(self, element: _Element) -> range:
        """The source units that have a character of an element."""
        return range(bisect_right(self.ends, element.start), bisect_left(self.starts, element.end))

    def _next_target(self, position: int, first: int, last: int) -> int:
        """The target unit of the first aligned source unit from a position on; `last` where there is none."""
        for linked in self.linked[bisect_left(self.starts, position) :]:
            targets = [target for target in linked if first <= target < last]
            if targets:
                return min(targets)
        return last


def _units_of_words(text: str, start: int) -> list[list[_TextUnit]]:
    """For each word, as white space separates them, its units."""
    words = []
    for word in re.finditer(r"\S+", text):
        units = [(word.start() + unit.start(), unit[0]) for unit in _UNIT.finditer(word[0])]
        if not 0 < len(units) <= _MAX_UNITS:
            units = [(word.start(), word[0])]
        words.append([_TextUnit(start + at, start + at + len(unit), unit) for at, unit in units])
    return words


def _corresponding(word: list[_TextUnit], others: list[list[_TextUnit]]) -> list[list[_TextUnit]]:
    """For each unit of a word, those of a word aligned with it: words, or the same punctuation.

    Args:
        others: the aligned word, or nothing. Where one of both has punctuation only, all its units belong together.
    """
    other = others[0] if others else []
    alone = not any(each.is_word for each in word) or not any(each.is_word for each in other)
    return [
        [each for each in other if alone or (unit.is_word and each.is_word) or unit.text == each.text] for unit in word
    ]
