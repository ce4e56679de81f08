"""Characters that are wrong in a sentence of any language: of a wrong encoding or alphabet, or invisible in a word."""

import re

_LATIN = "A-Za-z\u00c0-\u024f"
_CYRILLIC = "\u0400-\u04ff"
# Letters of one alphabet that look like letters of the other. "I" within Cyrillic is Chechen and Avar for their "Ӏ".
_CYRILLIC_LOOKALIKES = "асеорхуіАВСЕНІКМОРТХУ"
_LATIN_LOOKALIKES = "aceopxyiABCEHKMOPTXY"
_INVISIBLE = "\u200b\u2060\ufeff"

# Languages without spaces separate words by U+200B, and "SMSы" and "миниUSB" are words.
_WITHIN_WORD = re.compile(
    rf"(?<=[{_LATIN}])[{_CYRILLIC_LOOKALIKES}]+(?=[{_LATIN}])"
    rf"|(?<=[{_CYRILLIC}])[{_LATIN_LOOKALIKES}]+(?=[{_CYRILLIC}])"
    rf"|(?<=[{_LATIN}{_CYRILLIC}])[{_INVISIBLE}](?=[{_LATIN}{_CYRILLIC}])"
    # KOI8-R has small letters where windows-1251 has capitals. "мРНК" is a word.
    rf"|(?<![{_CYRILLIC}])[а-яё][А-ЯЁ]{{4,}}"
)
_FIRST_BYTES = frozenset("ВГДЕРСطظ")  # of letters in UTF-8, in windows-1251 and windows-1256
# windows-1251 that was read as ISO 8859-1, and no "Nããããão".
_ACCENTED = re.compile(r"(?:([\u00c0-\u00ff])(?!\1)){5}")
# Most texts have none of these characters, and a set tells it faster than an expression.
_SUSPECTS = frozenset(_CYRILLIC_LOOKALIKES + _INVISIBLE)
_LOST_LETTER = re.compile(rf"[{_LATIN}{_CYRILLIC}]\?[a-z\u00df-\u00ff\u0430-\u045f]")
_REPLACED = "\ufffd"
# Danish and Slovene quotations start with », Finnish and Swedish ones with ”. UTF-8 has no such byte at the start.
_OPENING_QUOTE = re.compile(r"(?<![^ (\[\u2013\u2014-])[»›”’](?=\w)")


def has_damaged_characters(text: str) -> bool:
    """Return True for text with damaged characters. Take out its addresses before, because they may contain `?`.

    Damaged are UTF-8 that was read as a different encoding (by the sequences that ftfy knows, or as a whole), Cyrillic
    in KOI8-R or windows-1251 that was, U+FFFD or a question mark in place of a letter, a Latin letter within a
    Cyrillic word or the reverse, and an invisible space within a word.
    """
    from ftfy.badness import is_bad

    if "?" in text and _LOST_LETTER.search(text):
        return True
    if text.isascii():
        return False
    if not _SUSPECTS.isdisjoint(text) and _WITHIN_WORD.search(text):
        return True
    if _REPLACED in text or _ACCENTED.search(text) or is_bad(_OPENING_QUOTE.sub("", text)):
        return True
    if _FIRST_BYTES.isdisjoint(text):
        return False
    return _is_utf8_read_as("cp1251", text) or _is_utf8_read_as("cp1256", text)


def _is_utf8_read_as(encoding: str, text: str) -> bool:
    """Return True if the bytes of a text are UTF-8. One letter may be so by chance."""
    try:
        return len(text.encode(encoding).decode("utf-8")) < len(text) - 1
    except UnicodeError:
        return False
