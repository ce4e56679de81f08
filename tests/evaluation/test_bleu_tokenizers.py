"""The tokenizer of BLEU that fits the script of the references: each share of lines and letters at its bound."""

import logging

import pytest
from sacrebleu.metrics import BLEU

from hf_vanilla_transformer.evaluation import bleu_tokenizers
from hf_vanilla_transformer.evaluation.bleu_tokenizers import (
    _of_line,
    _of_script,
    check_tokenizer,
    fitting_tokenizer,
    warn_once,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

LATIN = "ein Hund"
THAI = "สุนัข"
CHINESE = "两只狗"
JAPANESE = "犬が走る"
KOREAN = "개가 달린다"


@pytest.fixture(autouse=True)
def no_earlier_warnings():
    warn_once.cache_clear()


@pytest.mark.parametrize(
    ("line", "tokenizer"),
    [
        ("abcd中", "13a"),  # a fifth of the letters
        ("abcdefgh中国", "13a"),
        ("abc中", "zh"),
        ("中国人民日报新闻网络の", "zh"),
        (
            "中国人民日报新闻网の",
            "ja-mecab",
        ),  # more than a tenth of the Chinese characters is kana
        ("한국어 中", "ko-mecab"),
        ("한 中国", "zh"),
        ("ｶﾅ", "ja-mecab"),
        ("ខ្មែរ", "char"),
        ("𠀀", "zh"),
    ],
)
def test_line_has_the_tokenizer_of_most_of_its_letters(line, tokenizer):
    assert _of_line(line) == tokenizer


@pytest.mark.parametrize(
    ("counts", "tokenizer", "is_mixed"),
    [
        ({}, "13a", False),
        ({LATIN: 96, THAI: 4}, "13a", False),
        ({LATIN: 95, THAI: 5}, "char", True),  # a twentieth of the lines is present
        ({THAI: 8, LATIN: 2}, "char", False),
        ({THAI: 7, LATIN: 3}, "char", True),  # three tenths are a mixture
        (
            {THAI: 8, LATIN: 2, "1 2 3": 90},
            "char",
            False,
        ),  # lines without letters do not count
        ({CHINESE: 5, LATIN: 5}, "zh", False),
        ({KOREAN: 9, LATIN: 1}, "ko-mecab", False),
        ({JAPANESE: 4, CHINESE: 2}, "ja-mecab", False),  # half as many lines without kana
        ({JAPANESE: 4, CHINESE: 1}, "ja-mecab", False),
        ({JAPANESE: 4, CHINESE: 3}, "char", True),
        ({JAPANESE: 4, CHINESE: 1, THAI: 4}, "char", True),
        ({KOREAN: 4, CHINESE: 1}, "char", True),
    ],
)
def test_text_has_the_tokenizer_of_its_lines(counts, tokenizer, is_mixed):
    lines = [line for line, count in counts.items() for _ in range(count)]
    assert _of_script(lines) == (tokenizer, is_mixed)


@pytest.mark.parametrize(
    ("count", "is_mixed"),
    [(20_000, True), (20_001, False), (20_002, False), (40_001, True)],
)
def test_at_most_20_000_lines_at_even_distances_choose(count, is_mixed):
    """Every line, every second one, which is Thai, or every third one."""
    lines = [THAI, LATIN] * (count // 2) + [THAI] * (count % 2)
    assert _of_script(lines) == ("char", is_mixed)


def test_mixture_is_scored_by_characters_with_one_warning(caplog):
    for _ in range(2):
        assert fitting_tokenizer([THAI, LATIN]) == "char"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "several scripts" in caplog.text


def test_fitting_tokenizer_warns_of_nothing_else(caplog):
    assert fitting_tokenizer([LATIN]) == "13a"
    assert fitting_tokenizer([CHINESE]) == "zh"
    assert not caplog.records


def test_characters_take_the_place_of_a_tokenizer_whose_package_is_missing(monkeypatch, caplog):
    def refuse(name):
        raise UserError(f"no {name}")

    monkeypatch.setattr(bleu_tokenizers, "check_tokenizer", refuse)
    assert fitting_tokenizer([KOREAN]) == "char"
    assert "no ko-mecab; BLEU is of characters" in caplog.text


def test_unknown_tokenizer_is_refused_with_those_that_exist():
    message = error_of(check_tokenizer, "klingon")
    assert message.startswith("tokenize: ")
    assert "'klingon'" in message
    assert all(name in message for name in BLEU.TOKENIZERS)


def test_tokenizer_that_cannot_be_loaded_is_a_one_line_error(monkeypatch):
    def missing(name):
        raise RuntimeError("\nPlease install\n\n    pip install extra\n")

    check_tokenizer.cache_clear()
    monkeypatch.setattr("sacrebleu.metrics.bleu._get_tokenizer", missing)
    message = error_of(check_tokenizer, "ja-mecab")
    check_tokenizer.cache_clear()
    assert "'ja-mecab'" in message
    assert "pip install extra" in message


def test_tokenizer_is_loaded_once(monkeypatch):
    loaded = []

    class Counted(BLEU):
        def __init__(self, **settings):
            loaded.append(settings)

    monkeypatch.setattr(bleu_tokenizers, "BLEU", Counted)
    check_tokenizer.cache_clear()
    for _ in range(2):
        check_tokenizer("zh")
    check_tokenizer.cache_clear()
    assert loaded == [{"tokenize": "zh"}]
