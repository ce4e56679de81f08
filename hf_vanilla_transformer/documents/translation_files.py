"""Fill the translations of XLIFF files and translation memories (TMX). Translations that are there stay."""

import copy
import re

from ..corpora.translation_memories import (
    LANGUAGE,
    MARKUP,
    UNTRANSLATED,
    is_kept,
    untranslated_state,
    xml_language,
)
from ..inference.placement import TranslateTexts
from ..text.language_codes import language_match
from ..utils.errors import UserError
from ..utils.safe_xml import XmlElement, local_name, parse_xml
from .passages import join_pieces, passages_of
from .po_files import is_choice_only
from .xml_text import Filling, InlineText, Role, child_of

#: Codes in place of line ends, tabs or spaces. They separate words.
_BREAK_TYPE = re.compile(r"(?:x-|xlf:)?(?:[lp]b|br|linebreak|newline|tab)\b", re.IGNORECASE)
_BREAK_TEXT = re.compile(r"(?:\s|\\[nrt]|<br\s*/?>)+", re.IGNORECASE)
_STARTS = frozenset(["bpt", "bx", "sc", "sm"])
_ENDS = frozenset(["ept", "ex", "ec", "em"])
_TYPES = frozenset(["ctype", "type", "subType"])
_EQUIVALENTS = frozenset(["equiv", "equiv-text", "disp"])
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"

#: The declaration, comments and document type before the first element.
_PROLOG = re.compile(
    r"\ufeff?(?:\s+|<\?.*?\?>|<!--.*?-->|<!DOCTYPE(?:[^\[>]|\[.*?\])*>)*", re.DOTALL
)


def translate_xliff(text: str, translate: TranslateTexts) -> str:
    """Fill the targets of XLIFF 1.2 and 2 that are empty or marked as untranslated. Inline markup stays."""
    document = _Document(text)
    for unit in document.root.iter("{*}trans-unit", "{*}segment"):
        source = child_of(unit, "source")
        if source is None or not _has_text(source) or is_kept(unit):
            continue
        if not is_choice_only("".join(source.itertext())):
            document.add_target(unit, source)
    return document.translated(translate)


def _segments_of(element: "XmlElement | None", are_marked: bool) -> dict[str, XmlElement]:
    """The segments of an element by their number, or the element alone if it has none."""
    if element is None:
        return {}
    if not are_marked:
        return {"": element}
    return {
        mark.get("mid", ""): mark for mark in element.iter("{*}mrk") if mark.get("mtype") == "seg"
    }


def _has_text(element: "XmlElement | None") -> bool:
    return element is not None and bool("".join(element.itertext()).strip())


def translate_tmx(text: str, translate: TranslateTexts, source: str, target: str) -> str:
    """Add a variant in the target language to every unit that has text in the source language only."""
    document = _Document(text)
    for unit in document.root.iter("{*}tu"):
        variants = [child for child in unit if local_name(child) == "tuv"]
        origin = _best_variant(variants, source)
        translated = _best_variant(variants, target)
        if not _has_text(origin) or _has_text(translated):
            continue
        if translated is None:
            document.add_variant(variants[-1], origin, target)
        else:
            document.fill(translated, origin)
    return document.translated(translate)


def _best_variant(variants: list[XmlElement], language: str) -> "XmlElement | None":
    """The segment of the first variant that fits a language best."""
    fits = {
        segment: language_match(language, xml_language(variant))
        for variant in variants
        for segment in variant.iterfind("{*}seg")
    }
    best = max(fits, key=lambda segment: fits[segment], default=None)
    return best if best is not None and fits[best] else None


class _Document:
    """An XML document with elements to fill. What stands before and after its root element keeps its characters."""

    def __init__(self, text: str):
        start = _PROLOG.match(text).end()  # type: ignore[union-attr]
        if "<!ENTITY" in text[:start]:
            raise UserError(
                "documents: the file declares an entity, which is refused: write its text in its place"
            )
        self.prolog = text[:start]
        self.root = parse_xml(text[start:].encode("utf-8", "replace"), "documents: the file")
        self.epilog = text[len(text.rstrip()) :]
        self.has_crlf = "\r\n" in text and "\n" not in text.replace("\r\n", "")
        self._fillings: list[Filling] = []
        self._filled: list[tuple[XmlElement, XmlElement]] = []  # sources and their targets

    def add_target(self, unit: XmlElement, source: XmlElement) -> None:
        """Fill the target of a unit, or those of its segments that have no translation."""
        target = child_of(unit, "target")
        segments = child_of(unit, "seg-source")
        are_marked = segments is not None
        origin = source if segments is None else segments
        sources = _segments_of(origin, are_marked)
        filled = {} if untranslated_state(unit) else _segments_of(target, are_marked)
        missing = [
            number
            for number, segment in sources.items()
            if _has_text(segment) and not _has_text(filled.get(number))
        ]
        if not missing:
            return
        is_copied = are_marked and (target is None or len(missing) == len(sources))
        if target is None:
            target = _new_after(origin, "target")
            if source.get(_SPACE):
                target.set(_SPACE, source.get(_SPACE))
        if is_copied:
            target[:] = list(copy.deepcopy(origin))
            target.text = origin.text
        for element in (unit, target):
            if element.get("state") in UNTRANSLATED:
                element.set("state", "translated")
                element.attrib.pop("subState", None)  # it is one of the old state
        target.attrib.pop("state-qualifier", None)  # it is one of the old translation
        places = _segments_of(target, are_marked)
        for number in missing:
            if number not in places:
                raise UserError(
                    f"documents: segment {number} of a target is missing; delete the target to fill it"
                )
            self.fill(places[number], sources[number])

    def add_variant(self, last: XmlElement, segment: XmlElement, language: str) -> None:
        """Add a variant after the last one."""
        variant = _new_after(last, "tuv")
        variant.set(LANGUAGE, language)
        filled = variant.makeelement(segment.tag, nsmap=segment.nsmap)
        variant.append(filled)
        self.fill(filled, segment)

    def fill(self, target: XmlElement, source: XmlElement) -> None:
        """Fill an element with the translation of another one."""
        if any(map(is_protected, source.iter("{*}sm"))):
            raise UserError(
                'documents: <sm translate="no"> is not supported; write <mrk translate="no"> around its text'
            )
        self._filled.append((source, target))
        self._fillings.append(_Codes().filling(copy.deepcopy(source), target))

    def translated(self, translate: TranslateTexts) -> str:
        """The document with its translations."""
        from lxml import etree

        passages = passages_of(pieces for pieces, _ in self._fillings)
        translations = iter(translate([passage.text for passage in passages]))
        for pieces, write in self._fillings:
            write(join_pieces(pieces, translations))
        for source, target in self._filled:
            _keep_order(source, target)
        body = etree.tostring(self.root, encoding="unicode", with_tail=False)
        body = body.replace("\n", "\r\n") if self.has_crlf else body
        return self.prolog + body + self.epilog


def _keep_order(source: XmlElement, target: XmlElement) -> None:
    """Give the codes of a target that must not be reordered the order of its source. Its words keep their places.

    Raises:
        UserError: the codes enclose each other, or words that others do not.
    """
    order = _fixed_codes(source)
    codes = _fixed_codes(target)
    sources = [(code.tag, dict(code.attrib)) for code in order]
    if sources == [(code.tag, dict(code.attrib)) for code in codes]:
        return
    for code, (tag, attributes) in zip(codes, sources, strict=True):
        is_other = code.tag != tag and "pc" in (local_name(code), tag.rpartition("}")[2])
        if is_other or _fixed_codes(code):
            raise UserError(
                f"documents: the translation of {''.join(source.itertext())[:60]!r} would change the order of codes "
                "with canReorder; translate this segment by hand first"
            )
        code.tag = tag
        code.attrib.clear()
        code.attrib.update(attributes)


def _fixed_codes(element: XmlElement) -> list[XmlElement]:
    """The codes in an element that stand in an order: https://docs.oasis-open.org/xliff/xliff-core/v2.1/#canreorder"""
    return [
        code for code in element.iterdescendants("*") if code.get("canReorder") in ("firstNo", "no")
    ]


def _new_after(element: XmlElement, name: str) -> XmlElement:
    """A new element after another one, indented as that is."""
    namespace = element.tag.rpartition("}")[0] + "}" if "}" in element.tag else ""
    new = element.makeelement(namespace + name, nsmap=element.nsmap)
    previous = element.getprevious()
    indent = element.getparent().text if previous is None else previous.tail
    element.addnext(new)  # takes the tail of the element with it
    new.tail = new.tail or element.tail
    element.tail = indent if indent and not indent.strip() else None
    return new


def _is_break(element: XmlElement) -> bool:
    """Return whether a code stands for a line end, a tab or spaces."""
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if any(_BREAK_TYPE.match(value) for key, value in attributes.items() if key in _TYPES):
        return True
    equivalents = [value for key, value in attributes.items() if key in _EQUIVALENTS]
    content = "".join(element.itertext())
    return any(_BREAK_TEXT.fullmatch(text) for text in (*equivalents, content) if text)


def is_protected(element: XmlElement) -> bool:
    """Return whether the text of an inline element stays."""
    return element.get("translate") == "no" or element.get("mtype") == "protected"


class _Codes(InlineText):
    """A text with the codes of its original document."""

    def role(self, element: XmlElement) -> Role:
        name = local_name(element)
        if name in _STARTS | _ENDS:
            kind = "start" if name in _STARTS else "end"
            numbers = [element.get(key) for key in ("startRef", "rid", "i", "id")]
            return Role(kind, f"{name[1:]} {next(filter(None, numbers), '')}")
        if is_protected(element):
            return Role("point")
        if name not in MARKUP:
            return Role("container")
        return Role("other" if _is_break(element) else "point")
