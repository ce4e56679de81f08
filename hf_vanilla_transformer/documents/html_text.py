"""Split HTML into passages of text, and put their translations in their place. Tags and comments stay verbatim.

A passage is the text between two block-level tags. Its inline elements, such as links, enclose the words of the
translation that are aligned with their words (`inference.placement`). Translations are escaped, so that none of their
text becomes a tag.
"""

import html
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from ..data.words import UNSPACED
from ..inference.placement import Element, Place, Placement, TranslatedPart, TranslateTexts
from .html_scanner import Token, scan


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Elements that end a passage. Every other element is inline, as in HTML, also an unknown one.
_BLOCK = names(
    "address area article aside audio base blockquote body br button caption center col colgroup dd details "
    "dialog dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header "
    "hgroup hr html iframe input legend li link main map menu meta nav noframes noscript object ol optgroup "
    "option p param pre section select source style summary table tbody td template textarea tfoot th thead title "
    "tr track ul video"
)
_VOID = names("area base br col embed frame hr img input link meta param source track wbr")

#: Elements with content that is not translated, like elements with `translate="no"`.
_KEPT = names(
    "script style pre textarea svg math template noscript iframe code kbd samp tt var time rt rp"
)

#: Elements without a required end tag, and the start tags that end them.
_ENDED_BY: dict[str, frozenset[str]] = {
    "p": _BLOCK - {"br"},
    "li": names("li"),
    **dict.fromkeys(["dt", "dd"], names("dt dd")),
    **dict.fromkeys(["option", "optgroup"], names("option optgroup")),
    **dict.fromkeys(["td", "th"], names("td th tr tbody tfoot")),
    **dict.fromkeys(["tr", "thead", "tbody", "tfoot"], names("tr thead tbody tfoot")),
}

_SPACES = re.compile(r"[ \t\n\r\f]+")  # HTML collapses these, but not the no-break space

_LETTERS = re.compile(rf"[^\W{UNSPACED}]+")
_NO_LETTER = re.compile(rf"[\W{UNSPACED}]")

_MAX_SCRIPT = 8  # events of a subscript or superscript. A longer one is an ordinary element
_MAX_DEPTH = 64  # of inline elements. Deeper tags are elements without an end


@dataclass(frozen=True)
class Event:
    """A tag, a text, or other markup, verbatim."""

    kind: str  # "start", "end", "text", "point" (inline, verbatim: a comment or a whole element) or "other"
    tag: str
    raw: str
    kept: bool = False  # the start tag of an element that is not translated
    block: bool = False
    written: str | None = None  # in a translation, if it is not `raw`


def _is_kept(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether an element of HTML is not translated."""
    marked = (
        attributes.get("translate", "").lower() == "no"
        or "notranslate" in attributes.get("class", "").split()
    )
    return marked or tag in _KEPT


@dataclass(frozen=True)
class Passage:
    """The text between two block-level tags, and its inline elements."""

    text: str
    elements: list[Element]
    raw: str
    #: for the pieces of the translation
    escape: Callable[[str], str] = partial(html.escape, quote=False)

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        """The escaped translation with every inline tag exactly once, or the passage verbatim if it has not changed.

        The joined sources of the parts are its text. Their links matter only if there are inline elements.
        """
        if all(part.target == part.source for part in parts):
            return self.raw
        return joined_pieces(self.text, self.elements, parts, self.escape)


def joined_pieces(
    text: str,
    elements: list[Element],
    parts: Sequence[TranslatedPart],
    escape: Callable[[str], str],
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


def split_html(document: str) -> list["str | Passage"]:
    """Split a document into verbatim markup and passages to translate."""
    events = whole_elements(html_event(token) for token in scan(document))
    return split_events(with_scripts_whole(events), passage_of)


def html_event(token: Token) -> Event:
    """The event of a piece of HTML."""
    block = token.tag in _BLOCK
    if token.kind == "empty":
        return Event("other" if block else "point", token.tag, token.raw, block=block)
    kept = token.kind == "start" and _is_kept(token.tag, token.attributes)
    return Event(
        "point" if token.kind == "comment" else token.kind, token.tag, token.raw, kept, block
    )


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


def whole_elements(found: Iterable[Event]) -> Iterator[Event]:
    """The events, with each element that is not translated as one of them: a point if it is inline."""
    events = list(found)
    index = 0
    while index < len(events):
        event = events[index]
        stop = index + 1
        if event.kept and event.tag not in _VOID:
            stop = _end_of_element(events, index)
            raw = "".join(inner.raw for inner in events[index:stop])
            event = Event("other" if event.block else "point", event.tag, raw)
        yield event
        index = stop


def _end_of_element(events: list[Event], start: int) -> int:
    """The index after the element that starts at `start`: after its end tag, or where HTML implies its end."""
    open_tags = [events[start].tag]
    for index in range(start + 1, len(events)):
        kind = events[index].kind
        tag = events[index].tag
        if kind == "end" and tag in open_tags:
            while open_tags.pop() != tag:
                pass
            if not open_tags:
                return index + 1
        elif (
            kind == "end"
            and tag in _BLOCK
            and (open_tags[0] in _ENDED_BY or open_tags[0] not in _BLOCK)
        ):
            return index  # the end of the parent
        elif kind == "start" and tag not in _VOID:
            if tag in _ENDED_BY.get(open_tags[-1], ()):
                open_tags.pop()
                if not open_tags:
                    return index
            open_tags.append(tag)
    return len(events)


def passages_of(documents: Iterable[Sequence["str | Passage"]]) -> list[Passage]:
    return [piece for pieces in documents for piece in pieces if isinstance(piece, Passage)]


def join_html(
    pieces: Sequence["str | Passage"], translated: Iterator[Sequence[TranslatedPart]]
) -> str:
    """Join a document, with the translated parts of its passages in place of these."""
    return "".join(
        piece if isinstance(piece, str) else piece.translated(next(translated)) for piece in pieces
    )


def translate_pieces(pieces: Sequence["str | Passage"], translate: TranslateTexts) -> str:
    """Translate the passages of a document in one call, and join it."""
    return join_html(pieces, iter(translate([passage.text for passage in passages_of([pieces])])))


def translate_html(document: str, translate: TranslateTexts) -> str:
    """Translate the text of a document."""
    return translate_pieces(split_html(document), translate)


def with_scripts_whole(events: Iterable[Event]) -> list[Event]:
    """The events, with each `sub` and `sup` directly after text as a point, such as a footnote's mark.

    If the word goes on after it, as in H<sub>2</sub>O, the word is part of the point.
    """
    queue = deque(events)
    whole = list[Event]()
    while queue:
        event = queue.popleft()
        before = whole[-1] if whole else None
        length = (
            _script_length(queue, event.tag)
            if event.kind == "start" and event.tag in ("sub", "sup")
            else 0
        )
        if (
            not length
            or not before
            or before.kind not in ("text", "point")
            or before.raw[-1:].isspace()
        ):
            whole.append(event)
            continue
        raw = event.raw + "".join(queue.popleft().raw for _ in range(length))
        rest = _LETTERS.match(queue[0].raw) if queue and queue[0].kind == "text" else None
        word = ""
        if before.kind == "point":
            word = whole.pop().raw
        elif rest:
            word = _NO_LETTER.split(before.raw)[-1]
            whole[-1] = Event("text", "", before.raw.removesuffix(word))
        if rest:
            queue[0] = Event("text", "", queue[0].raw[rest.end() :])
        whole.append(Event("point", event.tag, word + raw + (rest[0] if rest else "")))
        if rest and not queue[0].raw:
            queue.popleft()
    return [event for event in whole if event.raw]


def _script_length(following: "deque[Event]", tag: str) -> int:
    """The number of events up to the end tag of a short element, or 0."""
    for index, event in enumerate(islice(following, _MAX_SCRIPT)):
        if event.kind == "end" and event.tag == tag:
            return index + 1
        if event.kind == "other" or event.block:
            break
    return 0


def passage_of(
    run: list[Event],
    unescape: Callable[[str], str] = html.unescape,
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
        return ["".join(event.raw for event in run)]
    start, stop = extent(run, texts[0], texts[-1])
    outer_before, outer_after = (
        "".join(event.raw for event in outer) for outer in (run[:start], run[stop:])
    )
    run = run[start:stop]
    raw = "".join(event.raw for event in run)
    text = ""
    before = ""
    last_space = ""
    ends = matching_ends(run)
    roots: list[Element] = []
    open_elements: list[tuple[int, Element]] = []  # with the index of the end tag
    first_tag: tuple[Element, str] | None = None  # since the last text, with the name of its field
    last_tag = first_tag
    for index, event in enumerate(run):
        if event.kind == "text":
            more = unescape(event.raw)
            space = _SPACES.match(more)
            if space and (not text or text.endswith(" ")) and (collapse or last_tag):
                more = more[space.end() :]
                if last_tag:
                    _add_space(*last_tag, after=space[0])
                elif not text:
                    before += space[0]
            if more:
                text += _SPACES.sub(" ", more) if collapse else more
                last_tag = first_tag = None
                last_space = more[len(more.rstrip(" \t\n\r\f")) :]
            continue
        if open_elements and open_elements[-1][0] == index:
            _, element = open_elements.pop()
            element.closing = event.raw if event.written is None else event.written
            element.end = len(text)
            last_tag = element, "closing"
        else:
            element = Element(
                event.raw if event.written is None else event.written, len(text), end=len(text)
            )
            (open_elements[-1][1].children if open_elements else roots).append(element)
            last_tag = element, "opening"
            if index in ends:
                open_elements.append((ends[index], element))
        first_tag = first_tag or last_tag
    if collapse and text.endswith(" "):
        text = text[:-1]
        _clip(roots, len(text))
        if first_tag:
            _add_space(*first_tag, before=last_space)
            last_space = ""
    else:
        last_space = ""
    if not (raw.startswith(before) and raw.endswith(last_space)):  # white space as an entity
        before = last_space = ""
    inner = raw[len(before) : len(raw) - len(last_space)]
    return [outer_before + before, passage(text, roots, inner), last_space + outer_after]


def extent(run: list[Event], first: int, last: int) -> tuple[int, int]:
    """The part of a run that is a passage with the texts from `first` to `last`.

    Tags without a partner and white space that stand before or after all text, and in no element with text, must not
    move with a word.
    """
    ends = matching_ends(run)
    starts = {end: start for start, end in ends.items()}

    def is_loose(index: int) -> bool:
        event = run[index]
        is_tag = event.kind in ("start", "end") and event.tag not in _VOID
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
