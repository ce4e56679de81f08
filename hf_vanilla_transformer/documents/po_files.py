"""Fill the translations of PO and POT files (gettext). Translations that are there stay."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..inference.placement import TranslatedPart, TranslateTexts
from ..inference.protected import has_words
from .html_text import Passage, translate_pieces

_LINE = re.compile(r"([^\r\n]*)(?:\r\n|[\r\n]|\Z)")
_STRING = r'"(?:[^"\\\n]|\\.)*"'
#: A keyword with its first strings, or strings that go on.
_PO_LINE = re.compile(
    rf"[ \t]*(?:(msgctxt|msgid_plural|msgid|msgstr)[ \t]*(?:\[[ \t]*(\d+)[ \t]*\])?[ \t]*)?((?:{_STRING}[ \t]*)+)\Z"
)
_PLURAL_FORMS = re.compile(
    r'^[ \t]*"Plural-Forms:\s*nplurals\s*=\s*(\d+)', re.MULTILINE | re.IGNORECASE
)
_CHOICE = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
    '"': '"',
}
_ESCAPED = {character: f"\\{letter}" for letter, character in _ESCAPES.items()}


@dataclass
class _PoField:
    """A keyword of PO and its strings."""

    keyword: str
    form: int | None  # of a plural
    text: str
    start: int  # of its strings in the file
    end: int


def translate_po(text: str, translate: TranslateTexts) -> str:
    """Fill the empty `msgstr` of a PO or POT file.

    The first form of a plural is the singular. A language with one form, such as Japanese, has the plural.
    """
    pieces: list[str | Passage] = []
    position = 0
    forms = _PLURAL_FORMS.search(text)
    has_one_form = forms is not None and int(forms[1]) == 1
    singular = ""
    plural = ""
    for entry in _po_fields(text):
        if entry.keyword == "msgid":
            singular = entry.text
            plural = ""
        elif entry.keyword == "msgid_plural":
            plural = entry.text
        if entry.keyword != "msgstr" or entry.text or not singular:
            continue
        is_plural = entry.form is not None and (has_one_form or entry.form > 0)
        source = plural if is_plural and plural else singular
        if is_choice_only(source):
            continue
        pieces += [text[position : entry.start], _PoPassage(source, [], _po_string(source))]
        position = entry.end
    return translate_pieces([*pieces, text[position:]], translate)


def _po_fields(text: str) -> list[_PoField]:
    """The keywords of a file with their strings. Comments, such as obsolete messages, are none."""
    fields: list[_PoField] = []
    for line in _LINE.finditer(text):
        match = _PO_LINE.match(text, line.start(), line.end(1))
        if match is None:
            continue
        content = _po_text(match[3])
        end = match.start(3) + len(match[3].rstrip())
        if match[1]:
            form = None if match[2] is None else int(match[2])
            fields.append(_PoField(match[1], form, content, match.start(3), end))
        elif fields:
            fields[-1].text += content
            fields[-1].end = end
    return fields


class _PoPassage(Passage):
    """A message, written as a string of PO."""

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        return _po_string("".join(part.target for part in parts))


def is_choice_only(text: str) -> bool:
    """Return whether all words of a message are in a choice of ICU, as in `{n, plural, one {vote} other {votes}}`.

    A choice stays as it is, so that the message has no translation.
    """
    return _CHOICE.search(text) is not None and not has_words(text)


def _po_text(strings: str) -> str:
    joined = "".join(match[1:-1] for match in re.findall(_STRING, strings))
    codes = r"\\(?:([0-7]{1,3})|x([\da-fA-F]{1,2})|(.))"
    return re.sub(
        codes,
        lambda of: (
            chr(int(of[1] or of[2], 8 if of[1] else 16))
            if not of[3]
            else _ESCAPES.get(of[3], of[3])
        ),
        joined,
    )


def _po_string(text: str) -> str:
    escaped = (
        _ESCAPED.get(letter, letter if letter >= " " else f"\\{ord(letter):03o}") for letter in text
    )
    return f'"{"".join(escaped)}"'
