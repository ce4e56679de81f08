"""Mixtures: every pair as often as its input's weight says, in every epoch. Streams read in turn."""

from collections import Counter

import pytest
from datasets import Dataset

from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.corpus import first_rows
from hf_vanilla_transformer.corpora.mixtures import PART, concatenated
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.utils.errors import UserError

LANGUAGES = {"source_lang": "en", "target_lang": "de"}
COUNTS = {"table": 5, "prefix": 3, "memory": 2, "saved": 4, "distilled": 2}


def pairs_of(name):
    return [(f"{name} {number}", f"{name} Nummer {number}") for number in range(COUNTS[name])]


@pytest.fixture
def inputs(tmp_path):
    """A TSV, two files of parallel text, a TMX, a dataset in a folder, and a folder of `distil`."""
    (tmp_path / "table.tsv").write_text(
        "en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in pairs_of("table"))
    )
    for side, language in enumerate(("en", "de")):
        (tmp_path / f"prefix.{language}").write_text(
            "".join(f"{pair[side]}\n" for pair in pairs_of("prefix"))
        )
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>{a}</seg></tuv><tuv xml:lang="de"><seg>{b}</seg></tuv></tu>'
        for a, b in pairs_of("memory")
    )
    (tmp_path / "memory.tmx").write_text(f"<tmx><body>{units}</body></tmx>")
    Dataset.from_list([{"en": a, "de": b} for a, b in pairs_of("saved")]).save_to_disk(
        str(tmp_path / "saved")
    )
    (tmp_path / "distilled").mkdir()
    for side, name in enumerate((SOURCE, TARGET)):
        text = "".join(f"{pair[side]}\n" for pair in pairs_of("distilled"))
        (tmp_path / "distilled" / name).write_text(text)
    return [
        str(tmp_path / name) for name in ("table.tsv", "prefix", "memory.tmx", "saved", "distilled")
    ]


def text_of(pairs):
    return [(row["source"], row["target"]) for row in pairs]


def test_weights_are_occurrences_per_epoch(inputs):
    pairs, report = load_pairs(inputs, weights=[1, 3, 2, 1, 1], **LANGUAGES)
    expected = Counter()
    for name, weight in zip(COUNTS, (1, 3, 2, 1, 1), strict=True):
        expected.update(dict.fromkeys(pairs_of(name), weight))
    assert Counter(text_of(pairs)) == expected
    assert report.kept == len(pairs)
    # the header is line 1 of the first input. augmentation tells copies apart by their lines
    assert pairs["line"][:] == list(range(2, len(pairs) + 2))
    assert (
        "table.tsv × 1: kept 5 of 5 pairs; " in report.summary()
        and "memory.tmx × 2: kept 2" in report.summary()
    )
    assert text_of(load_pairs(inputs, **LANGUAGES)[0]) == [
        pair for name in COUNTS for pair in pairs_of(name)
    ]


def test_first_rows_are_a_share_of_each_input():
    data = Dataset.from_dict({PART: [0] * 60 + [1] * 30 + [2] * 10})
    assert first_rows(data, 10).tolist() == [*range(6), *range(60, 63), 90]
    assert first_rows(data, 1000).tolist() == list(range(100))


def test_mixture_is_the_same_in_every_run(inputs):
    first, second = (load_pairs(inputs, weights=[1, 3, 2, 1, 1], **LANGUAGES) for _ in range(2))
    assert (
        first[0]._fingerprint == second[0]._fingerprint
        and first[1].fingerprint == second[1].fingerprint
    )
    others = [
        load_pairs(inputs, weights=weights, **LANGUAGES)[1].fingerprint
        for weights in ([1, 3, 2, 2, 1], None)
    ]
    assert len({first[1].fingerprint, *others}) == 3
    tokenizer = train_tokenizer(["table prefix memory saved Nummer"] * 5, 280)
    encoded = [
        encode_pairs(mixture, tokenizer, drop_too_long=True)[0] for mixture, _ in (first, second)
    ]
    assert encoded[0][:] == encoded[1][:]
    assert (
        encoded[0].cache_files and encoded[0].cache_files == encoded[1].cache_files
    )  # not in memory


def test_invalid_mixtures_are_refused(inputs):
    for weights, message in (
        ([1, 2], "train_weights: 2 numbers for 5 inputs"),
        ([1, 1, 1, 0, 1], "train_weights: 0 is no whole number from 1"),
        ([1, 1, 1.5, 1, 1], "weights: 1.5 is no whole number"),
    ):
        with pytest.raises(UserError, match=message):
            load_pairs(inputs, weights=weights, **LANGUAGES)


def test_inputs_are_numbered_beyond_16_bits():
    tables = [
        (part, Dataset.from_dict({"source": ["a"], "target": ["b"], "line": [1]}))
        for part in (0, 40_000)
    ]
    assert concatenated(tables, "40,001 inputs")["part"][:] == [0, 40_000]
