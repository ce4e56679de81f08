"""Second readers of documents, for `guard`: they find the markup and the text of a document, but no passages."""

import io
import re
import zipfile
from functools import cache
from html import escape, unescape
from typing import Any

from ..corpora.translation_memories import MARKUP, untranslated_state, xml_language
from ..text.language_codes import language_match
from ..utils.errors import UserError
from ..utils.safe_xml import SAFE, XmlElement, local_name, memory_errors, parse_xml, root_name
from .guard import Reading
from .passages import names
from .po_files import po_fields, without_numbers
from .translation_files import is_protected

#: Elements that end a line of text, as browsers show them.
_LINES = names(
    "address article aside blockquote body br caption center col colgroup dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol optgroup option p "
    "section summary table tbody td tfoot th thead title tr ul"
)
#: Elements with text that must stay.
_VERBATIM = names("script style pre code kbd samp var tt textarea svg math template iframe time")
#: Links and emphases.
_MARKS = names("a abbr b cite del dfn em font hyperlink i ins mark q s small span strong u")

#: Characters of HTML that are no XML: names that it does not know, and "&" and "<" as text.
_NOT_XML = re.compile(
    r"&(?!(?:lt|gt|amp|quot|apos|#\d+|#x[\da-fA-F]+);)(?:#?[A-Za-z0-9]+;)?|<(?![A-Za-z_/!?])"
)

_TIMES = re.compile(r"\s*-?(?:\d+:){1,2}\d+(?:[,.]\d+)?\s*-->\s*-?(?:\d+:){1,2}\d+")
_SUBTITLE_TAG = re.compile(r"</?[A-Za-z\d][^<>]*>|</>|\{\\[^{}]*\}|\{[A-Za-z]:[^{}]*\}")

#: The root elements of parts of DOCX and ODT with text.
_PARTS = names("document hdr ftr footnotes endnotes comments document-content document-styles")
_STATES = names("state subState")  # of targets, which change
#: Elements that a translation may have more or less often: runs, spaces and hyphens, and what programs write anew.
_OF_WORDS = names("r t s proofErr lastRenderedPageBreak noBreakHyphen softHyphen")


def read_html(document: str) -> Reading:
    """Read HTML with libxml2, and XHTML as XML if it is well-formed."""
    from lxml import etree

    reading = Reading()
    if not document.strip():
        return reading
    data = document.encode("utf-8", "replace")
    root = None
    if document.lstrip("\ufeff \t\r\n").startswith("<?xml"):
        try:
            allowed = _NOT_XML.sub(lambda match: escape(unescape(match[0])), document)
            root = parse_xml(_without_declaration(allowed).encode("utf-8", "replace"), "")
        except UserError:  # browsers read on
            root = None
    if root is None:
        parser = etree.HTMLParser(encoding="utf-8", huge_tree=True, no_network=SAFE["no_network"])
        with memory_errors("html"):
            root = etree.fromstring(data, parser)
    if root is not None:
        _read_tree(root, reading)
    return reading


def _without_declaration(document: str) -> str:
    """An XML document without the declaration of its encoding."""
    return re.sub(r"\A\s*<\?xml[^>]*\?>", "", document.removeprefix("\ufeff"))


def _read_tree(root: XmlElement, reading: Reading) -> None:
    from lxml import etree

    has_text = False
    texts = 0
    opened: list[int] = []  # how many texts stand before each mark that is open
    kept: list[tuple[str, list[str]]] = []  # the verbatim elements that are open
    outside: list[list[tuple[str, list[str]]]] = []  # those around elements with translate="yes"

    def add(text: str | None) -> None:
        nonlocal has_text, texts
        if text:
            has_text = has_text or bool(text.strip())
            texts += bool(text.strip())
            reading.add_text(text)
            for _, verbatim in kept:
                verbatim.append(text)

    def end_line(tag: str, kind: str) -> None:
        nonlocal has_text
        reading.order.append((kind, tag, "after text" if has_text else "without text before it"))
        has_text = False

    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        if event in ("comment", "pi"):
            reading.markup["comment", element.text] += 1
            add(element.tail)
            continue
        tag = local_name(element).lower()
        if event == "start":
            reading.markup["element", tag, _attributes(element)] += 1
            if tag in _LINES and not kept:
                end_line(tag, "<")
            if _is_wanted(element):
                outside.append(kept)
                kept = []
            if _is_verbatim(tag, element):
                kept.append((tag, []))
            if tag in _MARKS:
                opened.append(texts)
            add(element.text)
            continue
        if _is_verbatim(tag, element):
            kept_tag, verbatim = kept.pop()
            reading.markup["text of", kept_tag, "".join(verbatim)] += 1
        if _is_wanted(element):
            kept = outside.pop()
        if tag in _MARKS:
            reading.empty += opened.pop() == texts
        if tag in _LINES and not kept:
            end_line(tag, "</")
        add(element.tail)


def _attributes(element: XmlElement) -> str:
    values = _attributes_path()(element)
    return " ".join(sorted(f"{value.attrname}={value}" for value in values))


@cache
def _attributes_path() -> Any:
    """All attributes. `attrib` looks for each from the first one on."""
    from lxml import etree

    return etree.XPath("@*")


def _is_verbatim(tag: str, element: XmlElement) -> bool:
    marked = element.get("translate", "").lower() == "no"
    return marked or (tag in _VERBATIM and not _is_wanted(element))


def _is_wanted(element: XmlElement) -> bool:
    return element.get("translate", "no").lower() in ("", "yes")


def read_subtitles(document: str) -> Reading:
    """Read SubRip or WebVTT line by line. In WebVTT, a text stands between the times of a cue and an empty line."""
    reading = Reading()
    lines = document.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    is_vtt = lines[0].startswith("WEBVTT")
    in_cue = not is_vtt
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        has_times = _TIMES.match(line) is not None
        is_number = line.strip().isdigit() and _TIMES.match(following) is not None
        if is_vtt:
            in_cue = has_times or (in_cue and line != "")
        if has_times or is_number or not in_cue:
            reading.order.append(("line", line))
            continue
        text = _read_subtitle(line, reading)
        reading.add_text(unescape(text) if is_vtt else text)
    return reading


def _read_subtitle(line: str, reading: Reading) -> str:
    """The text of a line of a cue without its tags. The number of the lines may change."""
    reading.markup.update(("tag", tag) for tag in _SUBTITLE_TAG.findall(line))
    return _SUBTITLE_TAG.sub("", line)


def read_po(document: str) -> Reading:
    """Read PO. A translation is text, and all the rest must stay."""
    reading = Reading()
    # Whether the directives of the message have numbers. Otherwise those of a translation are no text.
    has_numbers = False
    for field in po_fields(document):
        plain = without_numbers(field.text)
        if field.keyword == "msgstr":
            reading.order.append((field.keyword, field.form))
            reading.add_text(field.text if has_numbers else plain)
            continue
        reading.order.append((field.keyword, field.text))
        if field.keyword != "#":
            is_first = field.keyword == "msgid"
            has_numbers = plain != field.text or (has_numbers and not is_first)
    return reading


def read_xliff(document: str) -> Reading:
    """Read XLIFF. The text of targets may change, but not that of their codes."""
    root = _xml(document)
    reading = Reading()
    targets = set(root.iter("{*}target"))
    for target in targets:
        if not untranslated_state(target.getparent()):
            _add_filled(target, reading)
    _add_rest(root, targets, reading)
    return reading


def read_tmx(document: str, language: str) -> Reading:
    """Read a translation memory. The variants in a language may be added."""
    root = _xml(document)
    reading = Reading()
    variants = {
        variant
        for variant in root.iter("{*}tuv")
        if language_match(language, xml_language(variant))
    }
    for variant in variants:
        _add_filled(variant, reading)
    _add_rest(root, variants, reading)
    return reading


def _xml(document: str) -> XmlElement:
    data = _without_declaration(document).encode("utf-8", "replace")
    return parse_xml(data, "documents: the file")


def _add_filled(element: XmlElement, reading: Reading) -> None:
    """The text of a translation without that of its codes."""
    name = local_name(element)
    if not name or name in MARKUP or is_protected(element):
        return
    reading.add_text(element.text or "")
    for child in element:
        _add_filled(child, reading)
        reading.add_text(child.tail or "")


def _add_rest(root: XmlElement, filled: set[XmlElement], reading: Reading) -> None:
    """The elements and texts in their order, without those that are filled."""
    for element in filled:
        element.clear(keep_tail=True)
    for element in root.iter():
        texts = [(element.text or "").strip(), (element.tail or "").strip()]
        if element not in filled:
            attributes = sorted(item for item in element.attrib.items() if item[0] not in _STATES)
            reading.order.append((str(element.tag), *texts, tuple(attributes)))


def read_office(data: bytes) -> Reading:
    """Read the parts of a DOCX or ODT file. Runs may be divided or joined, as their formats need."""
    from lxml import etree

    reading = Reading()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = office_parts(archive)
    for root in parts.values():
        etree.strip_elements(root, "{*}rPr", with_tail=False)
        etree.strip_tags(root, etree.Comment)
        for element in root.iter():
            name = local_name(element)
            if name in ("p", "h"):
                has_text = bool("".join(element.itertext()).strip())
                reading.order.append((name, "with text" if has_text else "without text"))
            if name not in _OF_WORDS:
                reading.markup[(element.tag, _attributes(element))] += 1
            if name in _MARKS:
                reading.empty += not any(text.strip() for text in element.itertext())
            reading.add_text(element.text or "")
            reading.add_text(element.tail or "")
    return reading


def office_parts(archive: zipfile.ZipFile) -> dict[str, XmlElement]:
    """The parts of an archive with text. Parts of any name are known by their root element."""
    parts: dict[str, XmlElement] = {}
    for name in archive.namelist():
        if not name.endswith(".xml"):
            continue
        content = archive.read(name)
        title = f"documents: {name}"
        if root_name(content, title) in _PARTS:
            parts[name] = parse_xml(content, title)
    return parts
