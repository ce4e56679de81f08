"""The texts of a part of an ODT file (OpenDocument)."""

import re
from functools import partial

from ..utils.safe_xml import XmlElement, local_name
from .passages import names, split_events
from .xml_text import (
    Filling,
    Inline,
    Marks,
    attribute_of,
    element_events,
    fill,
    is_code_style,
    xml_passage,
)

#: The root elements of parts with text.
ODT_ROOTS = names("document-content document-styles")
_CONTAINERS = names("span a meta ruby ruby-base")
#: Elements between words. Others, such as notes, text boxes and fields, stay inside a sentence.
_BREAKS = names("s tab line-break number")
_END_OF_RANGE = re.compile("(.*)-(start|end)")


def odt_texts(root: XmlElement) -> list[Filling]:
    """Find the text of each paragraph and heading. Code and deleted text stay."""
    code = {
        attribute_of(style, "name")
        for style in root.iter("{*}style")
        if is_code_style(attribute_of(style, "parent-style-name"))
    }

    def has_code_style(element: XmlElement) -> bool:
        style = attribute_of(element, "style-name")
        return style in code - {None} or is_code_style(style)

    def as_text(element: XmlElement) -> str | None:
        if local_name(element) != "s":
            return None
        return " " if attribute_of(element, "c") in (None, "1") else None

    inline = Inline(
        is_container=lambda element: (
            local_name(element) in _CONTAINERS and not has_code_style(element)
        ),
        is_kept=lambda element: local_name(element) not in _BREAKS,
        end_of_range=_end_of_range,
        as_text=as_text,
    )
    texts: list[Filling] = []
    for paragraph in root.iter("{*}p", "{*}h"):
        outer = {local_name(ancestor) for ancestor in paragraph.iterancestors()}
        if has_code_style(paragraph) or "tracked-changes" in outer:
            continue
        marks = Marks()
        pieces = split_events(
            element_events(paragraph, marks, inline), partial(xml_passage, collapse=True)
        )
        texts.append((pieces, partial(fill, paragraph, marks=marks)))
    return texts


def _end_of_range(element: XmlElement) -> tuple[str, str] | None:
    """The ends of a bookmark, a mark of an index, a change, or the text of an annotation."""
    name = local_name(element)
    match = _END_OF_RANGE.fullmatch(name)
    if match is None and name != "annotation":
        return None
    numbers = [attribute_of(element, key) for key in ("name", "id", "change-id")]
    number = next(filter(None, numbers), "")
    return (match[2], f"{match[1]} {number}") if match else ("start", f"{name} {number}")
