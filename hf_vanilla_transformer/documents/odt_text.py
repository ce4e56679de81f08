"""The texts of a part of an ODT file (OpenDocument)."""

import re

from ..utils.safe_xml import XmlElement, local_name
from .passages import names
from .xml_text import Filling, InlineText, Role, attribute_of, is_code_style

_CONTAINERS = names("span a meta ruby ruby-base")
#: Elements between words. Others, such as notes, text boxes and fields, stay inside a sentence.
_BREAKS = names("s tab line-break number")
#: The namespace of pictures, text boxes and shapes. Those at an end of a passage stay there.
_DRAWING = "opendocument:xmlns:drawing"
#: The ends of a bookmark, a mark of an index, a change, or the text of an annotation.
_END_OF_RANGE = re.compile("(annotation)|(.*)-(start|end)")


def odt_texts(root: XmlElement) -> list[Filling]:
    """Find the text of each paragraph and heading. Code and deleted text stay."""
    code = {
        attribute_of(style, "name")
        for style in root.iter("{*}style")
        if is_code_style(attribute_of(style, "parent-style-name"))
    }
    texts: list[Filling] = []
    for paragraph in root.iter("{*}p", "{*}h"):
        text = _OdtText(code - {None})
        outer = {local_name(ancestor) for ancestor in paragraph.iterancestors()}
        if not text.is_code(paragraph) and "tracked-changes" not in outer:
            texts.append(text.filling(paragraph, paragraph))
    return texts


class _OdtText(InlineText):
    """The text of a paragraph."""

    collapses = True

    def __init__(self, code: set[str | None]):
        super().__init__()
        self._code = code  # names of styles

    def is_code(self, element: XmlElement) -> bool:
        """Return whether an element has a style of code."""
        style = attribute_of(element, "style-name")
        return style in self._code or is_code_style(style)

    def role(self, element: XmlElement) -> Role:
        name = local_name(element)
        if name == "s" and attribute_of(element, "c") in (None, "1"):
            return Role("text", text=" ")
        match = _END_OF_RANGE.fullmatch(name)
        if match is not None:
            numbers = [attribute_of(element, key) for key in ("name", "id", "change-id")]
            number = next(filter(None, numbers), "")
            return Role(match[3] or "start", f"{match[1] or match[2]} {number}")
        if name in _CONTAINERS and not self.is_code(element):
            return Role("container")
        if _DRAWING in element.tag:
            return Role("start", "drawing")  # without an end: see `extent`
        return Role("other" if name in _BREAKS else "point", name)
