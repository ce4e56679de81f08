"""The built-in corpus: correct number words, disjoint splits, determined by the seed."""

from collections import Counter

import pytest
from num2words import num2words

from hf_vanilla_transformer.corpora import number_pairs
from hf_vanilla_transformer.utils.errors import UserError


def words(corpus, *splits):
    return [text for split in splits for text in corpus[split]["source"][:]]


@pytest.fixture(scope="module")
def corpus():
    return number_pairs(size=2000, seed=1, held_out=300, maximum=99_999)


def test_pairs_equal_num2words():
    corpus = number_pairs(size=1020, seed=0, held_out=10, maximum=999)  # 40 pairs are repeated
    spelt = {row["source"]: row["target"] for part in corpus.values() for row in part}
    assert spelt == {num2words(n, lang="en"): num2words(n, lang="de") for n in range(1000)}
    assert spelt["two hundred and thirty-four"] == "zweihundertvierunddreißig"
    assert spelt["zero"] == "null"
    assert spelt["seventeen"] == "siebzehn"


def test_splits_are_disjoint(corpus):
    parts = [words(corpus, split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [2000, 300, 300]
    repeated = 9 * 10  # the numbers of one digit are a twentieth of `train`
    assert len(set().union(*parts)) == 2600 - repeated


@pytest.mark.parametrize(
    ("size", "times_of_one_digit", "times_of_two"),
    [
        (399, 1, 1),
        (400, 2, 1),
        (3599, 17, 1),
        (3600, 18, 2),
        pytest.param(20_000, 100, 11, marks=pytest.mark.slow),
    ],
)
def test_small_numbers_are_learnt_and_not_held_out(size, times_of_one_digit, times_of_two):
    corpus = number_pairs(size, seed=1, held_out=300)
    small = [num2words(number, lang="en") for number in range(100)]
    train = Counter(words(corpus, "train"))
    assert train.total() == size
    assert {train.pop(word) for word in small[:10]} == {times_of_one_digit}
    assert {train.pop(word) for word in small[10:]} == {times_of_two}
    assert set(train.values()) == {1}
    assert not set(words(corpus, "validation", "test")) & {*small, *train}


def test_invalid_arguments_are_refused():
    with pytest.raises(UserError, match=r"'xx'.* de, en,"):
        number_pairs(size=10, seed=0, target_lang="xx")
    with pytest.raises(UserError, match="^numbers_size: .*2,100 .* 1,000"):
        number_pairs(size=100, seed=0, maximum=999)
    with pytest.raises(UserError, match="size.* 0"):
        number_pairs(size=0, seed=0)
