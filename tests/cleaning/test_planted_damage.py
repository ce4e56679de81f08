"""Thirty kinds of damage, planted in a hundred of the 29,000 pairs of Multi30k en-de each: how many are found."""

import gzip
import html
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest

from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs

TEXT = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TEXT / "train.en.gz").is_file(), reason="needs Multi30k in ../shared/data"
    ),
]
EACH = 100

#: Source, target, a random other pair, and random numbers. Returns the damaged pair.
Damage: TypeAlias = Callable[[str, str, tuple[str, str], Random], tuple[str, str]]


def misread(text: str) -> str:
    return f"{text} Öl, größer, é".encode().decode("cp1252", errors="replace")


def shuffled(text: str, dice: Random) -> str:
    words = text.split()
    dice.shuffle(words)
    return " ".join(words)


#: The damage, and the least number that must be found: without `detect`, and with it.
DAMAGE: dict[str, tuple[Damage, int, int]] = {
    "tags": (lambda a, b, other, dice: (a, f"<p><b>{b}</b></p>"), 100, 100),
    "mojibake": (lambda a, b, other, dice: (a, misread(b)), 100, 100),
    "double mojibake": (lambda a, b, other, dice: (a, misread(misread(b))), 100, 100),
    "replacement characters": (
        lambda a, b, other, dice: (a, b.replace("e", "\ufffd", 2)),
        100,
        100,
    ),
    "numbers differ": (lambda a, b, other, dice: (f"{a} Page 7001.", f"{b} Seite 9002."), 100, 100),
    "copied source": (lambda a, b, other, dice: (a, a), 100, 100),
    "copied target": (lambda a, b, other, dice: (b, b), 100, 100),
    "copied but one word": (lambda a, b, other, dice: (a, f"{a.rsplit(' ', 1)[0]} Hund."), 95, 95),
    "a quarter of the target": (lambda a, b, other, dice: (a, b[: len(b) // 4]), 95, 95),
    "loop": (
        lambda a, b, other, dice: (a, f"{b} und so und so und so und so und so weiter"),
        100,
        100,
    ),
    "address on one side": (lambda a, b, other, dice: (f"{a} See www.example.org/a.", b), 100, 100),
    "mail on one side": (lambda a, b, other, dice: (a, f"{b} An a.b@example.org."), 100, 100),
    "Russian target": (
        lambda a, b, other, dice: (a, "Сегодня мы видели старые дома у дороги и книги."),
        100,
        100,
    ),
    "Chinese target": (
        lambda a, b, other, dice: (a, "一个男人和他的狗在公园的草地上散步。"),
        100,
        100,
    ),
    "punctuation only": (lambda a, b, other, dice: (a, "... --- ???"), 95, 95),
    "1,200 characters": (lambda a, b, other, dice: (f"{a} {a}" * 40, f"{b} {b}" * 40), 95, 95),
    "exact duplicate": (lambda a, b, other, dice: other, 100, 100),
    "near duplicate": (
        lambda a, b, other, dice: (other[0].upper(), other[1].upper() + " !"),
        100,
        100,
    ),
    "French target": (
        lambda a, b, other, dice: (a, "Un homme marche avec son chien dans le grand parc."),
        0,
        85,
    ),
    "sides swapped": (lambda a, b, other, dice: (b, a), 0, 90),
    "Czech source": (
        lambda a, b, other, dice: ("Muž jde se svým psem po trávě ve velkém parku.", b),
        0,
        60,
    ),
    "a sentence too many": (lambda a, b, other, dice: (a, f"{b} {other[1]}"), 30, 30),
    "other target": (lambda a, b, other, dice: (a, other[1]), 5, 5),
    "misordered words": (lambda a, b, other, dice: (a, shuffled(b, dice)), 0, 0),
    "capitals on one side": (lambda a, b, other, dice: (a, b.upper()), 95, 95),
    "homoglyphs": (
        lambda a, b, other, dice: (a, b.translate(str.maketrans("aeo", "аео"))),
        100,
        100,
    ),
    "question marks for umlauts": (lambda a, b, other, dice: (a, re.sub("[äöüß]", "?", b)), 55, 55),
    "zero-width characters": (lambda a, b, other, dice: (a, b.replace("e", "e\u200b")), 95, 95),
    "words run together": (lambda a, b, other, dice: (a, b.replace(" ", "")), 60, 60),
    "number on one side": (lambda a, b, other, dice: (f"{a} 7001", b), 0, 0),
}


def right_pairs() -> list[PairRow]:
    sides = []
    for code in ("en", "de"):
        with gzip.open(TEXT / f"train.{code}.gz", "rt", encoding="utf-8") as file:
            sides.append([html.unescape(line.rstrip("\n")) for line in file])
    pairs = zip(*sides, strict=True)
    return [PairRow(number, *pair, direction=("en", "de")) for number, pair in enumerate(pairs)]


@pytest.mark.parametrize("detect", [False, True])
def test_damage_is_found_and_right_pairs_are_kept(detect: bool) -> None:
    if detect:
        pytest.importorskip("py3langid")
    dice = Random(1)
    rows = right_pairs()
    damaged = dice.sample(range(len(rows) // 2, len(rows)), EACH * len(DAMAGE))
    kinds = {
        place: kind
        for number, kind in enumerate(DAMAGE)
        for place in damaged[number :: len(DAMAGE)]
    }
    originals = dice.sample(range(len(rows) // 2), len(damaged))
    for place, other in zip(damaged, originals, strict=True):
        source, target = DAMAGE[kinds[place]][0](*rows[place].pair, rows[other].pair, dice)
        rows[place] = rows[place]._replace(source=source, target=target)
    judged, _ = judge_pairs(rows, detect=detect)
    dropped = {row.line: rule for rule, row in judged if rule is not None}
    found = Counter(kinds[line] for line in dropped if line in kinds)
    print({kind: found[kind] for kind in DAMAGE})
    missed = {
        kind: found[kind] for kind, (_, *least) in DAMAGE.items() if found[kind] < least[detect]
    }
    assert not missed
    wrong = [
        line for line, rule in dropped.items() if line not in kinds and "duplicate" not in rule
    ]
    print(
        len(wrong), "right pairs dropped", [(dropped[line], rows[line].pair) for line in wrong[:12]]
    )
    assert len(wrong) <= 0.001 * len(rows)
