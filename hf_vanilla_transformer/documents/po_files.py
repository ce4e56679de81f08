"""Fill the translations of PO and POT files (gettext). Translations that are there stay."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from gettext import c2py

from ..inference.placement import Element, Placement, TranslatedPart, TranslateTexts
from ..inference.protected import has_words, spans_in
from ..utils.errors import UserError
from .charsets import exact_codec
from .html_scanner import scan
from .html_text import html_event
from .passages import Passage, matching_ends, names, translate_pieces

_LINE = re.compile(r"([^\r\n]*)(?:\r\n|[\r\n]|\Z)")
_STRING = r'"(?:[^"\\\n]|\\.)*"'
#: A keyword with its first strings, or strings that go on.
_PO_LINE = re.compile(
    rf"\s*(?:(msgctxt|msgid_plural|msgid|msgstr)\s*(?:\[\s*(\d+)\s*\]\s*)?)?((?:{_STRING}\s*)+)\Z"
)
#: Keywords, and those that may stand before each.
_BEFORE = {
    "": ("msgctxt", "msgid", "msgid_plural", "msgstr"),
    "msgctxt": ("", "msgstr"),
    "msgid": ("", "msgstr", "msgctxt"),
    "msgid_plural": ("msgid",),
    "msgstr": ("msgid", "msgid_plural", "msgstr"),
}
#: The message of the header, as it stands in a file, and the encoding in it.
_HEADER = re.compile(rf"(?:\A|[\r\n])[^\S\r\n]*msgid\s*(?:\"\"\s*)+msgstr\s*((?:{_STRING}\s*)+)")
_CHARSET = re.compile(r"charset=(?!CHARSET\b)([\w.:-]+)", re.IGNORECASE)
#: The formula for the form of a plural, in the header of a file.
_PLURAL = re.compile(r"^Plural-Forms:.*?\bplural\s*=\s*([^;\n]+)", re.MULTILINE | re.IGNORECASE)
#: In the header of a template, by xgettext and others: its flag, and its encoding.
_FUZZY = re.compile(r"^#, *fuzzy *\r?\n", re.MULTILINE)
_NO_CHARSET = "charset=CHARSET"
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
_CODE = re.compile(r"\\(?:([0-7]{1,3})|x([\da-fA-F]+)|(.))")

_WIDTH = r"[\d.*]*(?:<PRI\w+>|(?:hh|ll|[hljztLqvw])?"


def _printf(silent: str = "", flags: str = "") -> re.Pattern[str]:
    """The directives of a family: the number of one, and the rest of one that takes an argument. Any letter is one.

    Args:
        silent: letters that take no argument.
        flags: more of them than in C.

    After a space, only the letters of C are. Others start a word, as in `100% natural`.
    """
    of_c = rf"[-+ #0'I]*{_WIDTH}[diouxXeEfFgGaAcsp@])"
    of_others = rf"[-+#0'I{flags}]*{_WIDTH}[A-Za-z@])"
    return re.compile(rf"%(?:[%{silent}]|(\d+\$)?({of_c}|{of_others}))")


def _after_percent(number: int, directive: str) -> str:
    return f"%{number + 1}${directive}"


def _before_verb(number: int, directive: str) -> str:
    """A directive of Go, which has its number after flags and width."""
    return "%" + _VERB.sub(rf"[{number + 1}]\g<0>", directive, count=1)


def _in_braces(number: int, directive: str) -> str:
    return f"{{{number}{directive}"


_VERB = re.compile("[A-Za-z]")
_BRACES = re.compile(r"\{\{|\{(\d+)?((?:[:!.\[][^{}]*)?\})")
_TILDES = re.compile(r"~(?:[~%\n]|(\d+@\*)?([^A-Za-z~]*[A-Za-z]))")
_NUMBER = re.compile(r"(?<=%)\d+\$|(?P<kept>%[-+ #0\d.]*)\[\d+\]|(?<=\{)\d+(?=[:!.\[}])")
#: Signs of a directive that needs the one before it, or several arguments.
_RELATIVE = re.compile(r"\*|<(?!PRI)")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
#: Formats of messages: the directives, and the one with a number if there are numbers.
_FORMATS: dict[str, tuple[re.Pattern[str], Callable[[int, str], str] | None]] = {
    **dict.fromkeys(names("awk d elisp javascript librep perl"), (_printf(), _after_percent)),
    **dict.fromkeys(names("php ruby tcl"), (_printf(), _after_percent)),
    **dict.fromkeys(names("c gcc-internal objc"), (_printf("m"), _after_percent)),
    "boost": (_printf("ntT"), _after_percent),
    "gfc-internal": (_printf("C"), _after_percent),
    "java-printf": (_printf("n", flags=",(<"), _after_percent),
    **dict.fromkeys(names("lua modula2 object-pascal python sh-printf"), (_printf(), None)),
    "go": (_printf(), _before_verb),
    **dict.fromkeys(names("c++ python-brace rust"), (_BRACES, _in_braces)),
    **dict.fromkeys(names("lisp scheme"), (_TILDES, None)),
}


@dataclass
class PoField:
    """A keyword of PO and its strings, or a comment or an empty line."""

    keyword: str  #: "#" for a comment or an empty line
    form: int | None  #: of a plural
    text: str
    start: int  #: of its strings in the file
    end: int
    formats: frozenset[str] = frozenset()  #: of its message, such as "c"


def translate_po(text: str, translate: TranslateTexts) -> str:
    """Fill the empty `msgstr` of a PO or POT file. The form of a plural that is for one thing gets the singular."""
    pieces: list[str | Passage] = []
    position = 0
    fields = [field for field in po_fields(text) if field.keyword != "#"]
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
        passage = _PoPassage(source, [], _po_string(source), formats=entry.formats)
        pieces += [text[position : entry.start], passage]
        position = entry.end
    return translate_pieces([*pieces, text[position:]], translate)


def catalogue_of(template: str) -> str:
    """A template (POT) with the header of a catalogue in UTF-8. Other files stay as they are.

    Raises:
        UserError: it has plurals, whose forms depend on the language.
    """
    header = _header([field for field in po_fields(template) if field.keyword != "#"])
    if "nplurals=INTEGER" in header.text:
        raise UserError(
            "documents: nplurals=INTEGER: this is a template, and its plurals need those of a language; "
            "make a catalogue first: msginit --locale=LANGUAGE"
        )
    if _NO_CHARSET not in header.text and "YEAR-MO-DA" not in header.text:
        return template
    head = _FUZZY.sub("", template[: header.end]).replace(_NO_CHARSET, "charset=UTF-8")
    return head + template[header.end :]


def _header(fields: list[PoField]) -> PoField:
    """The translation of the empty message, which comes first."""
    if len(fields) > 1 and not fields[0].text:
        return fields[1]
    return PoField("msgstr", None, "", 0, 0)


def _forms_of_numbers(fields: list[PoField]) -> list[int]:
    """The form of a plural for each number, by the header. Without one, the first form is for 1 only."""
    formula = _PLURAL.search(_header(fields).text)
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


def po_encoding(data: bytes) -> str:
    """The codec of a file by its header. A template, whose header names none, is in UTF-8."""
    return _codec_of(data.decode("latin-1"))


def _codec_of(text: str) -> str:
    """The codec that the header of a file names. A file with a byte order mark is in UTF-8."""
    header = None if text.startswith("\ufeff") else _HEADER.search(text)
    declared = _CHARSET.search(_po_text(header[1], "latin-1")) if header else None
    return exact_codec(declared[1] if declared else None)


def po_fields(text: str) -> list[PoField]:
    """The keywords of a file with their strings, and the lines between them. Obsolete messages are comments.

    Raises:
        UserError: a line is none of PO, or none at its place, or a string has bytes that are no text.
    """
    codec = _codec_of(text)
    fields: list[PoField] = []
    last = PoField("", None, "", 0, 0)
    formats: set[str] = set()  # of the next message
    number = 0
    for number, line in enumerate(_LINE.finditer(text), start=1):
        start = line.start() + line[1].startswith("\ufeff")
        content = text[start : line.end(1)].strip()
        if not content or content.startswith("#"):
            fields.append(PoField("#", None, content, start, line.end(1)))
            if content.startswith("#,"):
                flags = content.removeprefix("#,").replace(",", " ").split()
                formats.update(flag.removesuffix("-format") for flag in flags)
            continue
        match = _PO_LINE.match(text, start, line.end(1))
        if match is None or last.keyword not in _BEFORE[match[1] or ""]:
            raise _no_po(number, content)
        strings = match[3].rstrip()
        start = match.start(3)
        end = start + len(strings)
        if not match[1]:
            last.text += strings
            last.end = end
            continue
        own = last.formats
        if last.keyword in ("", "msgstr") and match[1] != "msgstr":
            own = frozenset(formats)
            formats = set()
        form = None if match[2] is None else int(match[2])
        last = PoField(match[1], form, strings, start, end, own)
        fields.append(last)
    if last.keyword not in ("", "msgstr"):
        raise _no_po(number, "the end of the file")
    for field in fields:
        if field.keyword != "#":  # its strings are complete
            field.text = _po_text(field.text, codec)
    return fields


def _no_po(number: int, line: str) -> UserError:
    return UserError(
        f"documents: line {number} is no line of PO at this place: {line[:60]!r}; msgfmt says more"
    )


@dataclass(frozen=True)
class _PoPassage(Passage):
    """A message, written as a string of PO."""

    formats: frozenset[str] = frozenset()

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        translation = "".join(part.target for part in parts)
        for name in self.formats & _FORMATS.keys():
            translation = self._with_numbers(translation, parts, name)
        return _po_string(_with_nested_tags(self.text, translation))

    def _with_numbers(self, translation: str, parts: Sequence[TranslatedPart], name: str) -> str:
        """The translation, whose directives are numbered if their order is another one.

        Raises:
            UserError: the format has no numbers for them.
        """
        pattern, numbered = _FORMATS[name]
        sources = [match for match in pattern.finditer(self.text) if match[2]]
        targets = [match[0] for match in pattern.finditer(translation) if match[2]]
        if any(match[1] for match in sources):
            return translation
        if sorted(targets) == sorted(match[0] for match in sources):
            order = self._order(sources, targets, parts)
            if order == sorted(order):
                return translation
        elif pattern is not _TILDES:  # a word after a percent sign can look like a directive
            return translation
        if numbered is None or any(map(_RELATIVE.search, targets)):
            raise UserError(
                f"documents: the translation of {self.text[:60]!r} would lose one of its formats or "
                "change the order of its formats; translate this message by hand first"
            )

        def with_number(match: re.Match[str]) -> str:
            if not match[2]:  # a percent sign
                return match[0]
            return numbered(order.pop(0), match[2])

        return pattern.sub(with_number, translation)

    def _order(
        self,
        sources: Sequence[re.Match[str]],
        targets: Sequence[str],
        parts: Sequence[TranslatedPart],
    ) -> list[int]:
        """The number of the source of each directive of a translation, by the alignment of its words."""
        elements = [Element("", match.start(), end=match.start()) for match in sources]
        placed = Placement(self.text, parts, elements).places()
        free = [elements.index(place.element) for place in placed]
        order = []
        for target in targets:
            number = next(number for number in free if sources[number][0] == target)
            free.remove(number)
            order.append(number)
        return order


def _with_nested_tags(source: str, translation: str) -> str:
    """A translation with its tags in the order of the source, if the alignment tears a pair of them apart."""
    tags = _TAG.findall(source)
    found = _TAG.findall(translation)
    is_complete = sorted(map(without_numbers, found)) == sorted(map(without_numbers, tags))
    if not is_complete or _is_nested(translation) or not _is_nested(source):
        return translation
    ordered = []
    for tag in map(without_numbers, tags):
        ordered.append(next(one for one in found if without_numbers(one) == tag))
        found.remove(ordered[-1])
    return _TAG.sub(lambda _: ordered.pop(0), translation)


def _is_nested(text: str) -> bool:
    events = [html_event(token) for token in scan(text)]
    tags = [event for event in events if event.kind in ("start", "end")]
    return len(tags) == 2 * len(matching_ends(tags))


def without_numbers(text: str) -> str:
    """A text without the numbers of its directives, such as those of `%2$s`, `%+[2]v` and `{1}`."""
    return _NUMBER.sub(lambda match: match["kept"] or "", text)


def is_choice_only(text: str) -> bool:
    """Return whether all words of a message are in a choice of ICU, as in `{n, plural, one {vote} other {votes}}`.

    A choice stays as it is, so that the message has no translation.
    """
    return _CHOICE.search(text) is not None and not has_words(text)


def _po_text(strings: str, codec: str) -> str:
    """The text of some strings. Their octal and hexadecimal codes are bytes in the encoding of the file.

    Raises:
        UserError: the bytes are no text.
    """
    joined = "".join(match[1:-1] for match in re.findall(_STRING, strings))
    if all(_number_of(code) < 128 for code in _CODE.finditer(joined)):
        return _CODE.sub(_character, joined)
    pieces = []
    position = 0
    for code in _CODE.finditer(joined):
        number = _number_of(code)
        content = bytes([number]) if number else _character(code).encode(codec)
        pieces += [joined[position : code.start()].encode(codec), content]
        position = code.end()
    pieces.append(joined[position:].encode(codec))
    try:
        return b"".join(pieces).decode(codec)
    except UnicodeError:
        raise UserError(
            f"documents: the codes in {joined[:60]!r} are no text in {codec}; write their letters"
        ) from None


def _number_of(code: re.Match[str]) -> int:
    """The byte of an octal or hexadecimal code, 0 of a letter. gettext takes the last byte of a long number."""
    octal, hexadecimal, _ = code.groups()
    return int(octal or hexadecimal or "0", 8 if octal else 16) % 256


def _character(code: re.Match[str]) -> str:
    """The character of an escape sequence: one of ASCII, or a letter."""
    letter = code[3]
    return _ESCAPES.get(letter, letter) if letter else chr(_number_of(code))


def _po_string(text: str) -> str:
    escaped = (
        _ESCAPED.get(letter, letter if letter >= " " else f"\\{ord(letter):03o}") for letter in text
    )
    return f'"{"".join(escaped)}"'
