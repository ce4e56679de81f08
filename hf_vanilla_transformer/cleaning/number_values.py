"""The numbers of a text by their values, so that both sides of a pair can be compared.

Languages write one number in many ways: with the digits of their script, with "," or "." for decimals, in groups of
three or two digits, with "million" or "万". Dates, times, years of other calendars and measures in miles, pounds or °F
have other numbers in other languages, and are not compared. Where a form has several readings, such as "1.234", any
reading counts.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, product

Values = frozenset[Decimal]

# Spaces between groups of three digits: also the no-break, thin, narrow no-break and figure space.
_SPACES = " \u00a0\u2009\u202f\u2007"
_APOSTROPHES = "'\u2019\u02bc"
_ARABIC_DECIMAL = "\u066b"
_ARABIC_GROUPS = "\u066c\u060c"
_FULL_WIDTH = {"\uff0c": ",", "\uff0e": ".", "\uff1a": ":", "\uff0f": "/"}

_RUN = re.compile(rf"\d+(?:(?:[.,/:\-{_APOSTROPHES}]|[{_SPACES}](?=\d{{3}}(?!\d)))\d+)*")
# Groups of three digits, or of two before the last ones, as in India, and decimals after another sign
_GROUPED = re.compile(
    rf"(?P<whole>\d{{1,3}}(?P<sign>[.,{_SPACES}{_APOSTROPHES}])(?:\d{{2,3}}(?P=sign))*\d{{3}})"
    r"(?P<decimals>(?!(?P=sign))[.,]\d+)?"
)
_DECIMAL = re.compile(r"\d+[.,]\d+")
_DATE = re.compile(r"\d{4}([./-])\d{1,2}\1\d{1,2}|\d{1,2}([./-])\d{1,2}\2(?:\d{4}|\d{2})")
_CLOCK_OR_SHARE = re.compile(r"\d+(?:[:/]\d+)+")
# "8h30", "5 p.m.", "17 Uhr", "8.30 Uhr", "17時", "오후 5시"
_AFTER_CLOCK = re.compile(
    r"\s?(?:h\s?\d{2}\b|h\b|[ap]\.\s?m\b|[ap]m\b|uhr\b|o['\u2019]clock\b|\u0447\u0430\u0441|[\u6642\u65f6\u70b9\u9ede\uc2dc])",
    re.IGNORECASE,
)
_MINUTES = re.compile(r"(?<=\d)h\s?\d{2}\b", re.IGNORECASE)
_HOURS = re.compile(r"\dh\s?$", re.IGNORECASE)
_LONGEST_BEFORE = 4  # characters that `_HOURS` looks at
# Japanese eras, Taiwan's, the Buddhist one, and words for "year" before one of Iran's or of the Islamic calendar
_YEAR_OF_ERA = re.compile(
    r"(?:明治|大正|昭和|平成|令和|民國|民国) ?\d{1,3}|(?:พ\.ศ\.|ปี) ?2[45]\d\d(?!\d)|(?:سال|عام|سنة) ?1[34]\d\d(?!\d)"
)

#: Words after a number that multiply it, by power of ten. A star stands for any ending.
_WORDS_OF_POWERS = {
    2: "hundred hundert cent 百 백",
    3: "thousand tausend tsd mille mil k bin tys ezer ribu nghìn ngàn tusen tusind tuhat* mii тыс* тисяч* хиляд* "
    "χιλιάδες ألف آلاف هزار אלף 千 천 हज़ार* พัน* ພັນ* ពាន់* ထောင်*",
    4: "万 萬 만 หมื่น* ໝື່ນ* ម៉ឺន* သောင်း*",
    5: "lakh* लाख* แสน* ແສນ* សែន* သိန်း*",
    6: "million* milion* miljo* milyon* mio mill mln m millón millió* milione milioni milioane milhão milhões juta "
    "triệu млн миллион* мільйон* милион* εκατομμύρι* εκατ مليون* ملايين میلیون* מיליון* ล้าน* ລ້ານ* លាន* သန်း*",
    7: "crore* करोड़*",
    8: "億 亿 억",
    9: "billion* bn milliard* miliard* miljard* milyar* miliar mrd mld miljardi* tỷ tỉ bilhão bilhões "
    "млрд миллиард* мільярд* милиард* δισεκατομμύρι* δισ مليار* میلیارد* מיליארד* अरब* พันล้าน*",
    12: "trillion* trilyon* triliun billion* billón billones bilion* biljo* триллион* трильйон* 兆 조",
}
_UNSPACED_MULTIPLIERS = {
    word: Decimal(10) ** power
    for power, words in _WORDS_OF_POWERS.items()
    for word in words.split()
    if len(word) == 1 and not word.isascii()
}
_UNSPACED = f"[{''.join(_UNSPACED_MULTIPLIERS)}]"


def _pattern_of_words(words: str) -> re.Pattern[str]:
    """A pattern of one of these words after a number."""
    composed = re.escape(unicodedata.normalize("NFC", words))
    any_word = composed.replace(r"\*", r"\w*").replace(r"\ ", "|")
    return re.compile(rf"[ \u00a0\u202f-]?(?:{any_word})(?!\w)", re.IGNORECASE)


_MULTIPLIERS = {
    Decimal(10) ** power: _pattern_of_words(words) for power, words in _WORDS_OF_POWERS.items()
}
_MULTIPLIERS_AFTER = re.compile(rf"[ \u00a0\u202f-]?({_UNSPACED}+)")
_LONGEST_MULTIPLIER = 20  # characters
_NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?"
#: several numbers with multipliers that are one: 1億2000万, 1만 2,345
_SUM = re.compile(rf"(?:(?:{_NUMBER}){_UNSPACED}+ ?)+(?:{_NUMBER}){_UNSPACED}*")
_ADDEND = re.compile(rf"({_NUMBER})({_UNSPACED}*)")

# Units of measures that most languages convert: the number is another one there.
_CONVERTED_UNIT = re.compile(
    r"[ \u00a0\u202f-]?(?:miles?|mi|feet|foot|ft|inch(?:es)?|yards?|yd|pounds?|lbs?|ounces?|oz|gallons?|acres?|mph"
    r"|\u00b0\s?F|\u2109)(?![^\W\d_])",
    re.IGNORECASE,
)


@dataclass
class Numbers:
    """The numbers of a text."""

    #: for each number that is compared its readings, of one value each, or of several for a list such as "2,3"
    compared: list[list[Values]] = field(default_factory=list)
    #: values of all readings, also of dates, times and measures
    possible: set[Decimal] = field(default_factory=set)

    def lacks_one_of(self, other: "Numbers") -> bool:
        """Return whether a number of `other` has no reading whose values occur here."""
        return any(not self._has(readings) for readings in other.compared)

    def _has(self, readings: list[Values]) -> bool:
        if any(values <= self.possible for values in readings):
            return True
        years = product(chain.from_iterable(readings), self.possible)
        return any(_same_year(value, mine) for value, mine in years)


def numbers_of(text: str) -> Numbers:
    """Find the numbers of a text."""
    numbers = Numbers()
    if not any(map(str.isdecimal, text)):
        return numbers
    text = _SUM.sub(_sum, _YEAR_OF_ERA.sub(" ", _ascii_digits(text)))
    for run in _RUN.finditer(text):
        readings = list(_readings(run[0]))
        after = text[run.end() :]
        readings += _multiplied(readings, after)
        numbers.possible.update(chain.from_iterable(readings))
        if _is_date_or_time(run, text):
            numbers.possible.update(Decimal(part) for part in re.findall(r"\d+", run[0]))
        elif not _CONVERTED_UNIT.match(after):
            numbers.compared.append(readings)
    return numbers


def _ascii_digits(text: str) -> str:
    """The text with ASCII digits and separators."""
    if text.isascii():
        return text
    text = "".join(
        str(unicodedata.decimal(sign)) if sign.isdecimal() else _FULL_WIDTH.get(sign, sign)
        for sign in text
    )
    text = re.sub(rf"(?<=\d){_ARABIC_DECIMAL}(?=\d)", ".", text)
    return re.sub(rf"(?<=\d)[{_ARABIC_GROUPS}](?=\d)", ",", text)


def _sum(match: re.Match[str]) -> str:
    """The digits of the sum of several numbers with multipliers."""
    total = Decimal(0)
    for number, multipliers in _ADDEND.findall(match[0]):
        total += Decimal(number.replace(",", "")) * _product(multipliers)
    return f"{total.normalize():f}"


def _is_date_or_time(run: re.Match[str], text: str) -> bool:
    if _DATE.fullmatch(run[0]) or _CLOCK_OR_SHARE.fullmatch(run[0]):
        return True
    before = text[max(0, run.start() - _LONGEST_BEFORE) : run.start()]
    return bool(
        _AFTER_CLOCK.match(text, run.end())
        or _MINUTES.match(text, run.start() - 1)
        or _HOURS.search(before)
    )


def _readings(run: str) -> Iterator[Values]:
    """The values that a run of digits and separators may have."""
    parts = re.findall(r"\d+", run)
    if len(parts) == 1:
        yield _values(run)
        return
    if match := _GROUPED.fullmatch(run):
        whole = match["whole"].replace(match["sign"], "")
        yield _values(whole + (match["decimals"] or "").replace(",", "."))
    if _DECIMAL.fullmatch(run):
        yield _values(run.replace(",", "."))
    # several numbers: a list, a range, a day and its month
    yield _values(*parts)
    if "," in run and "." in run:  # a list of decimals, such as "2.5,3.5"
        yield _values(*(part for part in run.split(",") if re.fullmatch(r"\d+(?:\.\d+)?", part)))


def _values(*texts: str) -> Values:
    return frozenset(Decimal(text).normalize() for text in texts)


def _multiplied(readings: list[Values], after: str) -> list[Values]:
    """The readings times the word or characters after them, such as "million" and "千万".

    A word may have several values: "billion" is 10^9 in English and 10^12 in German.
    """
    start = unicodedata.normalize("NFC", after[:_LONGEST_MULTIPLIER])
    factors = [factor for factor, word in _MULTIPLIERS.items() if word.match(start)]
    if characters := _MULTIPLIERS_AFTER.match(start):
        factors.append(_product(characters[1]))
    return [
        frozenset((value * factor).normalize() for value in values)
        for factor in factors
        for values in readings
    ]


def _product(multipliers: str) -> Decimal:
    """The product of characters such as 千 and 万."""
    return math.prod((_UNSPACED_MULTIPLIERS[each] for each in multipliers), start=Decimal(1))


def _same_year(one: Decimal, other: Decimal) -> bool:
    """Return whether two values are one year, as "1990" and "90"."""
    earlier = min(one, other)
    later = max(one, other)
    return 1000 <= later <= 2999 and later % 100 == earlier
