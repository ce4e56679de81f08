"""Split HTML into passages of text between block-level tags. Tags and comments stay verbatim.

Translations are escaped, so that none of their text becomes a tag.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..inference.placement import TranslateTexts
from ..text.words import UNSPACED
from .html_scanner import Token, scan
from .passages import Event, Passage, names, passage_of, raw_of, split_events, translate_pieces

#: Elements that end a passage. Every other element is inline, as in HTML, also an unknown one.
_BLOCK = names(
    "address area article aside audio base blockquote body br button caption center col colgroup dd details "
    "dialog dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header "
    "hgroup hr html iframe input legend li link main map menu meta nav noframes noscript object ol optgroup "
    "option p param pre section select source style summary table tbody td template textarea tfoot th thead title "
    "tr track ul video"
)
_VOID = names("area base br col embed frame hr img input link meta param source track wbr")

#: Elements with content that is not translated, like elements with `translate="no"`: those whose content is no running
#: text, and those that are translated with `translate="yes"`.
_NEVER = names("script style pre textarea svg math template noscript iframe rt rp")
_KEPT = names("code kbd samp tt var time")

#: Elements without a required end tag, and the start tags that end them.
_ENDED_BY: dict[str, frozenset[str]] = {
    "p": _BLOCK - {"br"},
    "li": names("li"),
    **dict.fromkeys(["dt", "dd"], names("dt dd")),
    **dict.fromkeys(["option", "optgroup"], names("option optgroup")),
    **dict.fromkeys(["td", "th"], names("td th tr tbody tfoot")),
    **dict.fromkeys(["tr", "thead", "tbody", "tfoot"], names("tr thead tbody tfoot")),
}
_NEED_NO_END = _VOID | _ENDED_BY.keys() | names("html head body caption colgroup rt rp")

_LETTERS = re.compile(rf"[^\W{UNSPACED}]+")
_NO_LETTER = re.compile(rf"[\W{UNSPACED}]")
_TWO_WORDS = re.compile(r"[^\W\d_]{3,}\s+[^\W\d_]{3,}")

_SCRIPTS = names("sub sup")
_MAX_SCRIPT = 8  # events of a subscript or superscript. A longer one is an ordinary element


def _is_kept(tag: str, attributes: Mapping[str, str]) -> bool:
    """Return whether an element of HTML is not translated."""
    marked = (
        attributes.get("translate", "").lower() == "no"
        or "notranslate" in attributes.get("class", "").split()
    )
    return marked or tag in _NEVER or (tag in _KEPT and not _is_wanted(attributes))


def _is_wanted(attributes: Mapping[str, str]) -> bool:
    """Return whether an element is translated, also in one that is not. An empty value says so, too."""
    return attributes.get("translate", "no").lower() in ("", "yes")


def split_html(document: str) -> list["str | Passage"]:
    """Split a document into verbatim markup and passages to translate."""
    events = whole_elements(html_event(token) for token in scan(document))
    return split_events(events, passage_of)


def translate_html(document: str, translate: TranslateTexts) -> str:
    """Translate the text of a document."""
    return translate_pieces(split_html(document), translate)


def wrong_end(document: str) -> str:
    """The first end tag that does not end the last open element, with both lines, or "". Parsers differ after it."""
    opened = [("html", 1)]
    line = 1
    for token in scan(document):
        if token.kind == "start" and token.tag not in _NEED_NO_END:
            opened.append((token.tag, line))
        elif token.kind == "end" and token.tag not in _NEED_NO_END:
            tag, start = opened.pop()
            if tag != token.tag:
                return f"line {line}: </{token.tag}> does not end <{tag}> of line {start}"
        line += token.raw.count("\n")
    return ""


def html_event(token: Token) -> Event:
    """The event of a piece of HTML."""
    block = token.tag in _BLOCK
    if token.kind == "empty" or token.tag in _VOID:
        return Event("other" if block else "point", token.tag, token.raw, block=block)
    kept = token.kind == "start" and _is_kept(token.tag, token.attributes)
    wanted = token.kind == "start" and _is_wanted(token.attributes)
    kind = "point" if token.kind == "comment" else token.kind
    return Event(kind, token.tag, token.raw, kept, block, wanted=wanted)


def whole_elements(found: Iterable[Event], with_wanted: bool = True) -> list[Event]:
    """The events, with each element that is not translated as one of them: a point if it is inline.

    Elements in it that are translated, `with_wanted`, divide it. In those, other elements are whole.

    So is a short `sub` or `sup` directly after text, such as a footnote's mark. If the word goes on after it, as in
    H<sub>2</sub>O, the word is part of the point.
    """
    events = list(found)
    whole: list[Event] = []
    index = 0
    while index < len(events):
        event = events[index]
        stop = index
        if event.kept:
            stop = _end_of_element(events, index)
        elif event.kind == "start" and event.tag in _SCRIPTS:
            stop = _end_of_script(events, index)
        is_divided = with_wanted and event.kept and event.tag not in _NEVER
        parts = _with_wanted(events[index:stop]) if is_divided else []
        if stop > index and not parts:
            raw = raw_of(events[index:stop])
            parts = [Event("other" if event.block else "point", event.tag, raw)]
        for part in parts or [event]:
            _add_event(whole, part)
        index = max(stop, index + 1)
    return [event for event in whole if event.raw]


def _with_wanted(element: list[Event]) -> list[Event]:
    """The events of an element that is not translated, if it has elements that are. They are passages of their own."""
    parts: list[Event] = []
    position = 0
    free = 1
    for index, event in enumerate(element):
        if index < free or event.kind != "start":
            continue
        if event.tag in _NEVER:
            free = _end_of_element(element, index)
        elif event.wanted:
            free = _end_of_element(element, index)
            before = Event("other", "", raw_of(element[position:index]))
            parts += [before, *whole_elements(element[index:free], with_wanted=False)]
            position = free
    return [*parts, Event("other", "", raw_of(element[position:]))] if parts else []


def _add_event(whole: list[Event], event: Event) -> None:
    """Add an event to others. A script belongs to the point before it, and to the word around it."""
    before = whole[-1] if whole else event
    if before.kind == "point" and event.kind == "point" and event.tag in _SCRIPTS:
        whole[-1] = replace(event, raw=before.raw + event.raw)
        return
    follows_script = before.kind == "point" and before.tag in _SCRIPTS
    letters = _LETTERS.match(event.raw) if follows_script and event.kind == "text" else None
    if letters:
        text = whole[-2].raw if len(whole) > 1 and whole[-2].kind == "text" else ""
        word = _NO_LETTER.split(text)[-1]
        if word:
            whole[-2] = replace(whole[-2], raw=text.removesuffix(word))
        whole[-1] = replace(before, raw=word + before.raw + letters[0])
        event = replace(event, raw=event.raw[letters.end() :])
    if event.raw:
        whole.append(event)


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
        elif kind == "start":
            if tag in _ENDED_BY.get(open_tags[-1], ()):
                open_tags.pop()
                if not open_tags:
                    return index
            open_tags.append(tag)
    return len(events)


def _end_of_script(events: list[Event], start: int) -> int:
    """The index after a short `sub` or `sup` directly after text, or `start` if it is none or has several words."""
    before = events[start - 1].raw if start else " "
    text = ""
    for index in range(start + 1, min(start + _MAX_SCRIPT, len(events))):
        event = events[index]
        if event.block or event.kind == "other" or before[-1:].isspace():
            break
        if event.kind == "end" and event.tag == events[start].tag:
            return start if _TWO_WORDS.search(text) else index + 1
        text += event.raw if event.kind == "text" else ""
    return start
