"""Translate word processor documents: DOCX (Office Open XML) and ODT (OpenDocument). Only their text changes."""

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from .html_text import split_html, translate_pieces
from .placement import Element, Placement, TranslatedPart, TranslateTexts

_MAX_BYTES = 2**28  # of a part, so that a small archive cannot fill the memory

_WORD_PARTS = re.compile(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_ENDS = {
    f"{_W}{name}" for name in ("tab", "br", "cr", "p", "drawing", "object", "fldChar")
}  # of a text in a paragraph

_ODT_PARTS = re.compile(r"content\.xml|styles\.xml")
_ODT_INLINE = frozenset(
    ("text:span", "text:a", "text:s", "text:meta", "text:bookmark", "text:bookmark-start", "text:bookmark-end")
    + ("text:soft-page-break", "text:reference-mark", "text:reference-mark-start", "text:reference-mark-end")
    + ("text:change", "text:change-start", "text:change-end", "text:toc-mark-start", "text:toc-mark-end")
)
#: Notes, whose paragraphs are translated alone, and fields, which a program fills.
_ODT_NOTES = frozenset(("text:note", "office:annotation"))
_ODT_KEPT = _ODT_NOTES | frozenset(
    ("text:page-number", "text:page-count", "text:date", "text:time", "text:chapter", "text:title", "text:sequence")
    + ("text:bookmark-ref", "text:reference-ref", "text:note-ref", "text:sequence-ref", "text:user-defined")
    + ("text:author-name", "text:file-name", "text:variable-get", "text:expression", "text:tracked-changes")
    + ("office:annotation-end", "number:text", "dc:creator", "dc:date")
)
_ODT_NOTE, _BETWEEN_NOTES = re.compile(r"(<text:note-body>.*?</text:note-body>)", re.DOTALL), "<text:section/>"


def translate_docx(data: bytes, translate: TranslateTexts) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes and comments of a DOCX file.

    The formatting of a run of text goes with its words.
    """
    return _with_parts(data, _WORD_PARTS, lambda part: _translate_word_part(part, translate))


def translate_odt(data: bytes, translate: TranslateTexts) -> bytes:
    """Translate the paragraphs, tables, headers, footers and notes of an ODT file."""

    def translated(part: bytes) -> bytes:
        pieces = _ODT_NOTE.split(_translate_paragraphs(part.decode("utf-8"), translate))
        if len(pieces) > 1:
            pieces[1::2] = _translate_paragraphs(_BETWEEN_NOTES.join(pieces[1::2]), translate).split(_BETWEEN_NOTES)
        return "".join(pieces).encode()

    return _with_parts(data, _ODT_PARTS, translated)


def _with_parts(data: bytes, names: "re.Pattern[str]", translated: Callable[[bytes], bytes]) -> bytes:
    """An archive with some of its files translated, and the others as they are."""
    target = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(target, "w") as output:
            for entry in archive.infolist():
                if entry.file_size > _MAX_BYTES:
                    raise UserError(f"documents: {entry.filename} has {entry.file_size} bytes; {_MAX_BYTES} are read")
                content = archive.read(entry)
                output.writestr(entry, translated(content) if names.fullmatch(entry.filename) else content)
    except (zipfile.BadZipFile, UnicodeDecodeError, RuntimeError) as error:
        raise UserError(f"documents: this is no document of a word processor ({error})") from error
    return target.getvalue()


def _translate_paragraphs(text: str, translate: TranslateTexts) -> str:
    pieces = split_html(text, _ODT_KEPT, lambda tag: tag not in _ODT_INLINE and tag not in _ODT_KEPT)
    return translate_pieces([pieces], translate)[0]


def _translate_word_part(part: bytes, translate: TranslateTexts) -> bytes:
    from lxml import etree

    try:
        root = etree.fromstring(part, etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=False))
    except etree.XMLSyntaxError as error:
        raise UserError(f"documents: damaged XML ({error})") from error
    groups: list[list[Any]] = []  # the elements w:t of a text
    for paragraph in root.iter(f"{_W}p"):
        group: list[Any] = []
        for element in paragraph.iter():
            if element.tag in _ENDS and element is not paragraph:
                groups, group = [*groups, group], []
            elif element.tag == f"{_W}t" and next(element.iterancestors(f"{_W}p")) is paragraph:
                group.append(element)
        groups.append(group)
    groups = [group for group in groups if "".join(text.text or "" for text in group).strip()]
    changed = False
    translations = translate(["".join(text.text or "" for text in group) for group in groups])
    for group, parts in zip(groups, translations, strict=True):
        if any(part.source != part.target for part in parts):
            _fill_runs(group, parts)
            changed = True
    if not changed:
        return part
    return etree.tostring(root, xml_declaration=True, encoding="UTF-8", standalone=True)


def _fill_runs(group: list[Any], parts: list[TranslatedPart]) -> None:
    """Distribute a translation over the runs of its source, in its order. Words of no run go with the one before."""
    elements, position = [], 0
    for text in group:
        elements.append(Element("", position, end=position + len(text.text or "")))
        position += len(text.text or "")
    placement = Placement("".join(part.source for part in parts), parts, elements)
    runs = {id(element): text for element, text in zip(elements, group, strict=True)}
    places = [place for place in placement.places() if place.closes > place.opens]
    for text in group:
        text.text = ""
        text.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
    ordered = [runs[id(place.element)] for place in places] or [group[0]]
    starts = [0, *(place.opens for place in places[1:]), len(placement.target)]
    for text, start, end in zip(ordered, starts, starts[1:], strict=False):
        text.text = placement.target[start:end]
    _reorder([_child_of_paragraph(text) for text in ordered])
    if "".join(text.text for text in next(group[0].iterancestors(f"{_W}p")).iter(f"{_W}t") if text in ordered) != (
        placement.target
    ):  # runs of one link apart from each other
        for text in ordered[1:]:
            text.text = ""
        ordered[0].text = placement.target


def _child_of_paragraph(text: Any) -> Any:
    return next(element for element in text.iterancestors() if element.getparent().tag == f"{_W}p")


def _reorder(children: list[Any]) -> None:
    """Put children of a paragraph into this order, each in the place of one of them."""
    children = list(dict.fromkeys(children))
    paragraph = children[0].getparent()
    if any(child.getparent() is not paragraph for child in children):
        return
    ordered = list(paragraph)
    for place, child in zip([*sorted(map(ordered.index, children))], children, strict=True):
        ordered[place] = child
    paragraph[:] = ordered
