"""Pairs as token ids: kept and dropped pairs, the report, and pairs that change in each epoch."""

from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from torch.utils.data import DataLoader

from hf_vanilla_transformer.batches import encode_pairs, encoded_blocks, encoding, with_augmentation
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from tests.damaged_files import DAMAGES_OF_TABLES
from tests.model_helpers import error_of

SOURCES = [
    "one",
    "twenty-one",
    " two  hundred and thirty-four",
    "</s>",
    "one hundred thousand, two hundred and one",
]
TARGETS = [
    "eins",
    "einundzwanzig",
    "zweihundertvierunddreißig",
    "x y",
    "einhunderttausendzweihunderteins ",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*SOURCES, *TARGETS] * 5, vocab_size=330)


@pytest.fixture(scope="module")
def german():
    return train_tokenizer(TARGETS * 5, vocab_size=300)


@pytest.fixture
def pairs(tmp_path):
    for side, lines in (("en", SOURCES), ("de", TARGETS)):
        (tmp_path / side).write_text("\n".join(lines), encoding="utf-8")
    return load_pairs([tmp_path / "en", tmp_path / "de"])[0]


def table(source, target, **columns):
    return Dataset.from_dict({"source": source, "target": target, **columns})


def encoded(pairs, *tokenizers, drop_too_long=True, **settings):
    """The rows and the report."""
    data, report = encode_pairs(pairs, *tokenizers, drop_too_long=drop_too_long, **settings)
    return [dict(row) for row in data], report


def refused(pairs, *tokenizers, **settings):
    return error_of(encode_pairs, pairs, *tokenizers, drop_too_long=True, **settings)


def test_rows_have_ids_labels_length_and_line(pairs, tokenizer):
    rows, report = encoded(pairs, tokenizer)
    assert [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows] == SOURCES
    assert [tokenizer.decode(row["labels"], skip_special_tokens=True) for row in rows] == TARGETS
    for row in rows:
        assert sorted(row) == ["input_ids", "labels", "length", "line"]
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert row["length"] == max(len(row["input_ids"]), len(row["labels"]))
    assert report.summary() == "encoded 5 of 5 pairs"
    assert report.longest_source == max(len(row["input_ids"]) for row in rows)


def test_separate_tokenizers_encode_their_side(pairs, tokenizer, german):
    rows, _ = encoded(pairs, tokenizer, german, drop_too_long=False)
    assert [row["input_ids"] for row in rows] == tokenizer(SOURCES)["input_ids"]
    assert [row["labels"] for row in rows] == german(TARGETS)["input_ids"]


def test_chosen_pairs_are_encoded_many_at_once(pairs, tokenizer, monkeypatch):
    sizes = []
    encode = encoding._Encode.__call__

    def counted(self, batch):
        sizes.append(len(batch["source"]))
        return encode(self, batch)

    monkeypatch.setattr(encoding._Encode, "__call__", counted)
    rows, _ = encoded(pairs.select([4, 0, 2]), tokenizer)
    assert sizes == [3]
    assert [row["line"] for row in rows] == [5, 1, 3]


def symbols(texts, unit):
    return train_symbol_tokenizer(zip(texts, count(1)), unit)


@pytest.fixture
def closed():
    """Characters of the source and words of the target, of text without `thousand` and `x y`."""
    return symbols(SOURCES[:3], "chars"), symbols(TARGETS[:3], "words")


def test_unknown_symbols_are_refused_in_training(pairs, closed):
    _, words = closed
    message = refused(pairs, *closed)
    assert message.startswith("line 4: the source has '<', which the tokenizer does not know")
    message = refused(pairs, symbols(SOURCES, "chars"), words)
    assert message.startswith("line 4: the target has 'x', which the tokenizer does not know")


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["eins", None], "line 9: the {} has no text"),
        ([1.5, float("nan")], "line 7: the {} is 1.5 (float), not text"),
    ],
)
def test_pairs_without_text_are_refused(tokenizer, cells, reason, side):
    texts = {"source": ["one", "two"], "target": ["eins", "zwei"]}
    message = refused(table(**texts | {side: cells}, line=[7, 9]), tokenizer)
    assert message.startswith(reason.format(side))


def test_unknown_symbols_are_counted_in_evaluation(pairs, closed):
    rows, report = encoded(pairs, *closed, drop_too_long=False)
    characters, _ = closed
    unknown = [characters.unk_token_id in row["input_ids"] for row in rows]
    assert unknown == [False, False, False, True, True]  # "</s>", and the comma
    assert (report.seen, report.unknown, report.first_unknown) == (5, 2, [4, 5])
    assert report.describe_unknown().startswith("2 of 5 pairs have ")


def test_symbols_of_open_vocabularies_are_never_unknown(pairs, tokenizer):
    for each in (tokenizer, train_symbol_tokenizer([], "bytes")):
        rows, report = encoded(pairs, each)
        assert len(rows) == 5
        assert report.unknown == 0


@pytest.mark.parametrize(
    ("side", "limit", "over"),  # a limit is inclusive
    [("source", 4, [3, 5]), ("target", 2, [3, 4, 5])],
)
def test_too_long_pairs_are_dropped_for_training_and_kept_for_evaluation(
    pairs,
    tokenizer,
    side,
    limit,
    over,
):
    limits = {f"max_{side}_length": limit}
    data, report = encode_pairs(pairs, tokenizer, drop_too_long=True, **limits)
    for _ in range(2):
        assert [row["line"] for row in data] == [line for line in range(1, 6) if line not in over]
    dropped = len(over)
    assert (report.seen, report.too_long, report.first_lines) == (5, dropped, over)
    assert (
        f"encoded {5 - dropped} of 5 pairs; dropped {dropped}: too long (line" in report.summary()
    )
    rows, report = encoded(pairs, tokenizer, drop_too_long=False, **limits)
    assert len(rows) == 5
    assert "encoded 5 of 5 pairs; kept all the same" in report.summary()


def test_report_has_the_line_numbers_of_the_input(tokenizer):
    pairs = table(["a", "b" * 50, "c"], ["x", "y", "z"], line=[3, 8, 11])
    _, report = encoded(pairs, tokenizer, max_source_length=10)
    assert report.first_lines == [8]
    _, report = encoded(pairs.remove_columns("line"), tokenizer, max_source_length=10)
    assert report.first_lines == [2]


def test_pairs_that_are_all_too_long_are_an_error(tokenizer):
    assert "too long (line 1)" in refused(table(["a b c"], ["x"]), tokenizer, max_source_length=2)


def test_encoding_is_cached_until_the_tokenizer_changes(tmp_path, tokenizer, german):
    path = tmp_path / "x.jsonl"
    path.write_text('{"source": "one", "target": "eins"}\n')
    pairs, _ = load_pairs(path)
    files = [
        encode_pairs(pairs, each, drop_too_long=True)[0].cache_files
        for each in (tokenizer, tokenizer, german)
    ]
    assert files[0]
    assert files[0] == files[1] != files[2]


def test_blocks_of_several_workers_are_those_of_one(tmp_path, tokenizer, monkeypatch):
    """The files of a start that was interrupted are found by the next one, with another number of workers."""
    monkeypatch.setattr(encoded_blocks, "BLOCK", 4)
    rows = table(SOURCES * 3, TARGETS * 3).select(range(1, 14))
    contents = []
    for workers in (1, 2):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / str(workers)))
        data, report = encode_pairs(rows, tokenizer, drop_too_long=True, workers=workers)
        assert data["input_ids"][:] == tokenizer(rows["source"][:])["input_ids"]
        assert data["labels"][:] == tokenizer(rows["target"][:])["input_ids"]
        assert data["line"][:] == list(range(1, 14))
        assert report.seen == 13
        files = sorted(Path(each["filename"]) for each in data.cache_files)
        assert len(files) == 4
        contents.append({file.name: file.read_bytes() for file in files})
    assert contents[0] == contents[1]
    lost = files.pop(1)
    times = [file.stat().st_mtime_ns for file in files]
    for damage in DAMAGES_OF_TABLES.values():
        damage(lost)
        data, _ = encode_pairs(rows, tokenizer, drop_too_long=True)
        assert data["line"][:] == list(range(1, 14))
        assert [file.stat().st_mtime_ns for file in files] == times
        assert lost.read_bytes() == contents[0][lost.name]


def test_progress_is_told_without_bars_from_the_pairs_that_are_encoded_already(
    tmp_path, tokenizer, monkeypatch
):
    """The clock advances 100 seconds for each block of 200 pairs."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(encoded_blocks, "BLOCK", 200)
    monkeypatch.setattr(
        encoded_blocks,
        "time",
        SimpleNamespace(monotonic=count(1000, 100).__next__),
    )
    pairs = table(SOURCES * 240, TARGETS * 240)
    told = []
    disable_progress_bars()
    try:
        with pytest.raises(encoded_blocks.ShardEncoded):
            encode_pairs(pairs, tokenizer, drop_too_long=True, shard=(1, 2))
        encode_pairs(pairs, tokenizer, drop_too_long=True, say=told.append)
    finally:
        enable_progress_bars()
    assert told == [
        "encoded 800 of 1,200 pairs, 2 a second, 3 min left",
        "encoded 1,000 of 1,200 pairs, 2 a second, 2 min left",
        "encoded 1,200 of 1,200 pairs, 2 a second, 0 min left",
    ]


def test_refusal_of_a_worker_is_that_of_the_first_block(monkeypatch):
    monkeypatch.setattr(encoded_blocks, "BLOCK", 2)
    pairs = table(["a", "b", "a", "x", "b", "y"], ["a"] * 6)
    message = refused(pairs, symbols(["ab"], "chars"), workers=2)
    assert message.startswith("line 4: the source has 'x'")


def test_persistent_workers_get_the_epoch(tokenizer):
    pairs, _ = encode_pairs(table(SOURCES, TARGETS), tokenizer, drop_too_long=True)
    fresh = with_augmentation(pairs, tokenizer, augment={"typos": 0.5, "upper": 0.4})
    loader = DataLoader(
        fresh,
        batch_size=5,
        collate_fn=list,
        num_workers=1,
        persistent_workers=True,
    )
    made = []
    for epoch in (0, 1):
        fresh.set_epoch(epoch)
        made.append([fresh[row] for row in range(5)])
        assert list(chain(*loader)) == made[epoch]
    assert made[0] != made[1]
