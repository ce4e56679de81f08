"""Scripts that few corpora have, with quotation marks, digits, dates, addresses and invisible characters."""

import unicodedata
from pathlib import Path

import pytest

from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs
from hf_vanilla_transformer.cleaning.rules import RULES
from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer
from hf_vanilla_transformer.text import train_tokenizer

ENGLISH = [
    "I go to the market with a friend",
    "He reads a book in the garden",
    "We drink tea every morning",
]
#: script -> code of the language, the three sentences, digits
SCRIPTS: dict[str, tuple[str, list[str], str]] = {}
for line in (
    Path(__file__).with_name("rare_scripts.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
):
    script, code, *sentences, digits = line.split("\t")
    SCRIPTS[script] = code, sentences, digits
#: in English and in the other language. a and b are sentences, the numbers have the digits of the language
FORMS = [
    ("{a}.", "{a}."),
    ("“{a},” {b}…", "«\u00a0{a}\u00a0», {b}…"),
    ("{a} at 8:30.", "{a} {t}."),
    ("{a} on {y}-05-12.", "{a} 12.05.{y}."),
    ("{a} for ${n}.", "{a} {n} $."),
    ("{a} (15%).", "{a} ({p}\u202f%)."),
    ("\u200e{a}\u200f.", "\u202b{a}\u202c."),
    ("soft\u00adly {a}", "{a}\u00ad{b}"),
    ("{a} 👨‍👩‍👧‍👦🏳️‍🌈 🇩🇪", "{a} 👨‍👩‍👧‍👦🏳️‍🌈 🇩🇪"),
    ("{a}: https://a.org/b, {b}", "{a}: https://a.org/b、{b}"),
    ("{a}\u00a0— {b}", "{a}\u3000— {b}"),
    ("{a}?", "{a}؟"),
    ("{a} 3.5 kg", "{a} {k} kg"),
    ("mail a@b.org: {a}", "{a}a@b.org{b}"),
    ("{a} €1.2 million", "{a} 1,2 million €"),
    ("{a}\ufeff", "\ufeff{a}"),
    ("H₂O, m², ½: {a}", "H₂O, m², ½: {a}"),
]


def rows(named: bool) -> list[PairRow]:
    made = []
    for code, sentences, digits in SCRIPTS.values():
        local = str.maketrans("0123456789", digits)
        for number, (english, other) in enumerate(FORMS * 6):
            first, second = number % 3, number // 3 % 3
            amount, year = 1000 + 7919 * number, 1900 + number
            source = english.format(a=ENGLISH[first], b=ENGLISH[second], n=f"{amount:,}", y=year)
            values = {
                "n": f"{amount:,}".replace(",", "."),
                "y": str(year),
                "t": "8:30",
                "p": "15",
                "k": "3,5",
            }
            values = {name: value.translate(local) for name, value in values.items()}
            own = [
                unicodedata.normalize("NFD", text) if code == "ko" else text for text in sentences
            ]
            target = other.format(a=own[first], b=own[second], **values)
            made.append(PairRow(len(made) + 1, source, target, ("en", code) if named else ("", "")))
    return made


@pytest.mark.parametrize("named", [True, False], ids=["directions", "no codes"])
def test_right_pairs_of_every_script_are_kept(named: bool) -> None:
    rules = [rule for rule in RULES if "duplicate" not in rule]
    judged, _ = judge_pairs(rows(named), rules)
    assert [(rule, row.pair) for rule, row in judged if rule] == []


def test_text_of_every_script_is_restored() -> None:
    texts = [text for row in rows(True) for text in row.pair]
    tokenizer = train_tokenizer(texts[::40], vocab_size=400)
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts


@pytest.mark.parametrize("script", SCRIPTS)
def test_bleu_has_the_tokenizer_of_the_language(script: str) -> None:
    own = {
        "zh": "zh",
        "ja": "ja-mecab",
        "ko": "ko-mecab",
        "km": "char",
        "lo": "char",
        "my": "char",
        "bo": "char",
    }
    code, sentences, _ = SCRIPTS[script]
    form = "NFD" if code == "ko" else "NFC"
    expected = own.get(code, "13a")
    if "-" in expected:
        pytest.importorskip(
            f"mecab_{code}" if code == "ko" else "MeCab", reason="sacrebleu[ja,ko] is not installed"
        )
    assert fitting_tokenizer([unicodedata.normalize(form, text) for text in sentences]) == expected


def test_bleu_takes_few_kana_for_japanese() -> None:
    """A text with eleven Chinese characters for two kana. Without MeCab characters stand for words."""
    assert fitting_tokenizer(["東京都知事選挙の結果と分析"]) in ("ja-mecab", "char")


@pytest.mark.parametrize(
    ("other", "expected"),
    [("I like this book", "zh"), ("나는 이 책을 좋아해요", "char")],
    ids=["Latin", "Hangul"],
)
def test_bleu_of_chinese_beside_another_script(other: str, expected: str) -> None:
    """Its tokenizer splits Latin words, too. No other than characters fits two scripts that have tokenizers."""
    assert fitting_tokenizer(["我喜欢这本书"] * 5 + [other] * 5) == expected
