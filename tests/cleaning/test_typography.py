"""3,000 pairs with the typography and numbers of books and news: right pairs are kept, damage is found.

The text is Multi30k's. Sentences of the kinds below are appended to it, on both sides.
"""

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs

TEXT = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TEXT / "train.en.gz").is_file(), reason="needs Multi30k in ../shared/data"
    ),
]
PAIRS = 1000  # of each language
DAMAGED = 30  # of each kind

#: English, and the same in each language. {n} is a number of thousands, {d} one with a decimal, {y} a year.
SENTENCES = {
    "en": [
        "“It’s {n} km from here,” he said…",
        "She didn’t answer — not in {y}.",
        "The price rose by {d}% to ${n}.",
        "At 8:30 p.m. they left the café.",
        "“Voilà!” — the naïve guest’s answer.",
        "On May 5, {y}, {n} people came.",
    ],
    "de": [
        "„Es sind {n} km von hier“, sagte er …",
        "Sie antwortete nicht – nicht {y}.",
        "Der Preis stieg um {d} % auf {n} $.",
        "Um 20.30 Uhr verließen sie das Café.",
        "»Voilà!« – die Antwort des naïven Gasts.",
        "Am 5. Mai {y} kamen {n} Menschen, „zum Spaß“.",
    ],
    "fr": [
        "«\u00a0C’est à {n}\u00a0km d’ici\u00a0», a-t-il dit…",
        "Elle n’a pas répondu\u00a0– pas en {y}.",
        "Le prix a augmenté de {d}\u202f% à {n}\u00a0$.",
        "À 20\u00a0h\u00a030, ils ont quitté le café.",
        "«\u202fVoilà\u202f!\u202f»\u00a0— la réponse de l’invité naïf.",
        "Le 5 mai {y}, {n} personnes sont venues («\u00a0la liberté\u00a0»).",
    ],
    "cs": [
        "„Je to {n} km odtud,“ řekl…",
        "Neodpověděla — ne v roce {y}.",
        "Cena vzrostla o {d} % na {n} $.",
        "Ve 20.30 odešli z kavárny.",
        "„Voilà!“ – odpověď naivního hosta.",
        "Dne 5. května {y} přišlo {n} lidí.",
    ],
}
GROUPING = {"en": ",", "de": ".", "fr": "\u202f", "cs": "\u00a0"}
DECIMAL = {"en": ".", "de": ",", "fr": ",", "cs": ","}


def lines(language: str) -> list[str]:
    with gzip.open(TEXT / f"train.{language}.gz", "rt", encoding="utf-8") as file:
        return [next(file).rstrip("\n") for _ in range(3 * PAIRS)]


def filled(language: str, kind: int, number: int, tenths: int, year: int) -> str:
    grouped = f"{number:,}".replace(",", GROUPING[language])
    decimal = f"{tenths // 10}{DECIMAL[language]}{tenths % 10}"
    return SENTENCES[language][kind].format(n=grouped, d=decimal, y=year)


def right_pairs() -> list[PairRow]:
    dice = Random(0)
    english = lines("en")
    rows: list[PairRow] = []
    for part, language in enumerate(("de", "fr", "cs")):
        other = lines(language)
        for place in range(part * PAIRS, (part + 1) * PAIRS):
            values = (
                place % 6,
                dice.randrange(1000, 2_000_000),
                dice.randrange(11, 999),
                dice.randrange(1900, 2030),
            )
            source, target = (
                f"{text[place]} {filled(code, *values)}"
                for text, code in ((english, "en"), (other, language))
            )
            rows.append(PairRow(len(rows) + 1, source, target, ("en", language)))
    return rows


def misread(text: str) -> str:
    return f"{text} Öl, größer, é".encode().decode("cp1252", errors="replace")


DAMAGE: dict[str, Callable[[str, str], tuple[str, str]]] = {
    "tags on one side": lambda a, b: (a, f"<p><b>{b}</b></p>"),
    "mojibake": lambda a, b: (a, misread(b)),
    "other numbers": lambda a, b: (f"{a} Page 7001.", f"{b} 9002."),
    "copied source": lambda a, b: (a, a),
    "copied target": lambda a, b: (b, b),
    "a third of the target": lambda a, b: (a, b[: len(b) // 4]),
    "loop": lambda a, b: (a, f"{b} und so und so und so und so und so weiter"),
    "address on one side": lambda a, b: (f"{a} See www.example.org/a.", b),
    "Russian target": lambda a, b: (
        a,
        "Сегодня мы видели старые дома у дороги и читали длинные интересные книги.",
    ),
    "punctuation only": lambda a, b: (a, "... --- ???"),
    "too long": lambda a, b: (a * 30, b * 30),
}


def test_right_pairs_with_typography_are_kept_and_damage_is_found() -> None:
    rows = right_pairs()
    judged, report = judge_pairs(rows)
    dropped = [(rule, row) for rule, row in judged if rule]
    assert len(dropped) <= 0.002 * len(rows), [
        (rule, row.source, row.target) for rule, row in dropped[:9]
    ]

    places = Random(1).sample(range(len(rows)), DAMAGED * len(DAMAGE))
    kinds = {
        place: kind for number, kind in enumerate(DAMAGE) for place in places[number :: len(DAMAGE)]
    }
    mixed = [
        row._replace(
            **dict(zip(("source", "target"), DAMAGE[kinds[number]](*row.pair), strict=True))
        )
        if number in kinds
        else row
        for number, row in enumerate(rows)
    ]
    judged, report = judge_pairs(mixed)
    found = Counter(kinds[row.line - 1] for rule, row in judged if rule and row.line - 1 in kinds)
    assert found == dict.fromkeys(DAMAGE, DAMAGED)
