"""Sentences encoded word by word, against the tokenizer."""

import random

import pytest
from tokenizers import models, normalizers, pre_tokenizers

from hf_vanilla_transformer.text import train_tokenizer, word_encoding
from hf_vanilla_transformer.text.language_tokens import add_language_tokens
from hf_vanilla_transformer.text.word_encoding import WordEncoder, encodes_by_words

TEXTS = [
    "The dog's ball isn't here, they're late.",
    "Ein 3-jähriger Hund (Größe: 12,5 cm) läuft.",
    "ΟΔΥΣΣΕΥΣ ΣΟΦΟΣ σ İstanbul ǅ ﬁn",
    "'s 't ' '' 're' x's",
    "  two  spaces ",
    "tab\there\u00a0no-break\u3000wide\u2028line\x1cseparator\x85next",
    "",
    " ",
    "a",
    "</s> <s> <pad> x</s>",
    ">>de<< a dog >>DE<<",
    "日本語 の 文 🤷🏽‍♀️ e\u0301 \u0301x",
]
PARTS = [*"aB'3-.,ΣßĳéİK \t\u00a0\u3000\x1c🤷", "'s", " the", " 12", "</s>", ">>de<<", "  "]


def invented(count):
    draw = random.Random(1)
    return ["".join(draw.choices(PARTS, k=draw.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module", params=[False, True], ids=["cased", "lowercase"])
def tokenizer(request):
    return train_tokenizer(TEXTS * 3, vocab_size=400, lowercase=request.param)


@pytest.fixture(params=["plain", "languages"])
def any_tokenizer(request, tokenizer):
    if request.param == "plain":
        return tokenizer
    learned = train_tokenizer(TEXTS * 3, vocab_size=400)
    add_language_tokens(learned, [("en", "de")])
    return learned


def test_ids_are_those_of_the_tokenizer(any_tokenizer):
    assert encodes_by_words(any_tokenizer)
    encode = WordEncoder(any_tokenizer)
    texts = TEXTS + invented(3000)
    whole = any_tokenizer(texts)["input_ids"]
    assert encode(texts) == whole
    assert encode(texts[::-1]) == whole[::-1]  # every word came before


def test_memory_has_a_limit(tokenizer, monkeypatch):
    monkeypatch.setattr(word_encoding, "_REMEMBERED", 5)
    encode = WordEncoder(tokenizer)
    for text in TEXTS:
        assert encode([text]) == tokenizer([text])["input_ids"]
        assert len(encode._ids) <= max(5, len(text.split()))


def test_words_are_tokenized_once(tokenizer):
    encode = WordEncoder(tokenizer)
    encode(["a b c"])
    encode._tokenizer = None
    assert len(encode(["c b a", "a"])) == 2


def changed(tokenizer, **parts):
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def test_other_tokenizers_are_not_for_words():
    def fresh():
        return train_tokenizer(TEXTS, vocab_size=300)

    class Own(type(fresh())):
        """A user's class may do anything to a text."""

    own = fresh()
    own.__class__ = Own
    dropout = fresh()
    dropout.backend_tokenizer.model.dropout = 0.1
    others = [
        own,
        dropout,
        changed(fresh(), normalizer=normalizers.NFC()),
        changed(fresh(), normalizer=None),
        changed(fresh(), pre_tokenizer=pre_tokenizers.Metaspace()),
        changed(fresh(), model=models.BPE({"a": 0}, [])),
        changed(fresh(), model=models.WordLevel({"a": 0}, unk_token="a")),
    ]
    assert [encodes_by_words(each) for each in others] == [False] * len(others)
