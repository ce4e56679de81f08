"""Perturbations of text in many scripts: a source that stays as it is keeps its target."""

from random import Random

import pytest

from hf_vanilla_transformer.text.perturbations import PERTURBATIONS, Context
from hf_vanilla_transformer.text.words import graphemes, words

CASELESS = [
    "一个男人在遛狗。",
    "लड़का खाता है",
    "ผู้ชายกำลังวิ่ง",
    "رجل يركض",
    "ბიჭი გარბის",
    "犬が走る",
    "개가 달린다",
]


def perturbed(name, pair, number=0, languages=(None, None)):
    return PERTURBATIONS[name](Context(pair, ("other", "anderes"), Random(number), languages))


@pytest.mark.parametrize("source", CASELESS)
@pytest.mark.parametrize("name", ["upper", "title"])
def test_source_without_capitals_keeps_its_target(name, source):
    assert perturbed(name, (source, "A man walks his dog.")) == (source, "A man walks his dog.")
    assert perturbed(name, ("a dog runs", source))[1] == source


@pytest.mark.parametrize(
    "source",
    [
        "लड़का बहुत अच्छा खाना खाता है",
        "ผู้ชายกำลังวิ่งอยู่ในสวนสาธารณะ",
        "两只狗在雪地里奔跑，天气很冷。",
        "большая собака бежит.",
        "개가 어디에 있어요?",
        "ውሻው የት ነው? መጽሐፍ ያነባል።",
        "Որտե՞ղ է շունը։",
        "l’homme vas-tu",
    ],
)
def test_typos_change_letters_with_their_marks(source):
    changed = {perturbed("typos", (source, "x"), number)[0] for number in range(30)}
    assert len(changed - {source}) > 5
    letters = set(graphemes(source))
    for text in changed:
        assert set(graphemes(text)) <= letters  # no sign left its letter


def test_typo_exchanges_doubles_loses_or_replaces_one_letter():
    letters = list("abcdef")
    places = range(len(letters) - 1)
    begun = [("".join(letters[:place]), letters[place:]) for place in places]
    exchanged = {start + end[1] + end[0] + "".join(end[2:]) for start, end in begun}
    doubled = {start + end[0] + "".join(end) for start, end in begun}
    lost = {start + end[0] + "".join(end[2:]) for start, end in begun}
    replaced = {start + letter + "".join(end[1:]) for start, end in begun for letter in letters}
    typos = {perturbed("typos", ("abcdef", "x"), number)[0] for number in range(1000)}
    assert typos == exchanged | doubled | lost | replaced


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (("我们走。", "We go."), ("我们走", "We go")),
        (("我们走", "We go"), ("我们走。", "We go.")),
        (("वह जाता है।", "He goes."), ("वह जाता है", "He goes")),
        (("वह जाता है", "He goes"), ("वह जाता है।", "He goes.")),
        (("أين هو؟", "Where is he?"), ("أين هو", "Where is he")),
        (("¿Dónde está?", "Where is he?"), ("Dónde está", "Where is he")),
        (("เขาไป", "He goes"), ("เขาไป", "He goes")),
        (("وہ جاتا ہے", "He goes"), ("وہ جاتا ہے۔", "He goes.")),
        (("Πού είναι;", "Where is he?"), ("Πού είναι", "Where is he")),
        (("Շունը վազում է։", "The dog runs."), ("Շունը վազում է", "The dog runs")),
        (("He said;", "Он сказал."), ("He said;", "Он сказал.")),
        (("ᠪᠢ ᠶᠠᠪᠤᠨ᠎ᠠ᠃", "I go."), ("ᠪᠢ ᠶᠠᠪᠤᠨ᠎ᠠ", "I go")),
        (("ᱤᱧ ᱪᱟᱞᱟᱜ ᱠᱟᱱᱟ", "I go"), ("ᱤᱧ ᱪᱟᱞᱟᱜ ᱠᱟᱱᱟ᱾", "I go.")),
    ],
)
def test_marks_are_those_of_the_script(pair, expected):
    assert perturbed("end_punctuation", pair) == expected


def test_turkish_has_its_own_capitals():
    pair = ("istanbul içinde ırmak", "in istanbul")
    assert perturbed("upper", pair, languages=("tr", "en")) == (
        "İSTANBUL İÇİNDE IRMAK",
        "IN ISTANBUL",
    )
    assert perturbed("title", pair, languages=("tr-TR", "en"))[0] == "İstanbul İçinde Irmak"
    assert perturbed("upper", pair, languages=("en", "tr"))[1] == "İN İSTANBUL"


def test_capitals_are_for_all_words_of_a_sentence():
    pair = ("¿Dónde estás? ¡Aquí! L’homme dit: «vas-tu?»", "I'll ask {name} at a.b@c.de, %s.")
    upper = ("¿DÓNDE ESTÁS? ¡AQUÍ! L’HOMME DIT: «VAS-TU?»", "I'LL ASK {name} AT a.b@c.de, %s.")
    assert perturbed("upper", pair) == upper


def test_chinese_sentences_are_joined_without_a_space():
    context = Context(("我走。", "I go."), ("他来。", "He comes."), Random(0), (None, None))
    assert PERTURBATIONS["merge"](context) == (
        "我走。他来。",
        "I go. He comes.",
    )


def test_noise_is_foreign():
    for number in range(50):
        source, _ = perturbed("noise", ("η γάτα", "кошка"), number)
        added = source.replace("η γάτα", "")
        assert not any("α" <= letter <= "ω" or "а" <= letter <= "я" for letter in added)


def test_words_without_a_dictionary_are_letters_with_their_marks(monkeypatch):
    from hf_vanilla_transformer.text import words as module

    monkeypatch.setattr(module, "_dictionary_words", lambda: graphemes)
    assert ["ผู้ชาย"[start:end] for start, end in words("ผู้ชาย")] == ["ผู้", "ช", "า", "ย"]
    assert len(words("ກຳລັງ")) < len("ກຳລັງ")
