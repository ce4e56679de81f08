"""Second readers of documents, for `guard`: they find the markup and the text of a document, but no passages."""

import io
import re
import zipfile
from collections.abc import Iterator
from html import unescape

from ..data.language_codes import language_match
from ..data.translation_memories import UNTRANSLATED, xml_language
from ..utils.errors import UserError
from ..utils.safe_xml import SAFE, XmlElement, local_name, memory_errors, parse_xml, root_name
from .guard import Reading, letters_of
from .passages import names

#: Elements that end a line of text, as browsers show them.
_LINES = names(
    "address article aside blockquote body br caption center col colgroup dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol optgroup option p "
    "section summary table tbody td tfoot th thead title tr ul"
)
#: Elements with text that must stay.
_VERBATIM = names("script style pre code kbd samp var tt textarea svg math template iframe time")

#: An entity of HTML that XML does not know.
_NAMED_CHARACTER = re.compile("&(?!(?:lt|gt|amp|quot|apos);)[A-Za-z][A-Za-z0-9]*;")

_TIMES = re.compile(r"\s*-?(?:\d+:){1,2}\d+(?:[,.]\d+)?\s*-->\s*-?(?:\d+:){1,2}\d+")
_SUBTITLE_TAG = re.compile(r"</?[A-Za-z\d][^<>]*>|</>|\{\\[^{}]*\}|\{[A-Za-z]:[^{}]*\}")

_PO_LINE = re.compile(
    r"(msgctxt|msgid_plural|msgid|msgstr(?:\s*\[\d+\])?)?\s*((?:\"(?:[^\"\\]|\\.)*\"\s*)+)"
)
#: Keywords of PO, and those that may stand before each.
_PO_BEFORE = {
    "msgctxt": ("", "msgstr"),
    "msgid": ("", "msgstr", "msgctxt"),
    "msgid_plural": ("msgid",),
    "msgstr": ("msgid", "msgid_plural", "msgstr"),
}
#: The numbers of a directive of printf, as in `%2$s` and `%3$*2$d`.
_PO_NUMBER = re.compile(r"(?<=[%*])\d+\$")
_PO_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|.)")

_CODES = names("ph bpt ept it ut x bx ex")
_WORD_PARTS = names("document hdr ftr footnotes endnotes comments")
_ODT_PARTS = names("document-content document-styles")
#: Formats of runs, and what programs write anew.
_FORMATS_OF_WORD = names("rPr proofErr lastRenderedPageBreak noBreakHyphen softHyphen")


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
            named = _NAMED_CHARACTER.sub(lambda entity: unescape(entity[0]), document)
            root = parse_xml(_without_declaration(named).encode("utf-8", "replace"), "")
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
    kept: list[tuple[str, list[str]]] = []  # the verbatim elements that are open

    def add(text: str | None) -> None:
        nonlocal has_text
        if text:
            has_text = has_text or bool(text.strip())
            reading.add_text(text)
            for _, texts in kept:
                texts.append(text)

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
            if _is_verbatim(tag, element):
                kept.append((tag, []))
            add(element.text)
            continue
        if _is_verbatim(tag, element):
            kept_tag, texts = kept.pop()
            reading.markup["text of", kept_tag, "".join(texts)] += 1
        if tag in _LINES and not kept:
            end_line(tag, "</")
        add(element.tail)


def _attributes(element: XmlElement) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(element.attrib.items()))


def _is_verbatim(tag: str, element: XmlElement) -> bool:
    return tag in _VERBATIM or element.get("translate", "").lower() == "no"


def read_subtitles(document: str) -> Reading:
    """Read SubRip or WebVTT line by line."""
    lines = document.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[0].startswith("WEBVTT"):
        return _read_vtt(lines)
    reading = Reading()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if _TIMES.match(line) or (line.strip().isdigit() and _TIMES.match(following)):
            reading.order.append(("line", line))
        else:
            reading.add_text(_read_subtitle(line, reading))
    return reading


def _read_vtt(lines: list[str]) -> Reading:
    """Blocks between empty lines. The text of a cue stands after its times."""
    reading = Reading()
    in_cue = False
    for line in lines:
        if not line:
            in_cue = False
        elif _TIMES.match(line):
            in_cue = True
            reading.order.append(("line", line))
        elif in_cue:
            reading.add_text(unescape(_read_subtitle(line, reading)))
        else:
            reading.order.append(("line", line))
    return reading


def _read_subtitle(line: str, reading: Reading) -> str:
    """The text of a line of a cue without its tags. The number of the lines may change."""
    reading.markup.update(("tag", tag) for tag in _SUBTITLE_TAG.findall(line))
    return _SUBTITLE_TAG.sub("", line)


def read_po(document: str) -> Reading:
    """Read PO line by line. A translation is text, and all the rest must stay."""
    reading = Reading()
    keyword = ""
    # Whether the directives of the message have numbers. Otherwise those of a translation are no text.
    has_numbers = False
    lines = re.split("\r\n|\n|\r", document.removeprefix("\ufeff"))
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            reading.order.append(("line", line))
            continue
        match = _PO_LINE.fullmatch(line)
        if match is None or not (match[1] or keyword):
            raise _no_po(number, line)
        if match[1]:
            following = re.match("[a-z_]+", match[1])[0]  # type: ignore[index]
            if keyword not in _PO_BEFORE[following]:
                raise _no_po(number, line)
            keyword = following
            reading.order.append(("keyword", match[1]))
        text = _PO_CODE.sub(_po_character, match[2])
        if match[1] == "msgid":
            has_numbers = False
        if keyword == "msgstr":
            reading.add_text(text if has_numbers else _PO_NUMBER.sub("", text))
        else:
            has_numbers = has_numbers or _PO_NUMBER.search(text) is not None
            reading.order.append((keyword, text))
            reading.sources.update(letters_of(text))
    if keyword not in ("", "msgstr"):
        raise _no_po(len(lines), "the end of the file")
    return reading


def _po_character(code: re.Match[str]) -> str:
    """The character that a number stands for. Those of other codes are no letters."""
    hexadecimal, octal = code.groups()
    if hexadecimal:
        return chr(int(hexadecimal, 16))
    return chr(int(octal, 8)) if octal else ""


def _no_po(number: int, line: str) -> UserError:
    return UserError(
        f"documents: line {number} is no line of PO at this place: {line[:60]!r}; msgfmt says more"
    )


def read_xliff(document: str) -> Reading:
    """Read XLIFF. The text of targets may change, but not that of their codes."""
    root = _xml(document)
    reading = Reading()
    is_open = [element for element in root.iter("{*}target") if not _is_untranslated(element)]
    for target in is_open:
        _add_filled(target, reading)
    _read_but(root, {*root.iter("{*}target")}, reading)
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
    _read_but(root, variants, reading)
    return reading


def _xml(document: str) -> XmlElement:
    data = _without_declaration(document).encode("utf-8", "replace")
    return parse_xml(data, "documents: the file")


def _is_untranslated(target: XmlElement) -> bool:
    states = (target.get("state"), target.getparent().get("state"))
    return any(state in UNTRANSLATED for state in states)


def _add_filled(element: XmlElement, reading: Reading) -> None:
    """The text of a translation without that of its codes."""
    if not isinstance(element.tag, str) or local_name(element) in _CODES or _is_fixed(element):
        return
    reading.add_text(element.text or "")
    for child in element:
        _add_filled(child, reading)
        reading.add_text(child.tail or "")


def _is_fixed(element: XmlElement) -> bool:
    return element.get("translate") == "no" or element.get("mtype") == "protected"


def _read_but(element: XmlElement, filled: set[XmlElement], reading: Reading) -> None:
    """The elements and texts in their order, without those that are filled."""
    if element in filled:
        return
    attributes = sorted(item for item in element.attrib.items() if item[0] != "state")
    text = (element.text or "").strip()
    reading.order.append((str(element.tag), text, tuple(attributes)))
    reading.sources.update(letters_of(text))
    for child in element:
        _read_but(child, filled, reading)
        tail = (child.tail or "").strip()
        reading.sources.update(letters_of(tail))
        if tail:
            reading.order.append(("text", tail))


def read_docx(data: bytes) -> Reading:
    """Read the parts of a DOCX file. Runs may be divided or joined, as their formats need."""
    reading = Reading()
    for root in _parts(data, _WORD_PARTS):
        _read_word(root, reading)
    return reading


def _read_word(element: XmlElement, reading: Reading) -> None:
    name = local_name(element)
    if name in _FORMATS_OF_WORD:
        return
    if name == "t" and "wordprocessingml" in element.tag:
        reading.add_text("".join(element.itertext()))
        return
    if name == "p":
        reading.order.append(("paragraph", "with text" if _shows_text(element) else "without text"))
    elif name != "r":
        text = (element.text or "").strip()
        reading.markup[(element.tag, text, _attributes(element))] += 1
    for child in element:
        _read_word(child, reading)


def _shows_text(paragraph: XmlElement) -> bool:
    return any((text.text or "").strip() for text in paragraph.iter("{*}t"))


def read_odt(data: bytes) -> Reading:
    """Read the parts of an ODT file."""
    reading = Reading()
    for root in _parts(data, _ODT_PARTS):
        for element in root.iter():
            name = local_name(element)
            if name in ("p", "h"):
                has_text = bool("".join(element.itertext()).strip())
                reading.order.append((name, "with text" if has_text else "without text"))
            if name != "s":
                reading.markup[(element.tag, _attributes(element))] += 1
            reading.add_text(element.text or "")
            reading.add_text(element.tail or "")
    return reading


def _parts(data: bytes, names: frozenset[str]) -> Iterator[XmlElement]:
    """The root elements of the parts of an archive with these names, by their root elements."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if not name.endswith(".xml"):
                continue
            content = archive.read(name)
            title = f"documents: {name}"
            if root_name(content, title) in names:
                yield parse_xml(content, title)
