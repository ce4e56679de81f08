"""Translate whole files of documents, subtitles and translation tools. Everything but the text stays as it is."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..data.readers import is_readable
from ..errors import UserError
from .alignment import WORD
from .documents import SentenceCutter, sentence_splitter, sentences_of, split_text, translated_parts
from .html_text import Passage, join_html, split_html
from .placement import TranslatedPart
from .subtitles import translate_subtitles
from .translator import Translator

#: Translates texts. The joined sources of the parts of each are the text.
TranslateTexts = Callable[[Sequence[str]], list[list[TranslatedPart]]]

_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)


def translate_document(data: bytes, suffix: str, translate: TranslateTexts) -> bytes:
    """Translate a document.

    Args:
        data: the content of a file.
        suffix: of its name, such as ".html". It decides the format, one of `SUFFIXES`.
        translate: translates texts, for example a function of `text_translator`.

    Raises:
        UserError: another format, or data that is not in this format.
    """
    if suffix.lower() not in _FORMATS:
        raise UserError(f"documents: {suffix or 'a name without a suffix'} is none of {', '.join(SUFFIXES)}")
    return _FORMATS[suffix.lower()](data, translate)


def is_document(source: str | Path | None, output: str | Path | None) -> bool:
    """Whether a file is translated as a document, by its name.

    A translation memory is one if the output is one, too. Otherwise its source text is translated line by line.
    """
    suffix, other = (Path(name or "").suffix.lower() for name in (source, output))
    return suffix in _FORMATS and (suffix == other or not is_readable(Path(source or "")))


def text_translator(
    translator: Translator, source: str | None, target: str | None, **settings: object
) -> TranslateTexts:
    """A function that splits texts into sentences, translates them and aligns their words.

    Args:
        source, target: languages of the texts and the translations, or None.
        settings: as in `Translator.translate`.
    """
    split, cut = sentence_splitter(source), SentenceCutter(translator)

    def translate(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        parts = [split_text(text, split, source, cut) for text in texts]
        sentences = [sentence for of_text in parts for sentence in sentences_of(of_text)]
        aligned: dict[str, object] = {"alignment": True, "alignment_words": WORD, "protect": True}
        best = (one[0] for one in translator.translate_nbest(sentences, **(aligned | settings)))  # type: ignore[arg-type]
        following = ((one.text.replace("\n", " "), one.alignment) for one in best)
        return [translated_parts(of_text, following, source, target) for of_text in parts]

    return translate


def _translate_html(data: bytes, translate: TranslateTexts) -> bytes:
    declared = _CHARSET.search(data[:1024])
    text, encoding = decode(data, declared[1].decode() if declared else "utf-8")
    pieces = split_html(text)
    passages = [piece for piece in pieces if isinstance(piece, Passage)]
    parts = translate([passage.text for passage in passages])
    translations = [passage.html(own) for passage, own in zip(passages, parts, strict=True)]
    return join_html(pieces, translations).encode(encoding, "xmlcharrefreplace")


def _translate_subtitles(data: bytes, translate: TranslateTexts) -> bytes:
    text, encoding = decode(data)
    return translate_subtitles(
        text, lambda texts: ["".join(p.target for p in own) for own in translate(texts)]
    ).encode(encoding)


def decode(data: bytes, encoding: str = "utf-8") -> tuple[str, str]:
    """The text of a file, with a byte order mark if it has one, and its encoding, `encoding` without a mark."""
    encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2], encoding)
    try:
        return data.decode(encoding), encoding
    except (UnicodeDecodeError, LookupError) as error:
        raise UserError(f"documents: this is no text in {encoding} ({error}); save it in UTF-8") from error


_FORMATS: dict[str, Callable[[bytes, TranslateTexts], bytes]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _translate_html),
    **dict.fromkeys((".srt", ".vtt"), _translate_subtitles),
}

#: Suffixes of the formats that `translate_document` knows.
SUFFIXES = tuple(_FORMATS)
