"""Fill the translations of files for translators: PO, XLIFF and TMX. Translations that are there stay."""

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ..data.translation_memories import language_match
from ..inference.placement import TranslateTexts
from ..utils.errors import UserError
from .html_scanner import scan
from .html_text import Passage, markup_events, names, passage_of, split_events, translate_pieces

#: Elements of XLIFF and TMX that contain markup of the original document.
_CODES = names("bpt ept ph it ut x bx ex sc ec")
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
#: Codes in place of line ends, tabs or spaces. They separate words.
_BREAK = re.compile(
    r"<[^<>]*?(?:\b(?:c?type|subType)\s*=\s*[\"'](?:x-|xlf:)?(?:[lp]b|br|linebreak|newline|tab)\b"
    r"|\b(?:equiv(?:-text)?|disp)\s*=\s*[\"'](?:\s|&#(?:10|13|9|x[9ad]|xa0|160);|\\[nrt]|(?:<|&lt;)br\s*/?(?:>|&gt;))+[\"']"
    r"|>(?:\s|\\[nrt]|&lt;br\s*/?(?:>|&gt;))+</)",
    re.IGNORECASE,
)
_UNTRANSLATED = re.compile(r"(\bstate\s*=\s*[\"'])(?:new|needs-translation|initial)(?=[\"'])")

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_PO_ENTRY = re.compile(
    rf"^msgid[ \t]+((?:{_STRING}\s*)+)(?:^msgid_plural[ \t]+((?:{_STRING}\s*)+))?"
    rf"((?:^msgstr(?:\[\d+\])?[ \t]+(?:{_STRING}\s*)+)+)",
    re.MULTILINE,
)
_PO_TARGET = re.compile(r'^(msgstr(?:\[(\d+)\])?[ \t]+)""(?!\s*")', re.MULTILINE)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", '"': '"'}
_ESCAPED = {character: f"\\{letter}" for letter, character in _ESCAPES.items()}


def translate_po(text: str, translate: TranslateTexts) -> str:
    """Fill the empty `msgstr` of a PO or POT file. The first form of a plural is the singular."""
    pieces: list[str | Passage] = []
    position = 0
    for entry in _PO_ENTRY.finditer(text):
        singular, plural = (_po_text(entry[number] or '""') for number in (1, 2))
        for target in _PO_TARGET.finditer(text, entry.start(3), entry.end(3)) if singular else ():
            source = plural if int(target[2] or 0) and plural else singular
            pieces += [text[position : target.end() - 2], Passage(source, [], _po_string(source), str, _po_string)]
            position = target.end()
    return translate_pieces([*pieces, text[position:]], translate)


def _po_text(strings: str) -> str:
    joined = "".join(match[1:-1] for match in re.findall(_STRING, strings))
    codes = r"\\(?:([0-7]{1,3})|x([\da-fA-F]{1,2})|(.))"
    return re.sub(
        codes,
        lambda of: chr(int(of[1] or of[2], 8 if of[1] else 16)) if not of[3] else _ESCAPES.get(of[3], of[3]),
        joined,
    )


def _po_string(text: str) -> str:
    escaped = (_ESCAPED.get(letter, letter if letter >= " " else f"\\{ord(letter):03o}") for letter in text)
    return f'"{"".join(escaped)}"'


@dataclass
class _Node:
    """An element, without the prefix of its name, and its positions in the text."""

    name: str
    attributes: dict[str, str]
    start: int
    opened: int  # the end of its start tag
    closed: int = 0  # the start of its end tag
    end: int = 0
    children: list["_Node"] = field(default_factory=list)

    def child(self, name: str) -> "_Node | None":
        return next((child for child in self.children if child.name == name), None)


def _parse(text: str) -> _Node:
    """The elements of an XML document."""
    root = _Node("", {}, 0, 0, len(text), len(text))
    stack, position = [root], 0
    for kind, tag, raw, attributes in scan(text):
        end, name = position + len(raw), tag.rpartition(":")[2]
        if kind in ("start", "empty"):
            stack[-1].children.append(_Node(name, attributes, position, end, end, end))
            stack += stack[-1].children[-1:] if kind == "start" else []
        elif kind == "end" and name == stack[-1].name:
            node = stack.pop()
            node.closed, node.end = position, end
        position = end
    return root


def translate_xliff(text: str, translate: TranslateTexts) -> str:
    """Fill the targets of XLIFF 1.2 and 2 that are empty or marked as untranslated. Inline markup stays."""
    pieces: list[str | Passage] = []
    position = 0
    units = [(_parse(text), "yes")]
    while units:
        unit, translated = units.pop()
        translated = unit.attributes.get("translate", translated)
        source, target = unit.child("source"), unit.child("target")
        if unit.name not in ("trans-unit", "segment") or source is None:
            units += ((child, translated) for child in reversed(unit.children))
            continue
        if translated == "no" or not text[source.opened : source.closed].strip():
            continue
        tags = text[unit.start : unit.opened], text[target.start : target.opened] if target else ""
        if target and text[target.opened : target.closed].strip() and not any(map(_UNTRANSLATED.search, tags)):
            continue
        tag, opening = (_UNTRANSLATED.sub(r"\1translated", raw) for raw in tags)
        before = unit.child("seg-source") or source
        start, end = (target.start, target.end) if target else (before.end, before.end)
        prefix = re.match(r"<([^\s>]*)source", text[source.start : source.opened])[1]  # type: ignore[index]
        opening = opening.removesuffix("/>").rstrip(">") or f"{_indent(text, source.start)}<{prefix}target"
        pieces += [text[position : unit.start], tag, text[unit.opened : start], f"{opening}>"]
        pieces += [*_passages(text[source.opened : source.closed]), f"</{prefix}target>"]
        position = end
    return translate_pieces([*pieces, text[position:]], translate)


def translate_tmx(text: str, translate: TranslateTexts, source: str | None, target: str | None) -> str:
    """Add a variant in the target language to every unit that has one in the source language only."""
    if source is None or target is None:
        raise UserError("documents: a TMX file needs source_lang and target_lang")
    pieces: list[str | Passage] = []
    position = 0
    for unit in _named(_parse(text), "tu"):
        variants = [child for child in unit.children if child.name == "tuv" and child.child("seg")]
        codes = [variant.attributes.get("xml:lang", variant.attributes.get("lang")) for variant in variants]
        fits = [language_match(source, code) for code in codes]
        if not any(fits) or any(language_match(target, code) for code in codes):
            continue
        segment, last = variants[fits.index(max(fits))].child("seg"), variants[-1]
        pieces += [text[position : last.end], f'{_indent(text, last.start)}<tuv xml:lang="{target}"><seg>']
        pieces += [*_passages(text[segment.opened : segment.closed]), "</seg></tuv>"]  # type: ignore[union-attr]
        position = last.end
    return translate_pieces([*pieces, text[position:]], translate)


def _indent(text: str, start: int) -> str:
    """The line end and the white space before an element, or "" if other text is on its line."""
    indent = re.search(r"(?:\r?\n[ \t]*)?\Z", text[max(0, start - 200) : start])
    return indent[0] if indent else ""


def _named(node: _Node, name: str) -> Iterator[_Node]:
    """The outermost elements of a name, in their order."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node.name == name:
            yield node
        else:
            nodes += reversed(node.children)


def _passages(markup: str) -> list[str | Passage]:
    """The content of a source. Its white space has a meaning."""
    markup = _CDATA.sub(lambda match: html.escape(match[1], quote=False), markup)
    events = markup_events(markup, _is_code, lambda tag: False)
    breaks = (
        replace(event, kind="other") if event.kind == "point" and _BREAK.match(event.raw) else event
        for event in events
    )
    return split_events(breaks, partial(passage_of, collapse=False))


def _is_code(tag: str, attributes: Mapping[str, str]) -> bool:
    kept = {"translate": "no", "mtype": "protected"}
    return tag in _CODES or bool(kept.items() & attributes.items())
