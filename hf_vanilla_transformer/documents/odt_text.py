"""The texts of a part of an ODT file (OpenDocument)."""

from functools import partial

from ..utils.safe_xml import XmlElement, local_name
from .html_text import names, split_events
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
_CONTAINERS = names("span a meta")
#: Elements between words. Others, such as notes, text boxes and fields, stay inside a sentence.
_BREAKS = names("s tab line-break number")


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
