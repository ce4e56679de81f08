"""The texts of a part of a DOCX file (Office Open XML).

A paragraph is a sequence of runs, each with a format. Runs are divided and joined as the words of a translation need.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeAlias

from ..utils.safe_xml import XmlElement, local_name
from .passages import Event, matching_ends, names, split_events
from .xml_text import (
    Filling,
    Mark,
    Marks,
    attribute_of,
    child_of,
    enclosed,
    is_code_style,
    whole_or_apart,
    xml_characters,
    xml_passage,
)

#: The root elements of parts with text.
DOCX_ROOTS = names("document hdr ftr footnotes endnotes comments")
#: Elements that enclose runs.
_CONTAINERS = names("hyperlink ins moveTo smartTag sdt customXml bdo dir")
_RUNS = _CONTAINERS | {"r"}
#: Marks that a program writes again when it lays out or checks the text.
_DROPPED = names("proofErr lastRenderedPageBreak")
_BREAKS = names("tab ptab br cr")
#: Pictures, text boxes and shapes. Those at an end of a passage stay there.
_DRAWINGS = names("drawing pict object AlternateContent")
_HYPHENS = {"noBreakHyphen": "\u2011", "softHyphen": "\u00ad"}
#: Properties that set words apart. A font and a size do not.
_EMPHASIS = names(
    "b i u strike dstrike vertAlign highlight shd caps smallCaps rStyle em bdr color emboss outline shadow effect "
    "rPrChange"
)
_SAME_FORMAT = names("lang noProof")
_TRANSLATED_FIELD = re.compile(r"\s*(?:HYPERLINK|TOC|XE)\b")

#: An event with the format of its run.
_Item: TypeAlias = "tuple[Event, _Format | None]"


def docx_texts(root: XmlElement) -> list[Filling]:
    """Find the text of each paragraph. Code and the results of most fields stay.

    A paragraph can have runs in two versions, for newer and for older programs (`mc:AlternateContent`). The text of
    each version is a text of its own.
    """
    for run in list(root.iter("{*}r")):
        if _is_word(run) and any(local_name(child) in ("fldChar", "ruby") for child in run):
            _divide(run)
    roles = _field_roles(root)
    texts: list[Filling] = []
    for container in root.iter("{*}p", "{*}Choice", "{*}Fallback"):
        paragraph = _paragraph_with_runs(container)
        if paragraph is None or is_code_style(_style(paragraph, "pPr", "pStyle")):
            continue
        namespace = paragraph.tag.rpartition("}")[0] + "}"
        reader = _RunReader(roles, namespace)
        pieces = split_events(reader.read(container), partial(xml_passage, collapse=False))
        texts.append((pieces, partial(reader.write, container)))
    return texts


def _paragraph_with_runs(container: XmlElement) -> "XmlElement | None":
    """The paragraph of a container of runs: itself, or the one around a version of runs."""
    if _is_word(container):
        return container
    has_runs = any(_is_word(child) and local_name(child) in _RUNS for child in container)
    return next(filter(_is_word, container.iterancestors("{*}p")), None) if has_runs else None


def _is_word(element: XmlElement) -> bool:
    return "wordprocessingml" in element.tag


def _style(element: XmlElement, properties: str, name: str) -> str | None:
    found = child_of(element, properties)
    style = None if found is None else child_of(found, name)
    return None if style is None else attribute_of(style, "val")


@dataclass
class _Field:
    """A field: its instruction, then its result."""

    instruction: str = ""
    runs: list[XmlElement] = field(default_factory=list)
    shows_text: bool = False  # its result is translated, as that of a link


def _field_roles(root: XmlElement) -> dict[XmlElement, str]:
    """The runs of fields: "kept", or the "start" and the "end" around a result that is translated."""
    roles: dict[XmlElement, str] = {}
    stack: list[_Field] = []
    for run in root.iter("{*}r"):
        if not _is_word(run):
            continue
        kinds = [
            attribute_of(child, "fldCharType") for child in run if local_name(child) == "fldChar"
        ]
        if "begin" in kinds:
            stack.append(_Field())
        if not stack:
            continue
        top = stack[-1]
        top.instruction += "".join(
            child.text or "" for child in run if local_name(child) == "instrText"
        )
        keeping = next((one for one in stack if not one.shows_text), None)
        if keeping is not None:
            keeping.runs.append(run)
            roles[run] = "kept"
        if "separate" in kinds and keeping is top and _TRANSLATED_FIELD.match(top.instruction):
            top.shows_text = True
            roles.update(dict.fromkeys(top.runs, "start"))
        if "end" in kinds:
            stack.pop()
            if top.shows_text and keeping is None:
                roles[run] = "end"
    return roles


@dataclass(frozen=True)
class _Format:
    """The properties of a run."""

    key: bytes
    properties: "XmlElement | None"
    emphasis: int


class _RunReader:
    """Reads runs as events, and writes their translation."""

    def __init__(self, roles: dict[XmlElement, str], namespace: str):
        self._roles = roles
        self._namespace = namespace  # of runs
        self._marks = Marks()
        self._base: _Format | None = None  # of all runs

    def read(self, container: XmlElement) -> list[Event]:
        """The events of a container, such as a paragraph."""
        events, self._base = self._content(container)
        return events

    def _content(self, container: XmlElement) -> tuple[list[Event], _Format | None]:
        """The events of a container, and the format of its words without an element."""
        items = list(self._items(container))
        base = _base_format(items)
        events = list(self._with_formats(items, base))
        for start, end in matching_ends(events).items():
            if events[start].tag == "field":
                events[start : end + 1] = whole_or_apart(events[start : end + 1])
        return events, base

    def _items(self, container: XmlElement) -> Iterator[_Item]:
        """The events of the children of a container. The runs of a field are one event."""
        for role, nodes in groupby(container, self._roles.get):
            if role in ("start", "kept"):
                kind = "point" if role == "kept" else "start"
                yield self._marks.event(kind, "field", Mark("nodes", list(nodes))), None
                continue
            for child in nodes:
                yield from self._child(child)

    def _with_formats(self, items: list[_Item], base: "_Format | None") -> Iterator[Event]:
        """The events, with marks around those of another format than the base."""
        base_key = None if base is None else base.key

        def other_format(item: _Item) -> bytes | None:
            form = item[1]
            return None if form is None or form.key == base_key else form.key

        for key, group in groupby(items, other_format):
            events, formats = zip(*group, strict=True)
            if key is None:
                yield from events
                continue
            yield self._marks.event("start", "format", Mark("start", form=formats[0]))
            yield from events
            yield self._marks.event("end", "format", Mark("end", form=formats[0]))

    def _child(self, child: XmlElement) -> Iterator[_Item]:
        name = local_name(child)
        role = self._roles.get(child)
        pair = re.fullmatch(r"(.*)(Start|End)", name)
        if name in _DROPPED or name.endswith("Pr"):
            return
        if role == "end":
            yield self._marks.event("end", "field", Mark("nodes", [child])), None
        elif name == "r" and child_of(child, "ruby") is None:
            yield from self._run(child)
        elif pair is not None:
            key = f"{pair[1]} {attribute_of(child, 'id')}"
            yield self._marks.range_event(pair[2].lower(), key, Mark("nodes", [child])), None
        elif name in _RUNS:
            events, base = self._content(_inner(child))
            start = self._marks.event("start", name, Mark("start", [child], base))
            end = self._marks.event("end", name, Mark("end"))
            yield from ((event, None) for event in enclosed(start, events, end))
        else:
            kind = "other" if name == "oMathPara" else "point"
            yield self._marks.event(kind, name, Mark("nodes", [child])), None

    def _run(self, run: XmlElement) -> Iterator[_Item]:
        """The texts of a run, and each of its other children in a run of its own."""
        form = _format(run)
        children = [child for child in run if local_name(child) not in ("rPr", *_DROPPED)]
        if is_code_style(_style(run, "rPr", "rStyle")):
            yield self._marks.event("point", "r", Mark("nodes", [run])), None
            return
        for child in children:
            name = local_name(child)
            if name == "t":
                text = "".join(child.itertext())
                if text:
                    yield Event("text", "", text), form
            elif name in _HYPHENS:
                yield Event("text", "", _HYPHENS[name]), form
            else:
                kind = "other" if name in _BREAKS else "point"
                kind = "start" if name in _DRAWINGS else kind  # without an end: see `extent`
                mark = Mark("nodes", [run]) if len(children) == 1 else Mark("part", [run, child])
                yield self._marks.event(kind, name, mark), None

    def write(self, container: XmlElement, markup: str) -> None:
        """Replace the runs of a container by those of its translation."""
        pieces = list(self._marks.read(markup))
        _empty(container)
        open_elements: list[tuple[XmlElement, _Format | None]] = [(container, self._base)]
        formats: list[_Format] = []
        for piece in pieces:
            parent, base = open_elements[-1]
            if isinstance(piece, str):
                parent.append(self._run_of(piece, formats[-1] if formats else base, parent))
            elif piece.kind == "nodes":
                for node in piece.nodes:
                    node.tail = None
                    parent.append(node)
            elif piece.kind == "part":
                parent.append(_run_with(*piece.nodes))
            elif piece.kind == "start" and piece.nodes:
                enclosing = piece.nodes[0]
                inner = _inner(enclosing)
                enclosing.tail = None
                parent.append(enclosing)
                _empty(inner)
                open_elements.append((inner, piece.form))
            elif piece.kind == "start":
                formats.append(piece.form)
            elif piece.form is not None:
                formats = [form for form in formats if form is not piece.form]
            elif len(open_elements) > 1:
                open_elements.pop()

    def _run_of(self, text: str, form: "_Format | None", parent: XmlElement) -> XmlElement:
        """A new run with a text, for a parent."""
        run = parent.makeelement(f"{self._namespace}r", nsmap=parent.nsmap)
        if form is not None and form.properties is not None:
            run.append(copy.deepcopy(form.properties))
        content = parent.makeelement(f"{self._namespace}t", nsmap=parent.nsmap)
        content.text = xml_characters(text)
        content.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
        run.append(content)
        return run


def _base_format(items: list[_Item]) -> "_Format | None":
    """The format that needs no element: the one with the least emphasis, or of these the one with most letters."""
    letters: Counter[bytes] = Counter()
    formats: dict[bytes, _Format] = {}
    for event, form in items:
        if form is not None:
            formats.setdefault(form.key, form)
            letters[form.key] += sum(map(str.isalnum, event.raw))
    with_letters = [form for form in formats.values() if letters[form.key]]
    return min(
        with_letters or formats.values(),
        key=lambda form: (form.emphasis, -letters[form.key]),
        default=None,
    )


def _format(run: XmlElement) -> _Format:
    from lxml import etree

    properties = child_of(run, "rPr")
    if properties is None:
        return _Format(b"", None, 0)
    compared = copy.deepcopy(properties)
    compared.tail = None
    for child in list(compared):
        if local_name(child) in _SAME_FORMAT:
            compared.remove(child)
    key = etree.tostring(compared, method="c14n") if len(compared) else b""
    return _Format(key, properties, sum(1 for child in compared if local_name(child) in _EMPHASIS))


def _run_with(run: XmlElement, child: XmlElement) -> XmlElement:
    """A run like another one, to which a child of that moves."""
    own = run.makeelement(run.tag, run.attrib, run.nsmap)
    properties = child_of(run, "rPr")
    if properties is not None:
        own.append(copy.deepcopy(properties))
    own.append(child)
    return own


def _divide(run: XmlElement) -> None:
    """Give each child of a run a run of its own."""
    children = [child for child in run if local_name(child) != "rPr"]
    for child in children[:-1]:
        run.addprevious(_run_with(run, child))


def _inner(container: XmlElement) -> XmlElement:
    """The element with the runs of a container: in a ruby annotation those of the annotated text."""
    inner = container
    for name in ("sdtContent", "ruby", "rubyBase"):
        content = child_of(inner, name)
        inner = inner if content is None else content
    return inner


def _empty(container: XmlElement) -> None:
    """Remove the children of an element but its properties."""
    for child in list(container):
        if not local_name(child).endswith("Pr"):
            container.remove(child)
