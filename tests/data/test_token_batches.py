"""The pairs of token batches from tables and streams, and streams that resume."""

import json

import pytest
from datasets import IterableDataset

from hf_vanilla_transformer.data.batching import (
    StreamingTokenBatches,
    TokenBatchDataset,
)


def rows(count=50):
    return [{"input_ids": [9] * (1 + i % 7), "labels": [i + 1] * (1 + i % 5), "line": i + 1} for i in range(count)]


class Stream:
    """A stream without `load_state_dict`."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for row in rows():
            self.read += 1
            yield row


def lines(updates):
    return [[[row["line"] for row in batch] for batch in update] for update in updates]


def stream(source, **plan):
    return StreamingTokenBatches(source, 16, 0, **{"max_tokens": 20, "tokens_per_update": 12, **plan})


def test_dummy_pair_has_no_labels():
    data = TokenBatchDataset(rows())
    ((first, second), (third,)) = data.__getitems__([[3, ~4], [5]])
    assert (first["line"], second["line"], third["line"]) == (4, 5, 6)
    assert second["labels"] == [-100] * 5 and second["input_ids"] == data.dataset[4]["input_ids"]
    assert first["labels"] == [4] * 4 and data.dataset[4]["labels"] == [5] * 5
    assert len(data) == 50


def test_stream_order_depends_on_the_epoch():
    updates = stream(Stream())
    first = lines(updates)
    updates.set_epoch(1)
    assert lines(updates) != first
    updates.set_epoch(0)
    assert lines(updates) == first


@pytest.mark.parametrize("kind", ["datasets", "plain"])
@pytest.mark.parametrize("done", [1, 4, 7, 11, "all"])
def test_stream_resumes_at_a_saved_position(kind, done):
    def fresh():
        return IterableDataset.from_generator(lambda: iter(rows())) if kind == "datasets" else Stream()

    whole = stream(fresh())
    whole.set_epoch(2)
    expected = lines(whole)
    assert len(expected) > 11
    done = len(expected) if done == "all" else done
    stopped = stream(fresh())
    stopped.set_epoch(2)
    iterator = iter(stopped)
    begun = [next(iterator) for _ in range(done)]
    position = json.loads(json.dumps(stopped.state_dict()))
    resumed = stream(fresh())
    resumed.load_state_dict(position)
    if done < len(expected):
        assert lines(begun) + lines(resumed) == expected
    assert resumed.state_dict()["epoch"] == 3
    # the next epoch begins at the start
    resumed.set_epoch(3)
    whole.set_epoch(3)
    assert lines(resumed) == lines(whole)


def test_stream_reads_one_window_ahead():
    source = Stream()
    iterator = iter(stream(source))
    next(iterator)
    assert source.read == 16 + 1  # one row ahead, to detect the last window


# Rounded shapes
