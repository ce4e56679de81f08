"""Translate word processor documents: DOCX (Office Open XML) and ODT (OpenDocument). Only their text changes."""

import html
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..inference.placement import TranslateTexts
from ..utils.errors import UserError
from .html_text import (
    Event,
    Passage,
    extent,
    markup_events,
    matching_ends,
    names,
    passage_of,
    split_events,
    translate_pieces,
)

_MAX_BYTES = 2**28  # of a part, so that a small archive cannot fill the memory

#: Styles of code by the names that Word, LibreOffice and pandoc give them, without case and spaces.
_CODE = names(
    "htmlcode htmlkeyboard htmlpreformatted htmlsample htmlvariable preformattedtext sourcecode sourcetext "
    "verbatimchar"
)

#: Texts inside a sentence that are no part of it: notes, comments, text boxes and ruby.
_INNER = r"<({})(?=[\s>])[^>]*>(?:(?!<\1[\s>]).)*?</\1>"
_BETWEEN = "<office:section/>"

_ODT_PARTS = re.compile(r"content\.xml|styles\.xml")
_ODT_INNER = re.compile(_INNER.format("text:note-body|draw:text-box|office:annotation|text:ruby"), re.DOTALL)
_ODT_INLINE = names(
    "text:span text:a text:s text:meta text:bookmark text:bookmark-start text:bookmark-end text:soft-page-break "
    "text:reference-mark text:reference-mark-start text:reference-mark-end text:change text:change-start "
    "text:change-end text:toc-mark-start text:toc-mark-end text:alphabetical-index-mark-start "
    "text:alphabetical-index-mark-end inner-text"
)
#: Notes, text boxes, and fields, which a program fills.
_ODT_KEPT = names(
    "text:note draw:frame text:page-number text:page-count text:date text:time text:chapter text:title "
    "text:sequence text:bookmark-ref text:reference-ref text:note-ref text:sequence-ref text:user-defined "
    "text:author-name text:file-name text:variable-get text:expression text:tracked-changes office:annotation-end "
    "number:text dc:creator dc:date"
)
_ODT_SPACES, _WIDE_SPACE = re.compile(r"<text:s\b[^<>]*>"), re.compile(r'<text:s\s[^<>]*text:c="(?!1")')
_ODT_STYLE = re.compile(r'<style:style\b[^>]*\bstyle:name="([^"]+)"[^>]*\bstyle:parent-style-name="([^"]+)"')

_WORD_PARTS = re.compile(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
_WORD_INNER = re.compile(_INNER.format("w:txbxContent|w:ruby"), re.DOTALL)
#: Hyphens that are elements, and as characters.
_HYPHENS = {"noBreakHyphen": "\u2011", "softHyphen": "\u00ad"}
_WORD_INLINE = names(
    "w:hyperlink w:ins w:moveto w:smarttag w:sdt w:sdtcontent w:customxml w:bdo w:dir w:r w:bookmarkstart "
    "w:bookmarkend w:commentrangestart w:commentrangeend w:permstart w:permend w:prooferr w:del w:movefrom "
    "w:fldsimple w:sdtpr w:sdtendpr m:omath inner-text"
)
_WORD_KEPT = names(
    "w:r w:ppr w:tblpr w:trpr w:tcpr w:sectpr w:del w:movefrom w:fldsimple w:sdtpr w:sdtendpr m:omath m:omathpara"
)
_FORMAT = r"<w:rPr/>|<w:rPr>(?:(?!</?w:r[> ]).)*?(?:<w:rPrChange\b.*?</w:rPrChange>)?</w:rPr>"
_RUN = re.compile(rf"(<w:r(?=[\s>])(?![^>]*/>)[^>]*>)\s*({_FORMAT})?((?:(?!<w:r[\s>]).)*?)</w:r>", re.DOTALL)
_TEXT = re.compile(r"<w:t(?=[\s>])[^>]*>(.*?)</w:t>", re.DOTALL)
_RUN_PART = re.compile(rf"({_TEXT.pattern.replace('(.*?)', '.*?')}|<w:(?:p?tab|br|cr)\b[^>]*/>)", re.DOTALL)
_NO_FORMAT = ("<w:rPr></w:rPr>", "<w:rPr/>")
_EMPTY_RUN = re.compile(rf'<w:r>(?:{_FORMAT})?<w:t xml:space="preserve"></w:t></w:r>', re.DOTALL)
_STYLE = re.compile(r'<w:[pr]Style\b[^>]*\bw:val="([^"]*)"')

_FIELD_MARK = re.compile(r'w:fldCharType="(begin|separate|end)"')
_TRANSLATED_FIELD = re.compile(r"<w:instrText\b[^>]*>\s*(?:HYPERLINK|TOC|XE)\b")


def translate_docx(data: bytes, translate: TranslateTexts) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes, comments and text boxes of a DOCX file.

    The formatting of a run of text goes with its words. Code and the results of fields stay.
    """
    return _with_parts(data, _WORD_PARTS, _WORD_INNER, _split_word, translate)


def translate_odt(data: bytes, translate: TranslateTexts) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes, comments and text boxes of an ODT file."""
    return _with_parts(data, _ODT_PARTS, _ODT_INNER, _split_odt, translate)


def _with_parts(
    data: bytes,
    parts: "re.Pattern[str]",
    inner: "re.Pattern[str]",
    split: Callable[[str], list[str | Passage]],
    translate: TranslateTexts,
) -> bytes:
    """An archive with the text of some of its files translated, and the rest as they are."""
    target = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(target, "w") as output:
            if not any(parts.fullmatch(name) for name in archive.namelist()):
                raise UserError("documents: this archive is no document of a word processor of its suffix")
            for entry in archive.infolist():
                if entry.file_size > _MAX_BYTES:
                    raise UserError(f"documents: {entry.filename} has {entry.file_size} bytes; {_MAX_BYTES} are read")
                content = archive.read(entry)
                if parts.fullmatch(entry.filename):
                    content = _translated(content.decode(), inner, split, translate).encode()
                output.writestr(entry, content)
    except (zipfile.BadZipFile, UnicodeDecodeError, RuntimeError) as error:
        raise UserError(f"documents: this is no document of a word processor ({error})") from error
    return target.getvalue()


def _translated(
    document: str, inner: "re.Pattern[str]", split: Callable[[str], list[str | Passage]], translate: TranslateTexts
) -> str:
    """An XML document with its passages translated. Texts inside a sentence are translated apart from it."""
    texts: list[str] = []

    def taken_out(text: "re.Match[str]") -> str:
        texts.append(text[0])
        return f'<inner-text n="{len(texts)}"/>'

    outer, count = document, 1
    while count:  # the innermost ones first
        outer, count = inner.subn(taken_out, outer)
    pieces = split(_BETWEEN.join([outer, *texts]))
    translated = translate_pieces(pieces, translate)
    if translated == "".join(piece if isinstance(piece, str) else piece.raw for piece in pieces):
        return document
    outer, *texts = translated.split(_BETWEEN)
    for number in range(len(texts), 0, -1):
        place, text = f'<inner-text n="{number}"/>', texts[number - 1]
        outer = outer.replace(place, text)
        texts = [other.replace(place, text) for other in texts[: number - 1]]
    return outer


def _is_code(style: str) -> bool:
    return re.sub("_20_|[ _]", "", style).lower() in _CODE


def _paired(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with the marks of a bookmark, or of a similar range, as the tags of an element."""
    for event in events:
        for kind in ("start", "end") if event.kind == "point" else ():
            if event.tag.endswith(kind):
                event = replace(event, kind=kind, tag=event.tag.removesuffix(kind))
                break
        yield event


def _split_odt(document: str) -> list[str | Passage]:
    code = {name for name, parent in _ODT_STYLE.findall(document) if _is_code(parent)}

    def is_kept(tag: str, attributes: Mapping[str, str]) -> bool:
        style = attributes.get("text:style-name", "")
        return tag in _ODT_KEPT or style in code or _is_code(style)

    events = markup_events(document, is_kept, lambda tag: tag not in _ODT_INLINE and tag not in _ODT_KEPT)
    kinds = {"text:s": "text"}
    spaced = (
        replace(event, kind="other" if _WIDE_SPACE.match(event.raw) else kinds.get(event.tag, event.kind))
        for event in events
    )
    return split_events(
        _paired(spaced), partial(passage_of, unescape=lambda raw: html.unescape(_ODT_SPACES.sub(" ", raw)))
    )


def _split_word(document: str) -> list[str | Passage]:
    """Split a document of Word. Runs with several contents become several runs."""

    def divided(run: "re.Match[str]") -> str:
        return "".join(f"{run[1]}{run[2] or ''}{part}</w:r>" for part in _RUN_PART.split(run[3]) if part)

    hyphens = rf"<w:({'|'.join(_HYPHENS)})\s*/>"
    document = _RUN.sub(divided, re.sub(hyphens, lambda tag: f"<w:t>{_HYPHENS[tag[1]]}</w:t>", document))
    events = markup_events(document, lambda tag, _: tag in _WORD_KEPT, lambda tag: tag not in _WORD_INLINE)
    return split_events(_paired(_with_fields(_without_code(events))), _word_passage)


def _without_code(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with texts as such: their tags are their formats. Code stays, and so do line breaks and tabs."""
    in_code = False
    for event in events:
        if event.tag == "w:ppr":
            style = _STYLE.search(event.raw)
            in_code = style is not None and _is_code(style[1])
        elif event.tag == "w:p":
            in_code = False
        run = _RUN.fullmatch(event.raw) if event.tag == "w:r" and not in_code else None
        style = _STYLE.search(run[2] or "") if run else None
        if style and _is_code(style[1]):
            run = None
        if run and _TEXT.fullmatch(run[3]):
            event = replace(event, kind="text", tag="" if run[2] in _NO_FORMAT else run[2] or "")
        elif run and _RUN_PART.fullmatch(run[3]):
            event = replace(event, kind="other")
        elif event.kind == "text":  # white space between elements
            event = replace(event, kind="point")
        yield event


def _with_fields(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with a field as one of them. A link is an element, and so is a table of contents."""
    field: list[Event] = []
    depth = 0
    for event in events:
        match = _FIELD_MARK.search(event.raw) if event.tag == "w:r" else None
        mark = match[1] if match else None
        depth += mark == "begin"
        if not depth:
            yield replace(event, kind="end", tag="field") if mark == "end" else event
            continue
        field.append(event)
        raw = "".join(part.raw for part in field) if mark else ""
        if mark == "separate" and depth == 1 and _TRANSLATED_FIELD.search(raw):
            yield Event("start", "field", raw)
        elif mark != "end" or depth > 1:
            depth -= mark == "end"
            continue
        else:
            yield Event("other" if "</w:p>" in raw else "point", "", raw)
        field, depth = [], 0
    yield from field


def _word_passage(run: list[Event]) -> list[str | Passage]:
    """A passage of a paragraph. Its most frequent format is the format of words without one."""
    texts = [(event.tag, _TEXT.search(event.raw)[1]) if event.kind == "text" else ("", "") for event in run]  # type: ignore[index]
    ends = matching_ends(run)

    def in_runs(start: int, stop: int) -> list[Event]:
        """The events between two tags, with all texts in runs: a format is an element, and so is the whole."""
        sizes: Counter[str] = Counter()
        index = start
        while index < stop:
            sizes[texts[index][0]] += len(texts[index][1])
            index = ends.get(index, index) + 1
        own = max(sizes, key=sizes.__getitem__, default="")
        if not sizes[own]:
            own = next((form for form, text in texts[start:stop] if text), "")
        opening, closing = f'<w:r>{own}<w:t xml:space="preserve">', "</w:t></w:r>"
        events, index = [Event("start", "w:r", opening)], start
        while index < stop:
            event, (form, text) = run[index], texts[index]
            if index in ends:
                inner, index = in_runs(index + 1, ends[index]), ends[index]
                end = run[index]
                events += [replace(event, raw=closing + event.raw), *inner, replace(end, raw=end.raw + opening)]
            elif event.kind != "text":
                events.append(Event("point", "", closing + event.raw + opening))
            elif form == own:
                events.append(Event("text", "", text))
            else:
                raw = f'{closing}<w:r>{form}<w:t xml:space="preserve">'
                events += [Event("start", "w:t", raw), Event("text", "", text), Event("end", "w:t", closing + opening)]
            index += 1
        return [*events, Event("end", "w:r", closing)]

    filled = [index for index, (_, text) in enumerate(texts) if text.strip()]
    start, stop = extent(run, filled[0], filled[-1]) if filled else (0, 0)
    before, raw, after = ("".join(event.raw for event in part) for part in (run[:start], run[start:stop], run[stop:]))
    pieces = passage_of(in_runs(start, stop), collapse=False, finish=lambda text: _EMPTY_RUN.sub("", text))
    return [before, *(replace(piece, raw=raw) for piece in pieces if isinstance(piece, Passage)), after]
