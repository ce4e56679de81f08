"""The built-in corpus: correct number words, disjoint splits, determined by the seed."""

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
    corpus = number_pairs(size=980, seed=0, held_out=10, maximum=999)
    spelt = {row["source"]: row["target"] for part in corpus.values() for row in part}
    assert spelt == {num2words(n, lang="en"): num2words(n, lang="de") for n in range(1000)}
    assert spelt["two hundred and thirty-four"] == "zweihundertvierunddreißig"
    assert spelt["zero"] == "null"
    assert spelt["seventeen"] == "siebzehn"


def test_splits_are_disjoint(corpus):
    everything = words(corpus, "train", "validation", "test")
    assert len(everything) == len(set(everything)) == 2600


def test_invalid_arguments_are_refused():
    with pytest.raises(UserError, match=r"'xx'.* de, en,"):
        number_pairs(size=10, seed=0, target_lang="xx")
    with pytest.raises(UserError, match="^numbers_size: .*2,100 .* 1,000"):
        number_pairs(size=100, seed=0, maximum=999)
    with pytest.raises(UserError, match="size.* 0"):
        number_pairs(size=0, seed=0)
