"""Translate word processor documents: DOCX (Office Open XML) and ODT (OpenDocument). Only their text changes.

The text of a paragraph is a passage. The formats of its words, its links and its notes are elements of the passage,
placed by word alignment. If no paragraph of a part changes, the part keeps its bytes.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

from ..inference.placement import TranslateTexts
from ..utils.errors import UserError
from ..utils.safe_xml import XmlElement
from .docx_text import FIELD_PART, docx_texts
from .guard import guarded
from .odt_text import odt_texts
from .passages import join_pieces, passages_of
from .readings import office_parts, read_office
from .xml_text import joined_markup

#: Bytes of all parts of a file when they are unpacked, so that a small archive cannot fill the memory.
MAX_UNPACKED = 2**30


def translate_office(
    data: bytes, translate: TranslateTexts, max_unpacked: int = MAX_UNPACKED
) -> bytes:
    """Translate the paragraphs, tables, headers, footers, notes, comments and text boxes of a DOCX or ODT file.

    The formatting of a run of text goes with its words. Code and the results of fields stay.
    """
    with _checked_archive(data, max_unpacked):
        return guarded(data, _with_parts, translate, read_office)


@contextmanager
def _checked_archive(data: bytes, max_unpacked: int) -> Iterator[None]:
    """Refuse an archive that is damaged, or that unpacks to too much, before a part of it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > max_unpacked:
            raise UserError(
                f"documents: the file has {unpacked} bytes unpacked; at most {max_unpacked} are read"
            )
        yield
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise UserError(f"documents: this is no document of a word processor ({error})") from error


def _with_parts(data: bytes, translate: TranslateTexts) -> bytes:
    """An archive with the text of some of its parts translated, and the rest as they are."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(target, "w") as output:
        parts = office_parts(archive)
        if not parts:
            raise UserError("documents: this archive is no document of a word processor")
        translated = _translated(parts, translate)
        for entry in archive.infolist():
            content = translated.get(entry.filename)
            output.writestr(entry, archive.read(entry) if content is None else content)
    return target.getvalue()


def _translated(parts: dict[str, XmlElement], translate: TranslateTexts) -> dict[str, bytes]:
    """The parts that a translation changes. All their passages are translated in one call."""
    from lxml import etree

    texts = {
        name: odt_texts(root) if "opendocument" in root.tag else docx_texts(root)
        for name, root in parts.items()
    }
    passages = passages_of(pieces for of_part in texts.values() for pieces, _ in of_part)
    translations = iter(translate([passage.text for passage in passages]))
    changed: dict[str, bytes] = {}
    for name, of_part in texts.items():
        is_changed = False
        for pieces, write in of_part:
            markup = join_pieces(pieces, translations)
            if markup != joined_markup(pieces):
                write(markup)
                is_changed = True
        if is_changed:
            etree.strip_tags(parts[name], FIELD_PART)
            document = parts[name].getroottree()
            changed[name] = etree.tostring(
                document,
                xml_declaration=True,
                encoding="UTF-8",
                standalone=document.docinfo.standalone,
            )
    return changed
