"""Translate word processor documents: DOCX (Office Open XML) and ODT (OpenDocument). Only their text changes.

The text of a paragraph is a passage. The formats of its words, its links and its notes are elements of the passage,
placed by word alignment. A paragraph whose translation is equal to it keeps its elements as they are.
"""

import copy
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ..inference.placement import TranslateTexts
from ..utils.errors import UserError
from ..utils.safe_xml import XmlElement, local_name, parse_xml
from .guard import guarded
from .html_text import Event, Passage, join_html, names, passage_of, passages_of, split_events
from .readings import read_docx, read_odt
from .xml_text import Inline, Mark, Marks, element_events, fill, joined_markup, xml_characters

#: Bytes of all parts of a file when they are unpacked, so that a small archive cannot fill the memory.
MAX_UNPACKED = 2**30

#: Styles of code by the names that Word, LibreOffice and pandoc give them, without case and spaces.
_CODE = names(
    "htmlcode htmlkeyboard htmlpreformatted htmlsample htmlvariable preformattedtext sourcecode sourcetext "
    "verbatimchar"
)

_HEAD = 65_536  # bytes of a part before its first element, at most
_FIRST_ELEMENT = re.compile(
    r"\ufeff?(?:\s+|<\?.*?\?>|<!--.*?-->)*<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL
)

_ODT_ROOTS = names("document-content document-styles")
_ODT_CONTAINERS = names("span a meta")
#: Elements between words. Others, such as notes, text boxes and fields, stay inside a sentence.
_ODT_BREAKS = names("s tab line-break number")

_WORD_ROOTS = names("document hdr ftr footnotes endnotes comments")
_WORD_CONTAINERS = names("hyperlink ins moveTo smartTag sdt customXml bdo dir")
#: Marks that a program writes again when it lays out or checks the text.
_DROPPED = names("proofErr lastRenderedPageBreak")
_BREAKS = names("tab ptab br cr")
_HYPHENS = {"noBreakHyphen": "\u2011", "softHyphen": "\u00ad"}
#: Properties that set words apart. A font and a size do not.
_EMPHASIS = names(
    "b i u strike dstrike vertAlign highlight shd caps smallCaps rStyle em bdr color emboss outline shadow effect "
    "rPrChange"
)
_SAME_FORMAT = names("lang noProof")
_TRANSLATED_FIELD = re.compile(r"\s*(?:HYPERLINK|TOC|XE)\b")

#: The text elements of a root element, as (element, pieces, write), where `write` puts a translation in its place.
Texts = list[tuple[XmlElement, list["str | Passage"], Callable[[str], None]]]


def translate_docx(
    data: bytes, translate: TranslateTexts, max_unpacked: int = MAX_UNPACKED
) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes, comments and text boxes of a DOCX file.

    The formatting of a run of text goes with its words. Code and the results of fields stay.
    """
    translated = partial(_with_parts, roots=_WORD_ROOTS, texts_of=_word_texts)
    with _checked_archive(data, max_unpacked):
        return guarded(data, translated, translate, read_docx)


def translate_odt(
    data: bytes, translate: TranslateTexts, max_unpacked: int = MAX_UNPACKED
) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes, comments and text boxes of an ODT file."""
    translated = partial(_with_parts, roots=_ODT_ROOTS, texts_of=_odt_texts)
    with _checked_archive(data, max_unpacked):
        return guarded(data, translated, translate, read_odt)


@contextmanager
def _checked_archive(data: bytes, max_unpacked: int) -> Iterator[None]:
    """Refuse an archive that is damaged, or that unpacks to too much, before a part of it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > max_unpacked:
            raise UserError(
                f"documents: the file has {unpacked} bytes unpacked; at most {max_unpacked} are read"
            )
        yield
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise UserError(f"documents: this is no document of a word processor ({error})") from error


def _with_parts(
    data: bytes,
    translate: TranslateTexts,
    roots: frozenset[str],
    texts_of: Callable[[XmlElement], Texts],
) -> bytes:
    """An archive with the text of some of its parts translated, and the rest as they are."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(target, "w") as output:
        parts = {
            name: part
            for name in archive.namelist()
            if (part := _part(archive, name, roots)) is not None
        }
        if not parts:
            raise UserError(
                "documents: this archive is no document of a word processor of its suffix"
            )
        translated = _translated(parts, texts_of, translate)
        for entry in archive.infolist():
            content = translated.get(entry.filename)
            output.writestr(entry, archive.read(entry) if content is None else content)
    return target.getvalue()


def _part(archive: zipfile.ZipFile, name: str, roots: frozenset[str]) -> "XmlElement | None":
    """The root element of a part with text. Parts of any name are known by their root element."""
    if not name.endswith(".xml"):
        return None
    content = archive.read(name)
    start = content[:_HEAD].decode("utf-8", "ignore")
    first = _FIRST_ELEMENT.match(start)
    return parse_xml(content, f"documents: {name}") if first and first[1] in roots else None


def _translated(
    parts: dict[str, XmlElement], texts_of: Callable[[XmlElement], Texts], translate: TranslateTexts
) -> dict[str, bytes]:
    """The parts that a translation changes. All their passages are translated in one call."""
    from lxml import etree

    texts = {name: texts_of(root) for name, root in parts.items()}
    passages = passages_of(pieces for of_part in texts.values() for _, pieces, _ in of_part)
    translations = iter(translate([passage.text for passage in passages]))
    changed: dict[str, bytes] = {}
    for name, of_part in texts.items():
        is_changed = False
        for _, pieces, write in of_part:
            markup = join_html(pieces, translations)
            if markup != joined_markup(pieces):
                write(markup)
                is_changed = True
        if is_changed:
            document = parts[name].getroottree()
            changed[name] = etree.tostring(
                document,
                xml_declaration=True,
                encoding="UTF-8",
                standalone=document.docinfo.standalone,
            )
    return changed


def _is_code(style: str | None) -> bool:
    return style is not None and re.sub("_20_|[ _]", "", style).lower() in _CODE


def _attribute(element: XmlElement, name: str) -> str | None:
    """An attribute, whatever the prefix of its namespace is."""
    return next(
        (value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None
    )


def _odt_texts(root: XmlElement) -> Texts:
    code = {
        _attribute(style, "name")
        for style in root.iter("{*}style")
        if _is_code(_attribute(style, "parent-style-name"))
    }

    def has_code_style(element: XmlElement) -> bool:
        style = _attribute(element, "style-name")
        return style in code - {None} or _is_code(style)

    def as_text(element: XmlElement) -> str | None:
        if local_name(element) != "s":
            return None
        return " " if _attribute(element, "c") in (None, "1") else None

    inline = Inline(
        is_container=lambda element: (
            local_name(element) in _ODT_CONTAINERS and not has_code_style(element)
        ),
        is_kept=lambda element: local_name(element) not in _ODT_BREAKS,
        as_text=as_text,
    )
    texts: Texts = []
    for paragraph in root.iter("{*}p", "{*}h"):
        outer = {local_name(ancestor) for ancestor in paragraph.iterancestors()}
        if has_code_style(paragraph) or "tracked-changes" in outer:
            continue
        marks = Marks()
        pieces = split_events(
            element_events(paragraph, marks, inline), partial(_passage, collapse=True)
        )
        texts.append((paragraph, pieces, partial(fill, paragraph, marks=marks)))
    return texts


def _passage(run: list[Event], collapse: bool) -> list[str | Passage]:
    plain = partial(Passage, escape=xml_characters)
    return passage_of(run, unescape=str, collapse=collapse, passage=plain)


def _word_texts(root: XmlElement) -> Texts:
    for run in list(root.iter("{*}r")):
        if _is_word(run) and _child(run, "fldChar") is not None:
            _divide(run)
    roles = _field_roles(root)
    texts: Texts = []
    for paragraph in root.iter("{*}p"):
        if not _is_word(paragraph) or _is_code(_style(paragraph, "pPr", "pStyle")):
            continue
        reader = _WordReader(roles)
        pieces = split_events(reader.paragraph(paragraph), partial(_passage, collapse=False))
        texts.append((paragraph, pieces, partial(reader.write, paragraph)))
    return texts


def _is_word(element: XmlElement) -> bool:
    return "wordprocessingml" in element.tag


def _child(element: XmlElement, name: str) -> "XmlElement | None":
    return next((child for child in element if local_name(child) == name), None)


def _style(element: XmlElement, properties: str, name: str) -> str | None:
    found = _child(element, properties)
    style = None if found is None else _child(found, name)
    return None if style is None else _attribute(style, "val")


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
            _attribute(child, "fldCharType") for child in run if local_name(child) == "fldChar"
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


class _WordReader:
    """Reads the runs of a paragraph as events, and writes their translation."""

    def __init__(self, roles: dict[XmlElement, str]):
        self._roles = roles
        self._marks = Marks()
        self._base: _Format | None = None  # of the paragraph

    def paragraph(self, paragraph: XmlElement) -> list[Event]:
        events, self._base = self._content(paragraph)
        return events

    def _content(self, container: XmlElement) -> tuple[list[Event], _Format | None]:
        """The events of a container, and the format of its words without an element."""
        items: list[tuple[Event, _Format | None]] = []
        for role, nodes in self._grouped(container):
            if role in ("start", "kept"):
                kind = "point" if role == "kept" else role
                items.append((self._marks.event(kind, "field", Mark("nodes", nodes)), None))
                continue
            for child in nodes:
                items += self._child(child)
        sizes: Counter[bytes] = Counter()
        formats: dict[bytes, _Format] = {}
        for event, form in items:
            if form is not None:
                formats.setdefault(form.key, form)
                sizes[form.key] += sum(map(str.isalnum, event.raw))
        with_words = [form for form in formats.values() if sizes[form.key]] or list(
            formats.values()
        )
        base = min(with_words, key=lambda form: (form.emphasis, -sizes[form.key]), default=None)
        events: list[Event] = []
        previous: _Format | None = None  # of a format that is open
        for event, form in [*items, (Event("", "", ""), None)]:
            own = None if form is None or base is None or form.key == base.key else form
            if previous is not None and (own is None or own.key != previous.key):
                events.append(self._marks.event("end", "format", Mark("end", form=previous)))
                previous = None
            if own is not None and previous is None:
                events.append(self._marks.event("start", "format", Mark("start", form=own)))
                previous = own
            events += [event] if event.kind else []
        return _joined(events), base

    def _grouped(self, container: XmlElement) -> Iterator[tuple[str | None, list[XmlElement]]]:
        """The children of a container. The runs of a field are together."""
        group: list[XmlElement] = []
        role: str | None = None
        for child in container:
            own = self._roles.get(child)
            if group and own != role:
                yield role, group
                group = []
            role = own
            group.append(child)
        if group:
            yield role, group

    def _child(self, child: XmlElement) -> Iterable[tuple[Event, _Format | None]]:
        name = local_name(child)
        role = self._roles.get(child)
        pair = re.fullmatch(r"(.*)(Start|End)", name)
        if name in _DROPPED or (name.endswith("Pr") and name != "sdtPr"):
            return
        if role == "end":
            yield self._marks.event("end", "field", Mark("nodes", [child])), None
        elif name == "r":
            yield from self._run(child)
        elif pair is not None:
            key = f"{pair[1]} {_attribute(child, 'id')}"
            yield self._marks.event(pair[2].lower(), key, Mark("nodes", [child])), None
        elif name in _WORD_CONTAINERS:
            events, base = self._content(_inner(child))
            yield self._marks.event("start", name, Mark("start", [child], base)), None
            yield from ((event, None) for event in events)
            yield self._marks.event("end", name, Mark("end")), None
        else:
            kind = "other" if name == "oMathPara" else "point"
            yield self._marks.event(kind, name, Mark("nodes", [child])), None

    def _run(self, run: XmlElement) -> Iterator[tuple[Event, _Format | None]]:
        """The texts of a run, and each of its other children in a run of its own."""
        form = _format(run)
        children = [child for child in run if local_name(child) not in ("rPr", *_DROPPED)]
        if _is_code(_style(run, "rPr", "rStyle")):
            yield self._marks.event("point", "r", Mark("nodes", [run])), None
            return
        for child in children:
            name = local_name(child)
            if name == "t":
                if child.text:
                    yield Event("text", "", child.text), form
            elif name in _HYPHENS:
                yield Event("text", "", _HYPHENS[name]), form
            else:
                kind = "other" if name in _BREAKS else "point"
                mark = Mark("nodes", [run]) if len(children) == 1 else Mark("part", [run, child])
                yield self._marks.event(kind, "r", mark), None

    def write(self, paragraph: XmlElement, markup: str) -> None:
        """Replace the runs of a paragraph by those of its translation."""
        pieces = list(self._marks.read(markup))
        _empty(paragraph)
        open_elements: list[tuple[XmlElement, _Format | None]] = [(paragraph, self._base)]
        formats: list[_Format] = []
        for piece in pieces:
            parent, base = open_elements[-1]
            if isinstance(piece, str):
                _add_run(parent, paragraph, formats[-1] if formats else base, piece)
            elif piece.kind == "nodes":
                for node in piece.nodes:
                    node.tail = None
                    parent.append(node)
            elif piece.kind == "part":
                parent.append(_run_with(*piece.nodes))
            elif piece.kind == "start" and piece.nodes:
                container = piece.nodes[0]
                inner = _inner(container)
                parent.append(container)
                container.tail = None
                _empty(inner)
                open_elements.append((inner, piece.form))
            elif piece.kind == "start":
                formats.append(piece.form)
            elif piece.form is not None:
                formats = [form for form in formats if form is not piece.form]
            elif len(open_elements) > 1:
                open_elements.pop()


def _joined(events: list[Event]) -> list[Event]:
    """The events, with neighbouring texts as one."""
    joined: list[Event] = []
    for event in events:
        if event.kind == "text" and joined and joined[-1].kind == "text":
            event = Event("text", "", joined.pop().raw + event.raw)
        joined.append(event)
    return joined


def _format(run: XmlElement) -> _Format:
    from lxml import etree

    properties = _child(run, "rPr")
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
    properties = _child(run, "rPr")
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
    """The element with the runs of a container."""
    content = _child(container, "sdtContent")
    return container if content is None else content


def _empty(container: XmlElement) -> None:
    """Remove the children of an element but its properties."""
    for child in list(container):
        if not local_name(child).endswith("Pr"):
            container.remove(child)


def _add_run(parent: XmlElement, paragraph: XmlElement, form: _Format | None, text: str) -> None:
    namespace = paragraph.tag.rpartition("}")[0] + "}"
    run = parent.makeelement(f"{namespace}r", nsmap=paragraph.nsmap)
    if form is not None and form.properties is not None:
        run.append(copy.deepcopy(form.properties))
    content = parent.makeelement(f"{namespace}t", nsmap=paragraph.nsmap)
    content.text = xml_characters(text)
    content.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
    run.append(content)
    parent.append(run)
