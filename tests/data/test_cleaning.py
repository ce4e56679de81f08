"""Cleaning: damage that is planted in good pairs is found, by its rule, and good pairs are kept."""

from itertools import count

import pytest
from datasets import Dataset

from hf_vanilla_transformer.data.cleaning import RULES, Limits, judge_pairs, sample_warnings
from hf_vanilla_transformer.data.cleaning_report import report_page, report_text
from hf_vanilla_transformer.utils.errors import UserError

ADJECTIVES = {"small": "kleine", "old": "alte", "red": "rote", "new": "neue", "long": "lange", "quiet": "leise"}
NOUNS = {
    "house": "Häuser",
    "street": "Straßen",
    "garden": "Gärten",
    "book": "Bücher",
    "door": "Türen",
    "fish": "Fische",
}
GOOD = [
    (f"We saw {a} and {b} {noun} {number} {other} now.", f"Wir sahen eben {x} und {y} {thing} bei {number} {place}.")
    for number, (a, x), (b, y), (noun, thing), (other, place) in zip(
        range(10, 400), *[[*ADJECTIVES.items()] * 65] * 2, *[[*NOUNS.items()] * 65] * 2, strict=True
    )
]  # fmt: skip

DAMAGE = {
    "length": lambda a, b: (a * 30, b * 30),
    "mojibake": lambda a, b: (a, b.replace("sahen", "fÃ¼r")),
    "markup": lambda a, b: (f"<b>{a}</b>", b),
    "addresses": lambda a, b: (f"{a} See www.example.org/a.", f"{b} Siehe www.example.org/b."),
    "copy": lambda a, b: (a, a),
    "script": lambda a, b: (a, "Сегодня мы видели старые дома у дороги и книги."),
    "repetition": lambda a, b: (a, b.replace("eben", "eben eben eben")),
    "numbers": lambda a, b: (f"{a} Page 7001.", f"{b} Seite 9002."),
    "ratio": lambda a, b: (a, "Wir."),
    "language": lambda a, b: (a, "Nous avons vu aujourd'hui les vieilles maisons près des rues."),
    "overlap": lambda a, b: (a, "Die Katze schläft lange auf dem warmen alten Dach."),
}


def judge(pairs, *rules, **options):
    judged, report = judge_pairs(zip(count(1), *zip(*pairs, strict=True)), rules or tuple(RULES), **options)
    return [rule for rule, _, _ in judged], report


def test_good_pairs_are_kept():
    reasons, report = judge(GOOD, languages=None)
    assert reasons == [None] * len(GOOD) and report.summary() == f"kept {len(GOOD)} of {len(GOOD)} pairs"


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        (("见https://a.org/b。我们走吧", "see https://a.org/b. let us go"), None),
        (("ดูhttps://a.org/bนะ", "see https://a.org/b ok"), None),
        (("我们今天去北京大学学习", "我们今天去北京大学，学习。"), "copy"),
        (("我们今天去北京大学学习", "昨天他很高兴地在家吃饭"), None),
    ],
)
def test_rules_count_words_without_spaces(pair, rule):
    assert judge([pair], "addresses", "copy")[0] == [rule]


@pytest.mark.parametrize("rule", DAMAGE)
def test_planted_damage_is_found_by_its_rule(rule):
    if rule == "language":
        pytest.importorskip("py3langid")
    damaged = {index: DAMAGE[rule](*GOOD[index]) for index in range(5, len(GOOD), 40)}
    pairs = [damaged.get(index, pair) for index, pair in enumerate(GOOD)]
    excluded = ["die Katze schläft lange auf dem warmen alten Dach"] if rule == "overlap" else []
    rules = [name for name in RULES if name not in ("duplicate", "near_duplicate")]
    languages = ("en", "de") if rule == "language" else None
    reasons, report = judge(pairs, *rules, excluded=excluded, languages=languages)
    assert {index: reason for index, reason in enumerate(reasons) if reason} == dict.fromkeys(damaged, rule)
    assert report.examples[rule][0] == (6, *damaged[5]) and len(report.examples[rule]) == min(10, len(damaged))
    assert rule in report_text(report) and RULES[rule][0] in report_page(report, "read")


def test_second_of_two_equal_pairs_is_dropped():
    first, second = GOOD[:2]
    loud = (first[0].upper().replace(".", " !"), first[1].upper())
    reasons, _ = judge([first, second, first, loud, (first[0], first[1].replace("eben", "jetzt"))])
    assert reasons == [None, None, "duplicate", "near_duplicate", None]


@pytest.mark.parametrize(
    "pair",
    [
        ("Paris", "Paris"),
        ("Windows 10 Pro", "Windows 10 Pro"),
        ("We have 3 dogs.", "Wir haben drei Hunde."),
        ("1,234.5 km", "1.234,5 km"),
        ("See www.example.org.", "Siehe www.example.org!"),
        ("<b>Now</b> it is <i>late</i>", "<b>Jetzt</b> ist es <i>spät</i>"),
        ("very very very good", "sehr sehr sehr gut"),
        ("naïve café à la carte", "naives Café à la carte mit Kuchen"),
        ("Two Greek letters: α and β", "Zwei griechische Buchstaben: α und β"),
        ("...", "…"),
    ],
)
def test_unusual_translations_are_kept(pair):
    limits = {"ratio": (0.0, 1.0), "scripts": (frozenset({"LATIN"}),) * 2}
    assert judge([pair], **limits)[0] == [None]


def test_scripts_come_from_the_text():
    pairs = [("犬が走ります", "The dog runs"), ("カタカナとひらがな", "Katakana and hiragana")] * 20
    assert Limits.of_sample(pairs).scripts == (frozenset({"CJK"}), frozenset({"LATIN"}))
    assert judge([*pairs, ("dogs run", "The dogs run fast")], "script")[0][-1] == "script"


def test_unknown_rule_is_refused():
    with pytest.raises(UserError, match="'spelling'.*numbers"):
        judge(GOOD, "spelling")


def test_training_warns_of_frequent_damage():
    pairs = [DAMAGE["copy"](*pair) if index % 10 == 3 else pair for index, pair in enumerate(GOOD)]
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    table = Dataset.from_dict({"source": sources, "target": targets, "line": range(1, len(pairs) + 1)})
    (warning,) = sample_warnings(table)
    assert "10%" in warning and "lines 4, 14, 24" in warning
    assert list(sample_warnings(table.select(range(3)))) == []
