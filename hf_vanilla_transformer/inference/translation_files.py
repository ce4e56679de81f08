"""Fill the translations of files for translators: PO, XLIFF and TMX. Translations that are there stay."""

import html
import re
from collections.abc import Iterator

from ..data.translation_memories import language_match
from ..errors import UserError
from .html_text import split_html, translate_pieces
from .placement import TranslateTexts

#: Elements of XLIFF and TMX that contain markup of the original document.
_CODES = frozenset(("bpt", "ept", "ph", "it", "ut", "x", "bx", "ex", "sc", "ec"))

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_PO_ENTRY = re.compile(
    rf"^msgid[ \t]+((?:{_STRING}\s*)+)(?:^msgid_plural[ \t]+((?:{_STRING}\s*)+))?"
    rf"((?:^msgstr(?:\[\d+\])?[ \t]+(?:{_STRING}\s*)+)+)",
    re.MULTILINE,
)
_PO_TARGET = re.compile(r'^(msgstr(?:\[(\d+)\])?[ \t]+)""(?!\s*")', re.MULTILINE)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

_XLIFF_UNIT = re.compile(r"<(trans-unit|segment)\b([^<>]*)>((?:(?!<\1\b).)*?)</\1\s*>", re.DOTALL)
_XLIFF_PARENT = re.compile(r"<(/?)(?:file|group|unit)\b([^<>]*?)(/?)>")
_KEPT = re.compile(r"\btranslate\s*=\s*[\"'](no|yes)")
_XLIFF_SOURCE = re.compile(
    r"([ \t]*)<source\b[^>]*>(.*?)</source\s*>(\s*<seg-source\b.*?</seg-source\s*>)?", re.DOTALL
)
_XLIFF_TARGET = re.compile(r"<target\b([^>]*?)(?:/>|>(.*?)</target\s*>)", re.DOTALL)
_UNTRANSLATED = re.compile(r"state\s*=\s*[\"'](?:new|needs-translation|initial)[\"']")

_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)

_TMX_UNIT = re.compile(r"<tu\b(?:(?!<tu\b).)*?</tu\s*>", re.DOTALL)
_INSIDE = r"(?:(?!<tuv\b).)*?"
_TMX_VARIANT = re.compile(
    rf"([ \t]*)<tuv\b([^<>]*)>{_INSIDE}<seg\b[^<>]*>({_INSIDE})</seg\s*>{_INSIDE}</tuv\s*>", re.DOTALL
)
_TMX_LANGUAGE = re.compile(r"\b(?:xml:)?lang\s*=\s*[\"']([^\"']+)")

Insertion = tuple[int, int, str, str, str]  # replaced characters, source markup, text before and after its translation


def translate_po(text: str, translate: TranslateTexts) -> str:
    """Fill the empty `msgstr` of a PO or POT file. The first form of a plural is that of the singular."""
    targets: list[tuple[int, int, str]] = []  # start and end of the empty string, text
    for entry in _PO_ENTRY.finditer(text):
        singular, plural = (_po_text(entry[number] or '""') for number in (1, 2))
        for target in _PO_TARGET.finditer(text, entry.start(3), entry.end(3)) if singular else ():
            start = target.end() - 2
            targets.append((start, target.end(), plural if int(target[2] or 0) and plural else singular))
    pieces, position = [], 0
    for (start, end, _), parts in zip(targets, translate([source for *_, source in targets]), strict=True):
        pieces += [text[position:start], _po_string("".join(part.target for part in parts))]
        position = end
    return "".join(pieces) + text[position:]


def _po_text(strings: str) -> str:
    joined = "".join(match[1:-1] for match in re.findall(_STRING, strings))
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), joined)


def _po_string(text: str) -> str:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def translate_xliff(text: str, translate: TranslateTexts) -> str:
    """Fill the targets of XLIFF 1.2 and 2 that are empty or marked as untranslated. Inline markup stays."""

    parents = list(_XLIFF_PARENT.finditer(text))[::-1]
    kept = [False]  # for each open parent

    def insertions() -> Iterator[Insertion]:
        for unit in _XLIFF_UNIT.finditer(text):
            while parents and parents[-1].start() < unit.start():
                end, attributes, empty = parents.pop().groups()
                if end:
                    kept[1:] = kept[1:-1]
                elif not empty:
                    kept.append(_is_kept(attributes, kept[-1]))
            source = _XLIFF_SOURCE.search(text, unit.start(3), unit.end(3))
            if source is None or _is_kept(unit[2], kept[-1]):
                continue
            alternatives = text.find("<alt-trans", source.end(), unit.end())
            end = alternatives if alternatives >= 0 else unit.end(3)
            target = _XLIFF_TARGET.search(text, source.end(), end)
            if target is None:
                newline = "\r\n" if "\r\n" in text else "\n"
                indent = newline + source[1] if text[: source.start()].endswith("\n") else ""
                yield source.end(), source.end(), source[2], f"{indent}<target>", "</target>"
            elif not (target[2] or "").strip() or _UNTRANSLATED.search(target[1] + unit[2]):
                yield target.start(), target.end(), source[2], f"<target{target[1]}>", "</target>"

    return _inserted(text, insertions(), translate)


def _is_kept(attributes: str, inherited: bool) -> bool:
    mark = _KEPT.search(attributes)
    return mark[1] == "no" if mark else inherited


def translate_tmx(text: str, translate: TranslateTexts, source: str | None, target: str | None) -> str:
    """Add a variant in the target language to every unit that has one in the source language only.

    Raises:
        UserError: a language is unknown.
    """
    if source is None or target is None:
        raise UserError("documents: a TMX file needs source_lang and target_lang")

    def insertions() -> Iterator[Insertion]:
        for unit in _TMX_UNIT.finditer(text):
            variants = list(_TMX_VARIANT.finditer(text, unit.start(), unit.end()))
            codes = [match[1] if (match := _TMX_LANGUAGE.search(variant[2])) else None for variant in variants]
            fits = [language_match(source, code) for code in codes]
            if not any(fits) or any(language_match(target, code) for code in codes):
                continue
            best, last = variants[fits.index(max(fits))], variants[-1]
            newline = "\r\n" if "\r\n" in text else "\n"
            indent = newline + last[1] if text[: last.start()].endswith("\n") else ""
            before = f'{indent}<tuv xml:lang="{target}"><seg>'
            yield last.end(), last.end(), best[3], before, "</seg></tuv>"

    return _inserted(text, insertions(), translate)


def _inserted(text: str, insertions: Iterator[Insertion], translate: TranslateTexts) -> str:
    places = list(insertions)
    escaped = [_CDATA.sub(lambda match: html.escape(match[1], quote=False), place[2]) for place in places]
    pieces = [split_html(markup, _CODES, lambda tag: False) for markup in escaped]
    joined, position = [], 0
    for (start, end, _, before, after), content in zip(places, translate_pieces(pieces, translate), strict=True):
        joined += [text[position:start], before, content, after]
        position = end
    return "".join(joined) + text[position:]
