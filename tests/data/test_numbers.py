"""The built-in corpus: correct number words, disjoint splits, determined by the seed."""

from typing import Any

import pytest
from num2words import num2words

from hf_vanilla_transformer.data import number_pairs
from hf_vanilla_transformer.errors import UserError


def words(corpus, *splits):
    return [text for split in splits for text in corpus[split]["source"][:]]


@pytest.fixture(scope="module")
def corpus():
    return number_pairs(size=2000, seed=1, held_out=300, maximum=99_999)


def test_sizes_and_columns(corpus):
    assert {split: len(part) for split, part in corpus.items()} == {"train": 2000, "validation": 300, "test": 300}
    assert all(part.column_names == ["source", "target"] for part in corpus.values())


def test_pairs_equal_num2words():
    corpus = number_pairs(size=980, seed=0, held_out=10, maximum=999)
    spelt = {row["source"]: row["target"] for part in corpus.values() for row in part}
    assert spelt == {num2words(n, lang="en"): num2words(n, lang="de") for n in range(1000)}
    assert spelt["two hundred and thirty-four"] == "zweihundertvierunddreißig"
    assert spelt["zero"] == "null"
    assert spelt["seventeen"] == "siebzehn"


def test_splits_are_disjoint(corpus):
    everything = words(corpus, "train", "validation", "test")
    assert len(everything) == len(set(everything)) == 2600


def test_short_numbers_have_the_same_share_in_every_split(corpus):
    short = {num2words(n, lang="en") for n in range(1000)}
    shares = [len(short & set(words(corpus, split))) / len(corpus[split]) for split in ("train", "test")]
    # 2,600 numbers of five lengths: at most 10 + 90 + 900 …; a uniform sample would have 1 in 100
    assert all(0.25 < share < 0.45 for share in shares)


def test_seed_determines_the_corpus():
    arguments: dict[str, Any] = {"size": 50, "held_out": 5, "maximum": 9999}
    assert words(number_pairs(seed=1, **arguments), "train") == words(number_pairs(seed=1, **arguments), "train")
    assert words(number_pairs(seed=1, **arguments), "train") != words(number_pairs(seed=2, **arguments), "train")


def test_numbers_up_to_the_maximum_are_used():
    corpus = number_pairs(size=233, seed=3, held_out=1, maximum=234)
    assert set(words(corpus, "train", "validation", "test")) == {num2words(n) for n in range(235)}


def test_other_languages():
    corpus = number_pairs(size=98, seed=0, source_lang="fr", target_lang="es", held_out=1, maximum=99)
    spelt = {row["source"]: row["target"] for part in corpus.values() for row in part}
    assert spelt["quatre-vingt-dix-sept"] == "noventa y siete"


def test_invalid_arguments_are_refused():
    with pytest.raises(UserError, match=r"'xx'.* de, en,"):
        number_pairs(size=10, seed=0, target_lang="xx")
    with pytest.raises(UserError, match="^numbers_size: .*2,100 .* 1,000"):
        number_pairs(size=100, seed=0, maximum=999)
    with pytest.raises(UserError, match="size.* 0"):
        number_pairs(size=0, seed=0)
