"""Sentence pairs of translation memories: TMX 1.x, and XLIFF 1.2 and 2.x.

The XML is untrusted: entities and DTDs are neither resolved nor fetched. A file that declares an entity is refused.
It is read as a stream, one unit at a time, so that its size does not matter.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from ..text.language_codes import base_language, language_match
from ..utils.errors import UserError
from ..utils.safe_xml import SAFE, XmlElement, local_name, refuse_entities
from ..utils.untrusted import one_line
from .readers import BadRow, open_binary

FORMATS = (".tmx", ".xliff", ".xlf")

_UNITS = {"tmx": {"tu"}, "xliff": {"trans-unit", "segment"}}
# Elements that contain units or name languages, or are units.
_ELEMENTS = "tmx", "header", "xliff", "file", "group", "unit", "tu", "trans-unit", "segment"
#: Inline elements that contain markup of the original document. `hi`, `g`, `pc` and `mrk` contain text.
MARKUP = frozenset(["bpt", "ept", "ph", "it", "ut", "x", "bx", "ex", "sc", "ec"])
# Such as a line break. All the rest is in pairs, also within a word.
_STANDALONE = {"ph", "x", "it", "ut"}
UNTRANSLATED = frozenset(["new", "needs-translation", "initial"])  # states of XLIFF 1.2 and 2.x
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"

Segment: TypeAlias = str | BadRow
#: Number of the unit, source, target.
MemoryPair: TypeAlias = tuple[int, Segment | None, Segment | None]


def read_memory(
    path: Path, source_lang: str | None, target_lang: str | None
) -> Iterator[MemoryPair]:
    """Read the pairs of a translation memory, `.tmx`, `.xlf` or `.xliff`, plain or `.gz`.

    Standalone inline markup becomes a space between words, and so does a line break with its indentation. A unit with
    several variants of a language gives the variant with the best code, the first of equals, and no variant is both
    sides. An XLIFF file in the opposite direction is read from target to source.

    The language `en` also finds `en-GB`, and `en-GB` finds `en`. None is the language that a file with two languages
    has besides. Without both, the file decides what is the source. Yield (number of the unit from 1, source, target),
    with None for a missing side, and a `BadRow` for text that cannot be read or is not translated.
    """
    if not source_lang or not target_lang:
        source_lang, target_lang = memory_languages(path, source_lang, target_lang)
    languages = dict[str, None]()
    occurs = [False, False]
    number = 0
    for number, texts in enumerate(_units(path), start=1):
        languages.update(dict.fromkeys(code for code, _ in texts))
        source, target = _sides(texts, (source_lang, target_lang))
        occurs = [occurs[0] or source is not None, occurs[1] or target is not None]
        yield number, source, target
    for requested, exists in zip((source_lang, target_lang), occurs, strict=True):
        if number and not exists:
            raise UserError(
                f"{path} has the languages {', '.join(map(repr, languages))}, not {requested!r}"
            )


def memory_languages(
    path: Path, source_lang: str | None = None, target_lang: str | None = None
) -> tuple[str, str]:
    """The source and target language of a memory with two languages, of which one may be given."""
    header: dict[str, str] = {}
    codes = dict.fromkeys(code for texts in _units(path, header) for code, _ in texts if code)
    languages = list(codes) if len(codes) == 2 else list(dict.fromkeys(map(base_language, codes)))
    given = source_lang or target_lang
    others = [code for code in languages if given is None or not language_match(given, code)]
    if len(others) != (2 if given is None else 1):
        raise UserError(
            f"{path} has the languages {', '.join(map(repr, codes)) or '(none)'}: "
            "choose two by source_lang and target_lang"
        )
    if given is not None:
        return (given, others[0]) if source_lang else (others[0], given)
    first, second = others
    return (second, first) if language_match(header.get("srclang", ""), second) else (first, second)


def _sides(texts: list[tuple[str, Segment]], languages: tuple[str, str]) -> list[Segment | None]:
    """The variants of two languages. The side with the better code chooses first, so that none is taken twice."""
    fits = [[language_match(requested, code) for code, _ in texts] for requested in languages]
    sides: list[Segment | None] = [None, None]
    taken = -1
    for side in (0, 1) if max(fits[0]) >= max(fits[1]) else (1, 0):
        best = max(
            (index for index in range(len(texts)) if index != taken),
            key=fits[side].__getitem__,
            default=taken,
        )
        if best != taken and fits[side][best]:
            sides[side], taken = texts[best][1], best
    return sides


def _units(path: Path, header: dict[str, str] | None = None) -> Iterator[list[tuple[str, Segment]]]:
    """The (language, text) variants of each unit. `header` gets the attributes of the header of TMX."""
    from lxml import etree

    with open_binary(path) as handle:
        tags = [f"{{*}}{name}" for name in _ELEMENTS]
        events = etree.iterparse(
            handle,
            events=("start", "end"),
            tag=tags,
            remove_comments=True,
            remove_pis=True,
            **SAFE,
        )
        kind = ""
        defaults = dict[str, str]()
        try:
            for event, element in events:
                name = local_name(element)
                if event == "start":
                    kind = kind or _checked_root(path, element.getroottree().getroot())
                    if name in ("xliff", "file"):
                        defaults |= _xliff_languages(element)
                    elif name == "header" and header is not None:
                        header.update(element.attrib)
                    continue
                if name in _UNITS[kind]:
                    yield (
                        _tmx_variants(element)
                        if kind == "tmx"
                        else _xliff_variants(element, defaults)
                    )
                element.clear()  # releases a unit that has been read, and its siblings before it
                while element.getprevious() is not None:
                    del element.getparent()[0]
            kind = kind or _checked_root(path, events.root)
        except (etree.XMLSyntaxError, UnicodeDecodeError, EOFError, OSError) as error:
            if getattr(error, "errno", None):
                raise
            raise UserError(f"{path} is no well-formed XML: {one_line(error)}") from None


def _checked_root(path: Path, root: XmlElement) -> str:
    """The kind of document. Refuses entities."""
    refuse_entities(root, path)
    name = local_name(root)
    if name not in _UNITS:
        raise UserError(
            f"{path} is no translation memory: its root element is <{name}>, not <tmx> or <xliff>"
        )
    return name


def _tmx_variants(unit: XmlElement) -> list[tuple[str, Segment]]:
    variants = []
    for variant in unit.iterfind("{*}tuv"):
        segment = variant.find("{*}seg")
        if segment is not None:
            variants.append((xml_language(variant) or "", _segment(segment)))
    return variants or [("", "")]


def xml_language(variant: XmlElement) -> str | None:
    """The language of a variant of TMX. Early versions have an attribute of their own."""
    return variant.get(LANGUAGE) or variant.get("lang")


def _xliff_languages(element: XmlElement) -> dict[str, str]:
    """The languages of `<file source-language target-language>` (1.2) or `<xliff srcLang trgLang>` (2.x)."""
    names = {"source": ("source-language", "srcLang"), "target": ("target-language", "trgLang")}
    return {side: code for side, keys in names.items() for code in map(element.get, keys) if code}


def _xliff_variants(unit: XmlElement, languages: dict[str, str]) -> list[tuple[str, Segment]]:
    variants = []
    for side in ("source", "target"):
        element = unit.find(f"{{*}}{side}")
        if element is not None:
            variants.append((element.get(LANGUAGE) or languages.get(side, ""), _segment(element)))
    if variants and (reason := _not_translated(unit)):
        variants[-1] = variants[-1][0], BadRow(reason)
    return variants or [("", "")]


def _not_translated(unit: XmlElement) -> str | None:
    """Why the target of an XLIFF unit is no translation: its `state`, or `translate="no"` on it or around it."""
    if is_kept(unit):
        return 'not translated (translate="no")'
    state = untranslated_state(unit)
    return f'not translated (state="{state}")' if state else None


def is_kept(unit: XmlElement) -> bool:
    """Return whether `translate="no"` stands at an element or around it."""
    flags = (element.get("translate") for element in (unit, *unit.iterancestors()))
    return next(filter(None, flags), "yes") == "no"


def untranslated_state(unit: XmlElement) -> str | None:
    """The state of an XLIFF unit that says that its target is no translation."""
    target = unit.find("{*}target")  # 1.2 states it for the target, 2.x for the segment
    states = (unit.get("state"), None if target is None else target.get("state"))
    return next((state for state in states if state in UNTRANSLATED), None)


def _segment(element: XmlElement) -> Segment:
    """The text of a segment, or a `BadRow` for an entity that is declared nowhere, or only in a DTD."""
    if any(not isinstance(child.tag, str) for child in element.iter()):
        return BadRow("an entity stands for a part of the text")
    text = re.sub(r"(?<=\w)\0+(?=\w)", " ", _text(element)).replace("\0", "")
    # The layout of the file.
    return re.sub(r"[ \t\r\n]+", " ", text).strip() if "\n" in text else text


def _text(element: XmlElement) -> str:
    """The text of a segment without the markup of the original document. NUL, which XML cannot contain, represents
    standalone markup."""
    parts = [element.text or ""]
    for child in element:
        name = local_name(child)
        parts.append("\0" if name in _STANDALONE else "" if name in MARKUP else _text(child))
        parts.append(child.tail or "")
    return "".join(parts)
