"""3,000 right pairs in twelve languages with the quotation marks, digits and groupings of each: all are kept."""

from random import Random

import pytest

from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs
from hf_vanilla_transformer.cleaning.rules import RULES
from tests.scripts.test_ten_scripts import TARGETS, UNSPACED, sentences

pytestmark = pytest.mark.slow
PAIRS = 250  # of each language
QUOTES = {
    "am": "«»",
    "ar": "«»",
    "de": "„“",
    "el": "«»",
    "he": "„”",
    "ja": "「」",
    "ka": "„“",
    "ru": "«»",
}
DIGITS = {"ar": "٠١٢٣٤٥٦٧٨٩", "hi": "०१२३४५६७८९", "th": "๐๑๒๓๔๕๖๗๘๙", "ja": "０１２３４５６７８９"}
GROUPING = {"de": ".", "el": ".", "ru": "\u202f", "ka": "\u00a0", "ar": "٬"}
DECIMAL = {"de": ",", "el": ",", "ru": ",", "ka": ",", "ar": "٫"}
#: a and b are sentences, n a number of thousands, m the same and 1,000, d a decimal number
FORMS = [
    "{open}{a}{close}{space}— {b}",
    "{a}{space}({n} km)",
    "{a}…{space}{open}{b}{close}",
    "{a} {d}%",
    "№ {n}: {b}",
    "{a}{space}\u200e{b}",
    "{a} ${n}–{m}",
    "{b}{space}‹{d} × {n}›",
]


def localised(code: str, text: str) -> str:
    return text.translate(str.maketrans("0123456789", DIGITS[code])) if code in DIGITS else text


def written(code: str, form: str, places: tuple[int, int], number: int, tenths: int) -> str:
    first, second = (sentences(code)[place] for place in places)
    opening, closing = QUOTES.get(code, "“”")
    grouped = (
        f"{value:,}".replace(",", GROUPING.get(code, ",")) for value in (number, number + 1000)
    )
    n, m = (localised(code, value) for value in grouped)
    return form.format(
        open=opening,
        close=closing,
        space="" if code in UNSPACED else " ",
        a=first,
        b=second,
        n=n,
        m=m,
        d=localised(code, f"{tenths // 10}{DECIMAL.get(code, '.')}{tenths % 10}"),
    )


@pytest.mark.parametrize("named", [True, False], ids=["directions", "no codes"])
def test_right_pairs_of_twelve_languages_are_kept(named: bool) -> None:
    dice = Random(3)
    rows = []
    for code in TARGETS:
        for number in range(PAIRS):
            places = (dice.randrange(36), dice.randrange(36))
            values = (
                FORMS[number % len(FORMS)],
                places,
                dice.randrange(1000, 9_000_000),
                dice.randrange(11, 999),
            )
            direction = ("en", code) if named else ("", "")
            rows.append(
                PairRow(len(rows) + 1, written("en", *values), written(code, *values), direction)
            )
    rules = [rule for rule in RULES if "duplicate" not in rule]
    judged, report = judge_pairs(rows, rules)
    assert [(rule, row.pair) for rule, row in judged if rule] == []
    assert report.seen == PAIRS * len(TARGETS) == 3000
