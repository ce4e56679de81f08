"""Rows of data sets: read in batches, and selected with or without the tables that they come from."""

import numpy as np
import pytest
from datasets import Dataset

from hf_vanilla_transformer.utils import dataset_cache


@pytest.fixture(params=["table", "selection"])
def rows(request: pytest.FixtureRequest) -> Dataset:
    columns = {
        "a": list(range(10)),
        "b": [number / 4 for number in range(10)],
    }
    table = Dataset.from_dict(columns)
    if request.param == "table":
        return table
    return table.select([7, 1, 1, 9, 4, 0, 3])


@pytest.mark.parametrize("size", [3, 7, 100])
def test_number_columns_are_those_of_all_batches(rows, size, monkeypatch):
    monkeypatch.setattr(dataset_cache, "ROWS_PER_READ", size)
    columns = dataset_cache.number_columns(rows, ["b", "a"])
    assert list(columns) == ["b", "a"]
    for name, dtype in (("a", np.int64), ("b", np.float64)):
        assert columns[name].tolist() == rows[name][:]
        assert columns[name].dtype == dtype


@pytest.mark.parametrize("count", [0, 3, 4, 7])
def test_few_selected_rows_are_copied_and_many_numbered(rows, count, monkeypatch):
    monkeypatch.setattr(dataset_cache, "_FEW_ROWS", 3)
    monkeypatch.setattr(dataset_cache, "_SCATTERED_ROWS", 2)
    numbers = np.array([6, 2, 2, 5, 0, 1, 3][:count], dtype=np.int64)
    chosen = dataset_cache.selected(rows, numbers)
    assert chosen["a"][:] == [rows["a"][number] for number in numbers]
    assert (chosen._indices is None) == (count == 3)
    again = dataset_cache.selected(rows, numbers)
    other = dataset_cache.selected(rows, np.append(numbers, 1))
    assert chosen._fingerprint == again._fingerprint != other._fingerprint
    assert dataset_cache.in_one_piece(chosen).column("a").num_chunks <= 1


@pytest.mark.parametrize(
    ("size", "limit", "times"),
    [
        (2, 4, 3),
        (2, 5, 2),
        (3, 3, 5),
        (4, 100, 1),
    ],
)
def test_pages_are_given_back_after_so_many_rows(size, limit, times, monkeypatch):
    given_back = []
    monkeypatch.setattr(dataset_cache, "forget_pages", given_back.append)
    data = Dataset.from_dict({"a": list(range(10))})
    batches = [batch["a"] for batch in dataset_cache.batches_of(data, size, limit)]
    assert sum(batches, []) == list(range(10))
    assert max(map(len, batches)) == size
    assert len(given_back) == times
