"""Translate whole files of documents, subtitles and translation tools. Everything but the text stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..corpora.translation_memories import FORMATS
from ..inference.placement import TranslateTexts
from ..utils.errors import UserError
from .charsets import html_encoding, xhtml_encoding, xml_encoding
from .guard import Reading, Refused, guarded
from .html_text import translate_html, wrong_end
from .markdown_text import read_markdown, translate_markdown
from .office_files import MAX_UNPACKED, translate_office
from .po_files import catalogue_of, po_encoding, translate_po
from .readings import read_html, read_po, read_subtitles, read_tmx, read_xliff
from .subtitles import translate_subtitles
from .translation_files import translate_tmx, translate_xliff


def translate_document(
    data: bytes,
    suffix: str,
    translate: TranslateTexts,
    source: str | None = None,
    target: str | None = None,
    max_unpacked: int = MAX_UNPACKED,
) -> bytes:
    """Translate a document.

    Args:
        data: the content of a file.
        suffix: of its name, such as ".html". It decides the format, one of `UPLOADS`.
        translate: translates texts, for example a function of `text_translator`.
        source, target: languages, for a translation memory (.tmx).
        max_unpacked: bytes of all parts of an archive, such as a .docx file.

    Raises:
        UserError: another format, or data that is not in this format.
    """
    name = suffix.lower()
    if name in _ARCHIVES:
        return translate_office(data, translate, max_unpacked)
    if name == ".tmx":
        return _memory_format(source, target).translated(data, translate)
    if name == _PLAIN:
        return _TextFormat(_translate_plain, _read_plain).translated(data, translate)
    if name in _TEXTS:
        return _TEXTS[name].translated(data, translate)
    raise UserError(
        f"documents: {suffix or 'a name without a suffix'} is none of {', '.join(UPLOADS)}"
    )


def is_document(source: str | Path | None, output: str | Path | None) -> bool:
    """Return whether a file is translated as a document, by its name.

    A translation memory is one if the output is one, too. Otherwise its source text is translated line by line.
    """
    suffix, other = (Path(name or "").suffix.lower() for name in (source, output))
    return suffix in SUFFIXES and (suffix == other or suffix not in FORMATS)


def check_output(source: str | Path | None, output: str | Path | None) -> None:
    """Refuse an output whose name promises a document of another format than the input."""
    name = Path(str(output or "").removesuffix(".gz"))
    suffix = Path(source or "").suffix.lower()
    other = name.suffix.lower()
    is_other = _TEXTS.get(suffix, suffix) != _TEXTS.get(other, other)
    if other in SUFFIXES and is_other and _TEXTS.get(other) is not _MARKDOWN:
        raise UserError(
            f"output: {output} would be no {other} document; the input must be one, or name it .txt"
        )


def _utf_8(data: bytes) -> str:
    """The encoding of a file that declares none."""
    return "utf-8"


@dataclass(frozen=True)
class _TextFormat:
    """A format of text."""

    translate: Callable[[str, TranslateTexts], str]
    read: Callable[[str], Reading]  #: the second reader, for `guarded`
    encoding: Callable[[bytes], str] = field(
        default=_utf_8, compare=False
    )  #: of a file. XHTML may be named .html
    has_references: bool = False  #: for characters that the encoding lacks
    fills: bool = False  #: whether translations stand next to their sources
    prepared: Callable[[str], str] = str  #: changes what is no text, before the translation

    def translated(self, data: bytes, translate: TranslateTexts) -> bytes:
        """Translate the content of a file."""
        text, encoding = decode(data, self.encoding)
        try:
            result = guarded(self.prepared(text), self.translate, translate, self.read, self.fills)
        except Refused as error:
            wrong = wrong_end(text) if self.read is read_html else ""
            raise Refused(f"{error}; {wrong}" if wrong else str(error)) from None
        try:
            return result.encode(encoding, "xmlcharrefreplace" if self.has_references else "strict")
        except UnicodeEncodeError as error:
            letter = error.object[error.start]
            raise UserError(
                f"documents: {encoding} has no {letter!r} of the translation; save it in UTF-8"
            ) from error


def _memory_format(source: str | None, target: str | None) -> _TextFormat:
    """The format of a translation memory, in which the variants of a language are translated."""
    if source is None or target is None:
        raise UserError("documents: a TMX file needs source_lang and target_lang")
    return _TextFormat(
        partial(translate_tmx, source=source, target=target),
        partial(read_tmx, language=target),
        xml_encoding,
        has_references=True,
        fills=True,
    )


def decode(data: bytes, declared: Callable[[bytes], str] = _utf_8) -> tuple[str, str]:
    """The text of a file, with a byte order mark if it has one, and its encoding, `declared` without a mark."""
    wide = {
        b"\xff\xfe": "utf-16-le",
        b"\xfe\xff": "utf-16-be",
        b"<\0": "utf-16-le",
        b"\0<": "utf-16-be",
    }
    has_mark = data.startswith(b"\xef\xbb\xbf")
    encoding = "utf-8" if has_mark else wide.get(data[:2]) or declared(data)
    try:
        return data.decode(encoding), encoding
    except UnicodeError as error:
        raise UserError(
            f"documents: this is no text in {encoding} ({error}); save it in UTF-8"
        ) from error


def _translate_plain(text: str, translate: TranslateTexts) -> str:
    if not text.strip():
        return text
    (parts,) = translate([text])
    return "".join(part.target for part in parts)


def _read_plain(text: str) -> Reading:
    reading = Reading()
    reading.add_text(text)
    return reading


_HTML = _TextFormat(translate_html, read_html, html_encoding, has_references=True)
_XHTML = replace(_HTML, encoding=xhtml_encoding)
_MARKDOWN = _TextFormat(translate_markdown, read_markdown)  # plain text may be named so
_SUBTITLES = _TextFormat(translate_subtitles, read_subtitles)
_PO = _TextFormat(translate_po, read_po, po_encoding, fills=True, prepared=catalogue_of)
_XLIFF = _TextFormat(translate_xliff, read_xliff, xml_encoding, has_references=True, fills=True)

_TEXTS = {
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _XHTML,
    ".md": _MARKDOWN,
    ".markdown": _MARKDOWN,
    ".srt": _SUBTITLES,
    ".vtt": _SUBTITLES,
    ".po": _PO,
    ".pot": _PO,
    ".xlf": _XLIFF,
    ".xliff": _XLIFF,
}
_ARCHIVES = (".docx", ".odt")

_PLAIN = ".txt"

#: Suffixes of the formats that are documents by their name.
SUFFIXES = (*_TEXTS, *_ARCHIVES, ".tmx")
#: Those that `translate_document` knows. Plain text on the command line is translated line by line.
UPLOADS = (*SUFFIXES, _PLAIN)
