"""Pairs of several directions in one table, each as often as the temperature says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.directions import (
    inputs_of,
    load_directions,
    parse_directions,
    part_names,
    sampling_rates,
)
from hf_vanilla_transformer.corpora.pairs import PairReport
from tests.model_helpers import error_of

SIZES = {("en", "de"): 1000, ("en", "fr"): 100, ("de", "en"): 37}


def test_directions_are_parsed() -> None:
    assert parse_directions(["en-de", "eng_Latn-deu_Latn", "en-pt_BR"]) == [
        ("en", "de"),
        ("eng_Latn", "deu_Latn"),
        ("en", "pt_BR"),
    ]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        *(
            (items, "SOURCE-TARGET is needed")
            for items in (["en"], ["en-de-fr"], ["-de"], ["EN-DE"])
        ),
        (["en-de", "en-de"], "en-de: twice"),
        (["en-en"], "en-en: two languages are needed"),
    ],
)
def test_unclear_directions_are_refused(items: list[str], reason: str) -> None:
    assert reason in error_of(parse_directions, items)


def test_inputs_belong_to_the_direction_before_them() -> None:
    pairs = [("en", "de"), ("en", "fr")]
    found = inputs_of(["shared", "en-fr=a.en", "a.fr", "en-de=b.tsv"], pairs)
    assert found == {pairs[0]: ["shared", "b.tsv"], pairs[1]: ["shared", "a.en", "a.fr"]}
    assert inputs_of(["de-fr=c.tsv"], pairs, training=False) == {("de", "fr"): ["c.tsv"]}
    for inputs in (["en-de=b.tsv"], ["shared", "de-fr=c.tsv"]):
        assert "directions" in error_of(inputs_of, inputs, pairs)


@pytest.mark.parametrize("temperature", [1.0, 1.5, 5.0, 100.0])
def test_frequencies_follow_the_formula(tmp_path: Path, temperature: float) -> None:
    for (source, target), size in SIZES.items():
        lines = [f"{source}{i}\t{target}{i}" for i in range(size)]
        (tmp_path / f"{source}{target}.tsv").write_text(
            "source\ttarget\n" + "\n".join(lines) + "\n"
        )

    def load(values: list[str], direction: tuple[str, str]) -> Any:
        return load_pairs(values)

    inputs = {pair: [str(tmp_path / f"{pair[0]}{pair[1]}.tsv")] for pair in SIZES}
    table, report = load_directions(inputs, load, temperature, seed=3)
    again, _ = load_directions(inputs, load, temperature, seed=3)
    assert table.to_dict() == again.to_dict(), "every epoch of every run is the same table"
    sizes = np.array([*SIZES.values()]) ** (1 / temperature)
    expected = sizes / sizes.sum()
    parts = np.asarray(table["part"])
    assert np.allclose(np.bincount(parts) / len(parts), expected, rtol=0.01)
    for part, ((source, _), size) in enumerate(SIZES.items()):
        texts = [
            text for text, number in zip(table["source"], parts, strict=True) if number == part
        ]
        counts = np.bincount([int(text.removeprefix(source)) for text in texts], minlength=size)
        assert counts.min() >= 1, "no pair is left out"
        assert counts.max() - counts.min() <= 1
        assert report.parts[part].kept == size
    assert len(set(table["line"])) == len(table)


def test_no_rate_is_below_one() -> None:
    assert sampling_rates([1000, 10], 1.0) == [1.0, 1.0]
    assert min(sampling_rates([5, 1000, 10], 3.0)) == 1.0


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_columns_with_codes_choose_the_rows_of_a_direction(tmp_path: Path, form: str) -> None:
    rows = [("a", "A", "en", "de"), ("b", "B", "en", "fr"), ("c", "C", "en", "de")]
    names = ("source", "target", "source_lang", "target_lang")
    file = tmp_path / f"all.{form}"
    if form == "tsv":
        file.write_text("\n".join("\t".join(row) for row in (names, *rows)) + "\n")
    else:
        file.write_text(
            "".join(
                str(dict(zip(names, row, strict=True))).replace("'", '"') + "\n" for row in rows
            )
        )
    for target, expected in (("de", ["a", "c"]), ("fr", ["b"])):
        pairs, report = load_pairs(file, source_lang="en", target_lang=target)
        assert list(pairs["source"]) == expected
        assert report.seen == len(expected)  # type: ignore[union-attr]


def test_repairs_of_all_inputs_of_a_direction_are_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_bytes(f"source\ttarget\n{name}\tx\r\n".encode())
    inputs = {("en", "de"): [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")]}
    _, report = load_directions(inputs, lambda values, _: load_pairs(values))
    assert report.summary().startswith("en-de: ")
    assert report.summary().count("removed 1 × carriage return at the line end") == 2


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (["a/dev.en + a/dev.de", "b/test.tsv"], ["dev", "test"]),
        (["a/dev.tsv", "b/dev.tsv"], ["dev", "dev_2"]),
        (["a/dev.tsv", "dev_3.tsv", "b/dev.tsv"], ["dev", "dev_3", "dev_4"]),
        (["dev_2.tsv", "dev_2.csv", "signature.tsv"], ["dev_2", "dev_2_2", "signature_3"]),
    ],
)
def test_scores_of_inputs_have_different_names(inputs: list[str], names: list[str]) -> None:
    assert part_names(map(PairReport, inputs)) == names
