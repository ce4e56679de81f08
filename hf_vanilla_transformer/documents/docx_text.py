"""The texts of a part of a DOCX file (Office Open XML).

A paragraph is a sequence of runs, each with a format. Before they are read, each run is divided so that it has one
child, and the runs of a field are enclosed in a temporary element.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..utils.errors import UserError
from ..utils.safe_xml import XmlElement, local_name
from .passages import Event, matching_ends, names
from .xml_text import (
    Filling,
    InlineText,
    Role,
    attribute_of,
    child_of,
    is_code_style,
    whole_or_apart,
)

#: The temporary elements around runs of a field.
FIELD_PART = "fieldPart"
#: Elements that enclose runs.
_CONTAINERS = names("hyperlink ins moveTo smartTag sdt customXml bdo dir")
_RUNS = _CONTAINERS | {"r"}
#: Marks that a program writes again when it lays out or checks the text.
_DROPPED = names("proofErr lastRenderedPageBreak")
_BREAKS = names("tab ptab br cr oMathPara")
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
_RANGE = re.compile("(.*)(Start|End)")


def docx_texts(root: XmlElement) -> list[Filling]:
    """Find the text of each paragraph. Code and the results of most fields stay.

    A paragraph can have runs in two versions, for newer and for older programs (`mc:AlternateContent`). The text of
    each version is a text of its own.

    Raises:
        UserError: the document includes another file.
    """
    if next(root.iter("{*}altChunk"), None) is not None:
        raise UserError(
            "documents: this document includes another file (altChunk); save it anew in a word processor"
        )
    for run in list(root.iter("{*}r")):
        if _is_word(run):
            _divide(run)
    _enclose_fields(root)
    caps = _drop_caps(root)
    letters = set(caps.values())
    texts: list[Filling] = []
    for container in root.iter("{*}p", "{*}Choice", "{*}Fallback"):
        paragraph = _paragraph_with_runs(container)
        if paragraph is None or paragraph in letters:
            continue
        if is_code_style(_style(paragraph, "pPr", "pStyle")):
            continue
        namespace = paragraph.tag.rpartition("}")[0] + "}"
        cap = caps.get(container)
        runs = _Runs(namespace)
        texts.append(
            runs.filling(container, container) if cap is None else _with_cap(runs, container, cap)
        )
    return texts


def _drop_caps(root: XmlElement) -> dict[XmlElement, XmlElement]:
    """The paragraphs that start with a drop cap -> the paragraph of this letter."""
    caps: dict[XmlElement, XmlElement] = {}
    for frame in root.iter("{*}framePr"):
        cap = frame.getparent().getparent()
        following = cap.getnext()
        if attribute_of(frame, "dropCap") not in ("drop", "margin") or following is None:
            continue
        texts = _texts(following)
        run = texts[0].getparent() if texts else following
        is_plain = run.getparent() is following and not is_code_style(_style(run, "rPr", "rStyle"))
        if is_plain and local_name(following) == "p" and len(_texts(cap)) == 1:
            caps[following] = cap
    return caps


def _texts(paragraph: XmlElement) -> list[XmlElement]:
    return [text for text in paragraph.iter("{*}t") if text.text]


def _with_cap(runs: "_Runs", paragraph: XmlElement, cap: XmlElement) -> Filling:
    """The pieces of a paragraph with its drop cap, which becomes the first letter of their translation."""
    (letter,) = _texts(cap)
    first = _texts(paragraph)[0]
    rest = first.text
    first.text = letter.text + rest
    pieces, write = runs.filling(paragraph, paragraph)
    first.text = rest

    def write_both(markup: str) -> None:
        write(markup)
        start = _texts(paragraph)[0]
        end = re.match(r"\W*\w?", start.text).end()  # type: ignore[union-attr]
        letter.text = start.text[:end]
        start.text = start.text[end:]

    return pieces, write_both


def _paragraph_with_runs(container: XmlElement) -> "XmlElement | None":
    """The paragraph of a container of runs: itself, or the one around a version of runs."""
    if _is_word(container):
        return container
    has_runs = any(
        local_name(child) == FIELD_PART or (_is_word(child) and local_name(child) in _RUNS)
        for child in container
    )
    return next(filter(_is_word, container.iterancestors("{*}p")), None) if has_runs else None


def _is_word(element: XmlElement) -> bool:
    return "wordprocessingml" in str(element.tag)


def _style(element: XmlElement, properties: str, name: str) -> str | None:
    found = child_of(element, properties)
    style = None if found is None else child_of(found, name)
    return None if style is None else attribute_of(style, "val")


def _divide(run: XmlElement) -> None:
    """Give each child of a run a run of its own. Drawings next to each other stay in one."""
    properties = child_of(run, "rPr")
    children = [child for child in run if child is not properties]

    def alone_or_drawing(child: XmlElement) -> "XmlElement | str":
        return "drawing" if local_name(child) in _DRAWINGS else child

    groups = [list(group) for _, group in groupby(children, alone_or_drawing)]
    for group in groups[:-1]:
        own = run.makeelement(run.tag, run.attrib, run.nsmap)
        if properties is not None:
            own.append(copy.deepcopy(properties))
        own.extend(group)
        run.addprevious(own)


@dataclass
class _Field:
    """A field: its instruction, then its result."""

    name: str
    instruction: str = ""
    runs: list[XmlElement] = field(default_factory=list)
    shows_text: bool = False  # its result is translated, as that of a link


def _enclose_fields(root: XmlElement) -> None:
    """Enclose the runs of each field that stay, so that they are one element."""
    for run, (kind, name) in _field_roles(root).items():
        part = run.getprevious()
        if part is None or part.tag != FIELD_PART or part.get("name") != name or kind == "end":
            part = run.makeelement(FIELD_PART, {"kind": kind, "name": name})
            run.addprevious(part)
        part.append(run)


def _field_roles(root: XmlElement) -> dict[XmlElement, tuple[str, str]]:
    """The runs of fields: those that stay ("point"), or the "start" and the "end" around a translated result."""
    roles: dict[XmlElement, tuple[str, str]] = {}
    stack: list[_Field] = []
    for run in filter(_is_word, root.iter("{*}r")):
        content = next((child for child in run if local_name(child) != "rPr"), run)
        kind = attribute_of(content, "fldCharType")
        if kind == "begin":
            stack.append(_Field(f"field {len(roles)}"))
        if not stack:
            continue
        top = stack[-1]
        if local_name(content) == "instrText":
            top.instruction += content.text or ""
        keeping = next((one for one in stack if not one.shows_text), None)
        if keeping is not None:
            keeping.runs.append(run)
            roles[run] = ("point", "field")
        if kind == "separate" and keeping is top and _TRANSLATED_FIELD.match(top.instruction):
            top.shows_text = True
            roles.update(dict.fromkeys(top.runs, ("start", top.name)))
        if kind == "end":
            stack.pop()
            if top.shows_text and keeping is None:
                roles[run] = ("end", top.name)
                if run.getparent() is not top.runs[0].getparent():  # no word crosses its ends
                    roles.update(dict.fromkeys([*top.runs, run], ("other", top.name)))
    return roles


class _Runs(InlineText):
    """The runs of a paragraph. The format of a text is the name of its properties."""

    is_mixed = False

    def __init__(self, namespace: str):
        super().__init__()
        self._namespace = namespace  # of runs
        self._properties: dict[str, XmlElement | None] = {"": None}
        self._emphasis: dict[str, int] = {}

    def role(self, element: XmlElement) -> Role:
        name = local_name(element)
        ends = _RANGE.fullmatch(name)
        if name == FIELD_PART:
            return Role(element.get("kind", ""), element.get("name", ""))
        if name in _DROPPED or name.endswith("Pr"):
            return Role("dropped")
        if name == "r":
            return self._role_of_run(element)
        if ends is not None:
            return Role(ends[2].lower(), f"{ends[1]} {attribute_of(element, 'id')}")
        if name in _CONTAINERS:
            return Role("container")
        return Role("other" if name in _BREAKS else "point", name)

    def _role_of_run(self, run: XmlElement) -> Role:
        content = next((child for child in run if local_name(child) != "rPr"), None)
        name = "" if content is None else local_name(content)
        if content is None or name in _DROPPED:
            return Role("dropped")
        if is_code_style(_style(run, "rPr", "rStyle")):
            return Role("point", name)
        if name == "ruby":
            return Role("container")
        if name == "t" or name in _HYPHENS:
            text = _HYPHENS.get(name) or "".join(content.itertext())
            return Role("text", self._format(run), text) if text else Role("dropped")
        if name in _DRAWINGS:
            return Role("start", name)  # without an end: see `extent`
        return Role("other" if name in _BREAKS else "point", name)

    def _format(self, run: XmlElement) -> str:
        """The name of the properties of a run."""
        from lxml import etree

        properties = child_of(run, "rPr")
        compared = [
            child
            for child in (() if properties is None else properties)
            if local_name(child) not in _SAME_FORMAT
        ]
        name = " ".join(etree.tostring(child, method="c14n").decode() for child in compared) or " "
        self._properties.setdefault(name, properties)
        self._emphasis[name] = sum(local_name(child) in _EMPHASIS for child in compared)
        return name

    def content(self, container: XmlElement) -> tuple[list[Event], str]:
        events, _ = super().content(container)
        base = self._base_format(events)
        events = list(self._with_formats(events, base))
        for start, end in matching_ends(events).items():
            if events[start].tag.startswith("field"):
                events[start : end + 1] = whole_or_apart(events[start : end + 1])
        return events, base

    def _base_format(self, events: list[Event]) -> str:
        """The format that needs no element: the one with the least emphasis, or of these the one with most letters."""
        letters: Counter[str] = Counter()
        for event in events:
            if event.kind == "text" and event.tag:
                letters[event.tag] += sum(map(str.isalnum, event.raw))
        return min(
            [form for form in letters if letters[form]] or letters,
            key=lambda form: (self._emphasis[form], -letters[form]),
            default="",
        )

    def _with_formats(self, events: list[Event], base: str) -> Iterator[Event]:
        """The events, with marks around texts of another format than the base. The texts lose their formats."""

        def other_format(event: Event) -> str:
            return event.tag if event.kind == "text" and event.tag != base else ""

        for form, group in groupby(events, other_format):
            plain = [replace(event, tag="") if event.kind == "text" else event for event in group]
            yield from self.between(plain, "format", form) if form else plain

    def between(
        self, events: list[Event], name: str, form: str, node: "XmlElement | None" = None
    ) -> list[Event]:
        """Events between marks. All are of one kind, because a text has one format, which a link has, too."""
        return super().between(events, "run", form, node)

    def add_text(self, parent: XmlElement, text: str, form: str) -> None:
        """Add a run with a text, for a format."""
        run = parent.makeelement(f"{self._namespace}r", nsmap=parent.nsmap)
        properties = self._properties[form]
        if properties is not None:
            run.append(copy.deepcopy(properties))
        content = parent.makeelement(f"{self._namespace}t", nsmap=parent.nsmap)
        content.text = text
        content.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
        run.append(content)
        parent.append(run)
