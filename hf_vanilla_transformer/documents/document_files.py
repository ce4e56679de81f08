"""Translate whole files of documents, subtitles and translation tools. Everything but the text stays as it is."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..data import translation_memories
from ..data.words import words
from ..inference.placement import TranslatedPart, TranslateTexts
from ..inference.translator import Translator
from ..utils.errors import UserError
from .documents import SentenceCutter, sentence_splitter, sentences_of, split_text, translated_parts
from .guard import Reading, guarded
from .html_text import translate_html
from .markdown_text import read_markdown, translate_markdown
from .office_files import MAX_UNPACKED, translate_docx, translate_odt
from .po_files import translate_po
from .readings import read_html, read_po, read_subtitles, read_tmx, read_xliff
from .subtitles import translate_subtitles
from .translation_files import translate_tmx, translate_xliff

_ENCODING = re.compile(rb"^\s*<\?xml[^>]+encoding\s*=\s*[\"']([\w.:-]+)")
_CHARSET = re.compile(
    rb"(?:<meta[^<>]+charset|<\?xml[^<>]+encoding)\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE
)
_PO_CHARSET = re.compile(
    rb'^"Content-Type:[^"\n]*charset=(?!CHARSET\b)([\w.:-]+)', re.IGNORECASE | re.MULTILINE
)
#: Encodings that a file with a readable declaration cannot have, and those that browsers read as a larger one.
_WIDE = re.compile("(?:utf|ucs)-?(?:16|32|2|4)", re.I)
_LATIN = re.compile("(?:iso-?8859-1|latin-?1|(?:us-)?ascii)$", re.I)
_DECLARED_IN = 8192  # bytes


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
        suffix: of its name, such as ".html". It decides the format, one of `SUFFIXES`.
        translate: translates texts, for example a function of `text_translator`.
        source, target: languages, for a translation memory (.tmx).
        max_unpacked: bytes of all parts of an archive, such as a .docx file.

    Raises:
        UserError: another format, or data that is not in this format.
    """
    if suffix.lower() == ".tmx":
        filled = _text_format(
            lambda text, function: _translated_memory(text, function, source, target), _ENCODING
        )
        return filled(data, translate)
    if suffix.lower() in _ARCHIVES:
        return _ARCHIVES[suffix.lower()](data, translate, max_unpacked)
    if suffix.lower() not in _FORMATS:
        raise UserError(
            f"documents: {suffix or 'a name without a suffix'} is none of {', '.join(SUFFIXES)}"
        )
    return _FORMATS[suffix.lower()](data, translate)


def is_document(source: str | Path | None, output: str | Path | None) -> bool:
    """Return whether a file is translated as a document, by its name.

    A translation memory is one if the output is one, too. Otherwise its source text is translated line by line.
    """
    suffix, other = (Path(name or "").suffix.lower() for name in (source, output))
    return suffix in SUFFIXES and (suffix == other or suffix not in translation_memories.FORMATS)


def check_output(source: str | Path | None, output: str | Path | None) -> None:
    """Refuse an output whose name promises a document of another format than the input."""
    name = Path(str(output or "").removesuffix(".gz"))
    suffix = Path(source or "").suffix.lower()
    other = name.suffix.lower()
    if (
        other in SUFFIXES
        and _FORMATS.get(suffix, suffix) != _FORMATS.get(other, other)
        and other not in _MARKDOWN
    ):
        raise UserError(
            f"output: {output} would be no {other} document; the input must be one, or name it .txt"
        )
    if not name.resolve().parent.is_dir():
        raise UserError(f"output: {output}: there is no folder {name.parent}")


def text_translator(
    translator: Translator, source: str | None, target: str | None, **settings: object
) -> TranslateTexts:
    """A function that splits texts into sentences, translates them and aligns their words.

    Args:
        source, target: languages of the texts and the translations, or None.
        settings: as in `Translator.translate`.
    """
    split = sentence_splitter(source)
    cut = SentenceCutter(translator)

    def translate(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        parts = [split_text(text, split, source, cut) for text in texts]
        sentences = [sentence for of_text in parts for sentence in sentences_of(of_text)]
        aligned: dict[str, object] = {"alignment": True, "alignment_words": words, "protect": True}
        best = (one[0] for one in translator.translate_nbest(sentences, **(aligned | settings)))  # type: ignore[arg-type]
        following = ((one.text.replace("\n", " "), one.alignment) for one in best)
        return [translated_parts(of_text, following, source, target) for of_text in parts]

    return translate


def _text_format(
    translated: Callable[[str, TranslateTexts], str], declaration: "re.Pattern[bytes] | None" = None
) -> Callable[[bytes, TranslateTexts], bytes]:
    """A format of text, in the encoding that its `declaration` names, or in UTF-8."""

    def translate_data(data: bytes, translate: TranslateTexts) -> bytes:
        declared = declaration.search(data[:_DECLARED_IN]) if declaration else None
        name = declared[1].decode() if declared else "utf-8"
        if declaration is _CHARSET and _LATIN.match(name):
            name = "windows-1252"
        text, encoding = decode(data, "utf-8" if _WIDE.match(name) else name)
        has_references = declaration in (_CHARSET, _ENCODING)
        try:
            return translated(text, translate).encode(
                encoding, "xmlcharrefreplace" if has_references else "strict"
            )
        except UnicodeEncodeError as error:
            letter = error.object[error.start]
            raise UserError(
                f"documents: {encoding} has no {letter!r} of the translation; save it in UTF-8"
            ) from error

    return translate_data


def _checked(
    translated: Callable[[str, TranslateTexts], str],
    read: Callable[[str], Reading],
    fills: bool = False,
) -> Callable[[str, TranslateTexts], str]:
    """A translation of texts with the checks of `guarded`."""

    def translate_checked(text: str, translate: TranslateTexts) -> str:
        return guarded(text, translated, translate, read, fills)

    return translate_checked


def _translated_memory(
    text: str, translate: TranslateTexts, source: str | None, target: str | None
) -> str:
    if source is None or target is None:
        raise UserError("documents: a TMX file needs source_lang and target_lang")
    return guarded(
        text,
        lambda memory, function: translate_tmx(memory, function, source, target),
        translate,
        lambda memory: read_tmx(memory, target),
        fills=True,
    )


def decode(data: bytes, encoding: str = "utf-8") -> tuple[str, str]:
    """The text of a file, with a byte order mark if it has one, and its encoding, `encoding` without a mark."""
    wide = {
        b"\xff\xfe": "utf-16-le",
        b"\xfe\xff": "utf-16-be",
        b"<\0": "utf-16-le",
        b"\0<": "utf-16-be",
    }
    encoding = "utf-8" if data.startswith(b"\xef\xbb\xbf") else wide.get(data[:2], encoding)
    try:
        return data.decode(encoding), encoding
    except (UnicodeError, LookupError) as error:
        raise UserError(
            f"documents: this is no text in {encoding} ({error}); save it in UTF-8"
        ) from error


_MARKDOWN = (".md", ".markdown")  # plain text may be named so

_ARCHIVES = {".docx": translate_docx, ".odt": translate_odt}

_FORMATS: dict[str, Callable[[bytes, TranslateTexts], bytes]] = {
    **dict.fromkeys(
        (".html", ".htm", ".xhtml"), _text_format(_checked(translate_html, read_html), _CHARSET)
    ),
    **dict.fromkeys(_MARKDOWN, _text_format(_checked(translate_markdown, read_markdown))),
    **dict.fromkeys((".srt", ".vtt"), _text_format(_checked(translate_subtitles, read_subtitles))),
    **dict.fromkeys(
        (".po", ".pot"), _text_format(_checked(translate_po, read_po, fills=True), _PO_CHARSET)
    ),
    **dict.fromkeys(
        (".xlf", ".xliff"),
        _text_format(_checked(translate_xliff, read_xliff, fills=True), _ENCODING),
    ),
    **_ARCHIVES,
}

#: Suffixes of the formats that `translate_document` knows.
SUFFIXES = (*_FORMATS, ".tmx")
