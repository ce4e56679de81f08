"""Fill the translations of PO and POT files (gettext). Translations that are there stay."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from gettext import c2py
from itertools import count

from ..inference.placement import TranslatedPart, TranslateTexts
from ..inference.protected import has_words, spans_in
from ..utils.errors import UserError
from .passages import Passage, translate_pieces

_LINE = re.compile(r"([^\r\n]*)(?:\r\n|[\r\n]|\Z)")
_STRING = r'"(?:[^"\\\n]|\\.)*"'
#: A keyword with its first strings, or strings that go on.
_PO_LINE = re.compile(
    rf"[ \t]*(?:(msgctxt|msgid_plural|msgid|msgstr)[ \t]*(?:\[[ \t]*(\d+)[ \t]*\])?[ \t]*)?((?:{_STRING}[ \t]*)+)\Z"
)
#: The formula for the form of a plural, in the header of a file.
_PLURAL = re.compile(r"^Plural-Forms:.*?\bplural\s*=\s*([^;\n]+)", re.MULTILINE | re.IGNORECASE)
_NUMBERS = 200  # that tell what a form is for
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
_CODE = re.compile(r"\\(?:([0-7]{1,3})|x([\da-fA-F]{1,2})|(.))")

#: A directive of printf, such as `%s`, `%5.2f` and `%1$s`, or a percent sign.
_DIRECTIVE = re.compile(
    r"%(?:%|(\d+\$)?([-+ #0']*[\d.*]*(?:<PRI\w+>|(?:hh|ll|[hljztLq])?[diouxXeEfFgGaAcsp@])))"
)
#: Flags of languages that number directives, as in `%2$s %1$d`.
_NUMBERED = frozenset(
    f"{name}-format"
    for name in (
        "awk",
        "boost",
        "c",
        "elisp",
        "gcc-internal",
        "gfc-internal",
        "javascript",
        "librep",
        "objc",
        "perl",
        "php",
        "ruby",
        "tcl",
    )
)
#: Those that number widths, too, as in `%2$*1$d`.
_NUMBERED_WIDTHS = frozenset(["c-format", "gcc-internal-format", "objc-format"])
#: Those that cannot number them, or in another way.
_UNNUMBERED = frozenset(["python-format", "lua-format", "object-pascal-format"])


@dataclass
class _PoField:
    """A keyword of PO and its strings."""

    flags: frozenset[str]  # of its message, such as "c-format"
    keyword: str
    form: int | None  # of a plural
    text: str
    start: int  # of its strings in the file
    end: int


def translate_po(text: str, translate: TranslateTexts) -> str:
    """Fill the empty `msgstr` of a PO or POT file. The form of a plural that is for one thing gets the singular."""
    pieces: list[str | Passage] = []
    position = 0
    fields = _po_fields(text)
    forms = _forms_of_numbers(fields)
    singular = ""
    plural = ""
    for entry in fields:
        if entry.keyword == "msgid":
            singular = entry.text
            plural = ""
        elif entry.keyword == "msgid_plural":
            plural = entry.text
        if entry.keyword != "msgstr" or entry.text or not singular:
            continue
        source = singular
        if plural and entry.form is not None:
            numbers = {number for number, form in enumerate(forms) if form == entry.form}
            source = singular if _is_for_one(numbers, singular, plural) else plural
        if is_choice_only(source):
            continue
        passage = _PoPassage(source, [], _po_string(source), flags=entry.flags)
        pieces += [text[position : entry.start], passage]
        position = entry.end
    return translate_pieces([*pieces, text[position:]], translate)


def _forms_of_numbers(fields: "list[_PoField]") -> list[int]:
    """The form of a plural for each number, by the header. Without one, the first form is for 1 only."""
    header = fields[1].text if len(fields) > 1 and not fields[0].text else ""
    formula = _PLURAL.search(header)
    if formula is not None:
        with suppress(ValueError, ArithmeticError):
            form_of = c2py(formula[1])
            return [form_of(number) for number in range(_NUMBERS)]
    return [int(number != 1) for number in range(_NUMBERS)]


def _is_for_one(numbers: set[int], singular: str, plural: str) -> bool:
    """Return whether a form for these numbers gets the singular.

    Russian has a form for 1, 21 and 31. It gets `%d file`, but not `one file`.
    """
    if 1 not in numbers or 2 in numbers:
        return False
    return numbers <= {0, 1} or _placeholders(singular) == _placeholders(plural)


def _placeholders(text: str) -> list[str]:
    return sorted(text[start:end] for start, end in spans_in(text))


def _po_fields(text: str) -> list[_PoField]:
    """The keywords of a file with their strings. Comments, such as obsolete messages, are none."""
    fields: list[_PoField] = []
    flags: set[str] = set()  # of the next message
    for line in _LINE.finditer(text):
        match = _PO_LINE.match(text, line.start(), line.end(1))
        if match is None:
            if line[1].startswith("#,"):
                flags.update(line[1].removeprefix("#,").replace(",", " ").split())
            continue
        content = _po_text(match[3])
        end = match.start(3) + len(match[3].rstrip())
        if match[1]:
            after_message = bool(fields) and fields[-1].keyword == "msgstr"
            is_first = not fields or (after_message and match[1] != "msgstr")
            own = frozenset(flags) if is_first else fields[-1].flags
            flags = set() if is_first else flags
            form = None if match[2] is None else int(match[2])
            fields.append(_PoField(own, match[1], form, content, match.start(3), end))
        elif fields:
            fields[-1].text += content
            fields[-1].end = end
    return fields


@dataclass(frozen=True)
class _PoPassage(Passage):
    """A message, written as a string of PO."""

    flags: frozenset[str] = frozenset()

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        translation = "".join(part.target for part in parts)
        return _po_string(self._with_numbers(translation))

    def _with_numbers(self, translation: str) -> str:
        """The translation, whose directives are numbered if their order is another one.

        Raises:
            UserError: the language of the program has no numbers for them.
        """
        sources = _directives(self.text)
        targets = _directives(translation)
        if sources == targets or sorted(sources) != sorted(targets):
            return translation
        can_number = bool(self.flags & _NUMBERED)
        has_widths = any("*" in directive for directive in sources)
        lacks_widths = can_number and has_widths and not self.flags & _NUMBERED_WIDTHS
        if self.flags & _UNNUMBERED or lacks_widths:
            raise UserError(
                f"documents: the translation of {self.text[:60]!r} would change the order of its formats; "
                "give them names, such as %(count)d"
            )
        if not can_number or any("$" in directive for directive in sources):
            return translation
        return _numbered(translation, sources)


def _numbered(translation: str, sources: list[str]) -> str:
    """A translation whose directives have the numbers of their arguments. Equal ones stay in their order."""
    arguments: dict[str, list[tuple[int, list[int]]]] = {name: [] for name in sources}
    following = count(1)
    for directive in sources:
        widths = [next(following) for _ in range(directive.count("*"))]
        arguments[directive].append((next(following), widths))

    def with_number(match: re.Match[str]) -> str:
        if not match[2]:  # a percent sign
            return match[0]
        number, widths = arguments[match[0]].pop(0)
        rest = re.sub(r"\*", lambda _: f"*{widths.pop(0)}$", match[2])
        return f"%{number}${rest}"

    return _DIRECTIVE.sub(with_number, translation)


def _directives(text: str) -> list[str]:
    return [match[0] for match in _DIRECTIVE.finditer(text) if match[2]]


def is_choice_only(text: str) -> bool:
    """Return whether all words of a message are in a choice of ICU, as in `{n, plural, one {vote} other {votes}}`.

    A choice stays as it is, so that the message has no translation.
    """
    return _CHOICE.search(text) is not None and not has_words(text)


def _po_text(strings: str) -> str:
    joined = "".join(match[1:-1] for match in re.findall(_STRING, strings))
    return _CODE.sub(_character, joined)


def _character(code: re.Match[str]) -> str:
    """The character of an escape sequence: octal, hexadecimal or a letter."""
    octal, hexadecimal, letter = code.groups()
    if octal:
        return chr(int(octal, 8))
    if hexadecimal:
        return chr(int(hexadecimal, 16))
    return _ESCAPES.get(letter, letter)


def _po_string(text: str) -> str:
    escaped = (
        _ESCAPED.get(letter, letter if letter >= " " else f"\\{ord(letter):03o}") for letter in text
    )
    return f'"{"".join(escaped)}"'
