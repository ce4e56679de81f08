"""Pairs as token ids: kept and dropped pairs, the report, and pairs that change in each epoch."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from torch.utils.data import DataLoader

from hf_vanilla_transformer.batches import encode_pairs, encoded_blocks, encoding, with_augmentation
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

SOURCES = ["one", "twenty-one", " two  hundred and thirty-four", "</s>", "one hundred thousand, two hundred and one"]
TARGETS = ["eins", "einundzwanzig", "zweihundertvierunddreißig", "x y", "einhunderttausendzweihunderteins "]


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


def rows_of(data):
    return [dict(row) for row in data]


def test_rows_have_ids_labels_length_and_line(pairs, tokenizer):
    encoded, report = encode_pairs(pairs, tokenizer, drop_too_long=True)
    rows = rows_of(encoded)
    assert [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows] == SOURCES
    assert [tokenizer.decode(row["labels"], skip_special_tokens=True) for row in rows] == TARGETS
    for row in rows:
        assert sorted(row) == ["input_ids", "labels", "length", "line"]
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert row["length"] == max(len(row["input_ids"]), len(row["labels"]))
    assert report.summary() == "encoded 5 of 5 pairs"
    assert report.longest_source == max(len(tokenizer(text)["input_ids"]) for text in pairs["source"])


def test_separate_tokenizers_encode_their_side(pairs, tokenizer, german):
    rows = rows_of(encode_pairs(pairs, tokenizer, german, drop_too_long=False)[0])
    assert [row["input_ids"] for row in rows] == tokenizer(SOURCES)["input_ids"]
    assert [row["labels"] for row in rows] == german(TARGETS)["input_ids"]


def test_chosen_pairs_are_encoded_many_at_once(pairs, tokenizer, monkeypatch):
    sizes = []
    encode = encoding._Encode.__call__

    def counted(self, batch):
        sizes.append(len(batch["source"]))
        return encode(self, batch)

    monkeypatch.setattr(encoding._Encode, "__call__", counted)
    rows = rows_of(encode_pairs(pairs.select([4, 0, 2]), tokenizer, drop_too_long=True)[0])
    assert sizes == [3]
    assert [row["line"] for row in rows] == [5, 1, 3]


def symbol_tokenizers():
    """Characters of the source and words of the target, of text without `thousand` and `x y`."""
    numbered = [list(zip(texts[:3], (1, 2, 3), strict=True)) for texts in (SOURCES, TARGETS)]
    return train_symbol_tokenizer(numbered[0], "chars"), train_symbol_tokenizer(numbered[1], "words")


def test_unknown_symbols_are_refused_in_training(pairs):
    with pytest.raises(UserError, match="^line 4: the source has '<', which the tokenizer does not know"):
        rows_of(encode_pairs(pairs, *symbol_tokenizers(), drop_too_long=True)[0])
    characters = train_symbol_tokenizer(zip(SOURCES, range(1, 6), strict=True), "chars")
    with pytest.raises(UserError, match="^line 4: the target has 'x', which the tokenizer does not know"):
        rows_of(encode_pairs(pairs, characters, symbol_tokenizers()[1], drop_too_long=True)[0])


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("cells", "reason"), [(["eins", None], "has no text"), ([1.5, float("nan")], "is 1.5 (float), not text")]
)
def test_pairs_without_text_are_refused(tokenizer, cells, reason, side):
    texts = {"source": ["one", "two"], "target": ["eins", "zwei"], "line": [7, 9]}
    line = 9 if None in cells else 7
    message = error_of(encode_pairs, Dataset.from_dict(texts | {side: cells}), tokenizer, drop_too_long=True)
    assert message.startswith(f"line {line}: the {side} {reason}")


def test_unknown_symbols_are_counted_in_evaluation(pairs):
    tokenizers = symbol_tokenizers()
    encoded, report = encode_pairs(pairs, *tokenizers, drop_too_long=False)
    rows = rows_of(encoded)
    assert len(rows) == 5
    unknown = [tokenizers[0].unk_token_id in row["input_ids"] for row in rows]
    assert unknown == [False, False, False, True, True]  # "</s>", and the comma
    assert (report.seen, report.unknown, report.first_unknown) == (5, 2, [4, 5])
    assert report.describe_unknown().startswith("2 of 5 pairs have ")


def test_symbols_of_open_vocabularies_are_never_unknown(pairs, tokenizer):
    byte_tokenizer = train_symbol_tokenizer([], "bytes")
    for each in (tokenizer, byte_tokenizer):
        encoded, report = encode_pairs(pairs, each, drop_too_long=True)
        assert len(rows_of(encoded)) == 5 and report.unknown == 0


@pytest.mark.parametrize("side", ["source", "target"])
def test_too_long_pairs_are_dropped_for_training_and_kept_for_evaluation(pairs, tokenizer, side):
    texts = SOURCES if side == "source" else TARGETS
    sizes = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    limit = sorted(set(sizes))[-2]  # inclusive
    over = [number for number, size in enumerate(sizes, start=1) if size > limit]
    limits = {f"max_{side}_length": limit}
    encoded, report = encode_pairs(pairs, tokenizer, **limits, drop_too_long=True)
    for _ in range(2):
        kept = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in encoded]
        assert kept == [text for number, text in enumerate(SOURCES, start=1) if number not in over]
    assert report.first_lines == over and (report.seen, report.too_long) == (5, len(over))
    assert f"encoded {5 - len(over)} of 5 pairs; dropped {len(over)}: too long (line" in report.summary()
    encoded, report = encode_pairs(pairs, tokenizer, **limits, drop_too_long=False)
    assert len(rows_of(encoded)) == 5
    assert "encoded 5 of 5 pairs; kept all the same" in report.summary()


def test_report_has_the_line_numbers_of_the_input(tokenizer):
    pairs = Dataset.from_dict({"source": ["a", "b" * 50, "c"], "target": ["x", "y", "z"], "line": [3, 8, 11]})
    _, report = encode_pairs(pairs, tokenizer, max_source_length=10, drop_too_long=True)
    assert report.first_lines == [8]
    _, report = encode_pairs(pairs.remove_columns("line"), tokenizer, max_source_length=10, drop_too_long=True)
    assert report.first_lines == [2]


def test_pairs_that_are_all_too_long_are_an_error(tokenizer):
    pairs = Dataset.from_dict({"source": ["a b c"], "target": ["x"]})
    assert "too long (line 1)" in error_of(encode_pairs, pairs, tokenizer, max_source_length=2, drop_too_long=True)


def test_encoding_is_cached_until_the_tokenizer_changes(tmp_path, tokenizer, german):
    path = tmp_path / "x.jsonl"
    path.write_text('{"source": "one", "target": "eins"}\n')
    pairs, _ = load_pairs(path)
    files = [encode_pairs(pairs, each, drop_too_long=True)[0].cache_files for each in (tokenizer, tokenizer, german)]
    assert files[0] and files[0] == files[1] != files[2]


def test_blocks_of_several_workers_are_those_of_one(tmp_path, tokenizer, monkeypatch):
    """The files of a start that was interrupted are found by the next one, with another number of workers."""
    monkeypatch.setattr(encoded_blocks, "BLOCK", 4)
    contents = []
    for workers in (1, 2):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / str(workers)))
        text = {"source": SOURCES * 3, "target": TARGETS * 3}
        rows = Dataset.from_dict(text)
        encoded, report = encode_pairs(rows.select(range(1, 14)), tokenizer, drop_too_long=True, workers=workers)
        assert encoded["input_ids"][:] == tokenizer(text["source"][1:14])["input_ids"]
        assert encoded["labels"][:] == tokenizer(text["target"][1:14])["input_ids"]
        assert encoded["line"][:] == list(range(1, 14)) and report.seen == 13
        files = sorted(Path(each["filename"]) for each in encoded.cache_files)
        assert len(files) == 4
        contents.append({file.name: file.read_bytes() for file in files})
    assert contents[0] == contents[1]
    files[1].unlink()
    times = [file.stat().st_mtime_ns for file in files if file.exists()]
    encode_pairs(rows.select(range(1, 14)), tokenizer, drop_too_long=True)
    assert [file.stat().st_mtime_ns for file in files if file != files[1]] == times
    assert files[1].read_bytes() == contents[0][files[1].name]


def test_progress_is_told_without_bars_from_the_pairs_that_are_encoded_already(tmp_path, tokenizer, monkeypatch):
    """The clock advances 100 seconds for each block of 200 pairs."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(encoded_blocks, "BLOCK", 200)
    monkeypatch.setattr(encoded_blocks, "time", SimpleNamespace(monotonic=count(1000, 100).__next__))
    pairs = Dataset.from_dict({"source": SOURCES * 240, "target": TARGETS * 240})
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
    characters = train_symbol_tokenizer([("ab", 1)], "chars")
    pairs = Dataset.from_dict({"source": ["a", "b", "a", "x", "b", "y"], "target": ["a"] * 6})
    refused = error_of(encode_pairs, pairs, characters, drop_too_long=True, workers=2)
    assert refused.startswith("line 4: the source has 'x'")


def epoch_of(fresh, epoch):
    fresh.set_epoch(epoch)
    return rows_of(fresh[i] for i in range(len(fresh)))


def test_persistent_workers_get_the_epoch(tokenizer):
    pairs = Dataset.from_dict({"source": SOURCES, "target": TARGETS})
    encoded, _ = encode_pairs(pairs, tokenizer, drop_too_long=True)
    fresh = with_augmentation(encoded, tokenizer, augment={"typos": 0.5, "upper": 0.4})
    expected = [epoch_of(fresh, epoch) for epoch in (0, 1)]
    loader = DataLoader(fresh, batch_size=5, collate_fn=list, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        fresh.set_epoch(epoch)
        assert [row for batch in loader for row in batch] == expected[epoch]
