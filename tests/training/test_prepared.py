"""A prepared folder: a run on it is the run on its text, which it does not read again. Other settings are refused."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from hf_vanilla_transformer.batches import encoded_blocks
from hf_vanilla_transformer.batches.packing import FlatPairs
from hf_vanilla_transformer.batches.prepared import read_prepared
from hf_vanilla_transformer.training.run.arguments import RunArguments
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run_data import load_data, prepare_run
from tests.forked_interpreter import Interpreter
from tests.killed_runs import check_kills
from tests.trainer_helpers import TINY_RUN, as_flags, assert_same_model, error_of, run_tiny

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
DATA: dict[str, Any] = {"train_weights": [2, 1], "held_out_pairs": 3, "max_source_length": 60, "min_frequency": 1}
DATA |= {"source_lang": "en", "target_lang": "de", "tokens": "chars", "vocab_size": None}
TRAINING = {"max_tokens_per_batch": 120, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}


def write_text(folder: Path) -> dict[str, Any]:
    """Two inputs of training text and two of test text, each with a sentence over `max_source_length`."""
    folder.mkdir()
    for name, first in (("news", 0), ("talks", 3), ("test_a", 1), ("test_b", 2)):
        lines = [" ".join(WORDS[: 1 + (number + first) % 8]) for number in range(24)]
        lines[5] = (f"{name} " * 20)[:65]
        (folder / f"{name}.en").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.de").write_text("\n".join(line.upper()[::-1] for line in lines) + "\n")
    inputs = {split: [str(folder / name) for name in names] for split, names in SPLITS.items()}
    return {**DATA, **inputs}


SPLITS = {"train": ("news", "talks"), "test": ("test_a", "test_b")}


def parsed(folder: Path, **fields: Any) -> Any:
    chosen = {name: value for name, value in {**TINY_RUN, **fields}.items() if value is not None}
    return parse_recipe(["--output_dir", str(folder), *as_flags(chosen)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with prepared data, and the fields that it was prepared with."""
    folder = tmp_path_factory.mktemp("prepared")
    fields = write_text(folder / "text")
    prepare_run(*parsed(folder / "data", **fields))
    return folder / "data", fields


def losses(folder: Path) -> list[dict[str, Any]]:
    history = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    kept = [{name: each[name] for name in ("loss", "eval_loss", "step") if name in each} for each in history]
    assert any("eval_loss" in each for each in kept)
    return kept


@pytest.mark.parametrize("changed", [{"pack": False}, {"pack": True}, {"rewrite": f"{__name__}:shouted"}], ids=str)
def test_run_on_prepared_data_is_the_run_on_its_text(
    folders: tuple[Path, dict[str, Any]], changed: dict[str, Any], tmp_path: Path
) -> None:
    data, fields = folders
    text = Path(fields["train"][0]).parent
    direct = run_tiny(tmp_path / "direct", **TRAINING, **fields, **changed)
    shutil.move(text, tmp_path)
    try:
        prepared = run_tiny(tmp_path / "prepared", data=data, **TRAINING, vocab_size=None, **changed)
        first = tmp_path / "direct" / "checkpoint-2"
        run_tiny(tmp_path / "resumed", resume_from_checkpoint=first, data=data, **TRAINING, vocab_size=None, **changed)
    finally:
        shutil.move(tmp_path / text.name, text)
    assert losses(tmp_path / "direct") == losses(tmp_path / "prepared")
    for name in ("prepared", "resumed"):
        assert_same_model(tmp_path / "direct" / "checkpoint-4", tmp_path / name / "checkpoint-4")
    scores = {name for name in direct if name.startswith(("eval_", "test_")) and "second" not in name}
    assert {name: direct[name] for name in scores - {"test_runtime", "eval_runtime"}}.items() <= prepared.items()
    card, other = ((tmp_path / name / "README.md").read_text() for name in ("direct", "prepared"))
    reports = [line for line in card.splitlines() if "kept 23 of" in line or "kept 24 of" in line]
    assert reports and all(line in other for line in reports)


def shouted(source: str, target: str, dice: Any) -> tuple[str, str]:
    return (source, target) if dice.random() < 0.5 else (f"{source} one", target)


def test_ids_of_prepared_data_are_read_where_they_lie(folders: tuple[Path, dict[str, Any]]) -> None:
    data, fields = folders
    prepared = read_prepared(data).encoded["train"]
    assert [Path(each["filename"]) for each in prepared.cache_files] == [data / "train.arrow"]
    flat = FlatPairs.of_table(prepared)
    text = load_data(parsed(data, **fields), None, None).encoded["train"]
    for side, name in ((flat.source, "input_ids"), (flat.target, "labels")):
        column = prepared.data.column(name)
        assert np.shares_memory(side.ids, column.chunk(0).flatten().to_numpy())
        assert np.shares_memory(side.starts, column.chunk(0).offsets.to_numpy())
        assert side.ids.dtype == np.uint8, "the smallest for the vocabulary"
        sentences = np.split(side.ids, side.starts[1:-1])
        assert [each.tolist() for each in sentences] == text[name][:]


def damaged(folder: Path) -> None:
    (folder / "train.arrow").write_bytes((folder / "train.arrow").read_bytes()[:-2000])


def of_another_version(folder: Path) -> None:
    facts = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps(facts | {"version": 0}))


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (None, {"max_source_length": 50}, "max_source_length: 50, but DATA was prepared with 60: leave it out"),
        # the default, named
        (None, {"max_source_length": 256}, "max_source_length: 256, but DATA was prepared with 60: leave it out"),
        (None, {"vocab_size": 300}, "vocab_size: 300, but DATA was prepared with None"),
        (shutil.rmtree, {}, "data: DATA is no folder of `vanilla-transformer prepare`"),
        (damaged, {}, "data: DATA is damaged"),
        (of_another_version, {}, "data: DATA was prepared by another version"),
    ],
)
def test_other_data_than_prepared_are_refused(
    folders: tuple[Path, dict[str, Any]],
    change: Callable[[Path], Any] | None,
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folders[0], data)
    if change is not None:
        change(data)
    arguments = parsed(tmp_path / "run", **{"data": data, "vocab_size": None, **fields})
    assert error_of(load_data, arguments, None, None).startswith(message.replace("DATA", str(data)))


def test_recipe_of_the_prepared_data_is_no_contradiction(tmp_path: Path) -> None:
    fields = write_text(tmp_path / "text")
    recipe = tmp_path / "recipe.yaml"
    rows = "by_pairs:\n  20:\n    vocab_size: 50\n  100:\n    vocab_size: 40\n"
    recipe.write_text(f"held_out_pairs: 3\nlearning_rate: 0.01\n{rows}")
    flags = as_flags({name: fields[name] for name in ("train", "tokens", "source_lang", "target_lang")})
    data = str(tmp_path / "data")
    prepare_run(*parse_recipe([str(recipe), "--output_dir", data, *flags]))
    arguments = parse_recipe([str(recipe), "--output_dir", str(tmp_path / "run"), "--data", data])
    assert load_data(arguments, None, None).model_args.vocab_size == 40


@pytest.mark.parametrize("shards", [False, True])
def test_folder_prepared_by_two_workers_has_the_same_bytes(
    folders: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    data, fields = folders
    monkeypatch.setattr(encoded_blocks, "BLOCK", 20)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments = parsed(tmp_path / "data", workers=2, **fields)
    encoded = tmp_path / "cache" / "hf_vanilla_transformer"
    counts = []
    for shard in ((2, 3), (3, 3)) * shards:
        prepare_run(*arguments, shard=shard)
        counts.append(len(list(encoded.glob("encoded-*"))))
    assert counts == [1, 2][: len(counts)], "of four blocks, the first and the last are of shard 1"
    assert not (tmp_path / "data").exists()
    prepare_run(*arguments)
    names = {file.relative_to(data) for file in data.rglob("*") if file.is_file()}
    assert names == {file.relative_to(tmp_path / "data") for file in (tmp_path / "data").rglob("*") if file.is_file()}
    for name in names:
        assert (data / name).read_bytes() == (tmp_path / "data" / name).read_bytes(), name


def kill_preparing(folder: Path, workers: int, kills: int) -> None:
    """In a process of its own, which has no threads."""
    encoded_blocks.BLOCK = 8
    fields = write_text(folder / "text") | {"tokens": "bpe", "vocab_size": 280}

    def prepare(case: Path, workers: int = workers) -> None:
        datasets.config.HF_DATASETS_CACHE = case / "cache"
        prepare_run(*parsed(case / "data", workers=workers, **fields))

    check_kills(prepare, partial(prepare, workers=1), folder, kills)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")
@pytest.mark.parametrize(
    ("workers", "kills"), [(1, 3), *(pytest.param(workers, 12, marks=pytest.mark.slow) for workers in (1, 2, 4))]
)
def test_killed_preparation_goes_on_to_the_same_bytes(
    python: Interpreter, repository: Path, tmp_path: Path, workers: int, kills: int
) -> None:
    module = kill_preparing.__module__
    call = f"kill_preparing(Path({str(tmp_path)!r}), {workers}, {kills})"
    program = f"from pathlib import Path\nfrom {module} import kill_preparing\n{call}"
    done = python.run(["-c", program], cwd=repository, seconds=900)
    assert done.returncode == 0, done.stderr


def test_prepared_folder_is_not_written_by_several_ranks(
    folders: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = parsed(tmp_path / "data", **folders[1])
    monkeypatch.setattr(RunArguments, "world_size", 2)
    assert error_of(prepare_run, *arguments).startswith("prepare: 2 processes of torchrun")


def test_prepared_folder_is_new(folders: tuple[Path, dict[str, Any]]) -> None:
    data, fields = folders
    assert "exists already" in error_of(prepare_run, *parsed(data, **fields))
    assert error_of(prepare_run, *parsed(data.parent / "other", data=data)).startswith("data: ")
