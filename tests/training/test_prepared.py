"""A prepared folder: a run on it is the run on its text, which it does not read again. Other settings are refused."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

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
from tests.model_helpers import slow
from tests.trainer_helpers import (
    TINY_RUN,
    as_flags,
    assert_same_model,
    change_json,
    error_of,
    run_tiny,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
SPLITS = {"train": ("news", "talks"), "test": ("test_a", "test_b")}
DATA: dict[str, Any] = {
    "train_weights": [2, 1],
    "held_out_pairs": 3,
    "max_source_length": 60,
    "min_frequency": 1,
    "source_lang": "en",
    "target_lang": "de",
    "tokens": "chars",
    "vocab_size": None,
}
TRAINING = {
    "max_tokens_per_batch": 120,
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "vocab_size": None,
}
Folders: TypeAlias = tuple[Path, dict[str, Any]]


def write_text(folder: Path) -> dict[str, Any]:
    """Two inputs of training text and two of test text, each with a sentence over `max_source_length`."""
    folder.mkdir()
    for first, name in enumerate(("news", "test_a", "test_b", "talks")):
        counts = [1 + (number + first) % 8 for number in range(24)]
        lines = [" ".join(WORDS[:count]) for count in counts]
        lines[5] = (f"{name} " * 20)[:65]
        text = "\n".join(lines)
        (folder / f"{name}.en").write_text(text)
        (folder / f"{name}.de").write_text(text.upper())
    inputs = {split: [folder / name for name in names] for split, names in SPLITS.items()}
    return DATA | inputs


def parsed(folder: Path, **fields: Any) -> Any:
    chosen = TINY_RUN | fields | {"output_dir": folder}
    given = {name: value for name, value in chosen.items() if value is not None}
    return parse_recipe(as_flags(given))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A folder with prepared data, and the fields that it was prepared with."""
    folder = tmp_path_factory.mktemp("prepared")
    fields = write_text(folder / "text")
    prepare_run(*parsed(folder / "data", **fields))
    return folder / "data", fields


def losses(folder: Path) -> list[tuple[float | None, float | None]]:
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    return [(each.get("loss"), each.get("eval_loss")) for each in state["log_history"]]


def shouted(source: str, target: str, dice: Any) -> tuple[str, str]:
    return (source, target) if dice.random() < 0.5 else (f"{source} one", target)


@pytest.mark.parametrize(
    "changed",
    [
        {"pack": True},
        *slow({"pack": False}, {"rewrite": f"{__name__}:shouted"}),
    ],
    ids=str,
)
def test_run_on_prepared_data_is_the_run_on_its_text(
    folders: Folders, changed: dict[str, Any], tmp_path: Path
) -> None:
    data, fields = folders
    text = fields["train"][0].parent
    direct = tmp_path / "direct"
    prepared = tmp_path / "prepared"
    resumed = tmp_path / "resumed"
    expected = run_tiny(direct, **TRAINING | fields | changed)
    shutil.move(text, tmp_path)
    try:
        results = run_tiny(prepared, data=data, **TRAINING, **changed)
        run_tiny(
            resumed,
            data=data,
            resume_from_checkpoint=direct / "checkpoint-2",
            **TRAINING,
            **changed,
        )
    finally:
        shutil.move(tmp_path / text.name, text)
    assert any(evaluated for _, evaluated in losses(direct))
    assert losses(prepared) == losses(direct)
    for folder in (prepared, resumed):
        assert_same_model(direct / "checkpoint-4", folder / "checkpoint-4")
    for name, value in expected.items():
        timed = "second" in name or name.endswith("runtime")
        if name.startswith(("eval_", "test_")) and not timed:
            assert results[name] == value, name
    lines = (direct / "README.md").read_text().splitlines()
    reports = [line for line in lines if "kept 23 of" in line or "kept 24 of" in line]
    assert reports
    card = (prepared / "README.md").read_text()
    for line in reports:
        assert f"{line}\n" in card


def test_ids_of_prepared_data_are_read_where_they_lie(folders: Folders) -> None:
    data, fields = folders
    prepared = read_prepared(data).encoded["train"]
    (file,) = prepared.cache_files
    assert Path(file["filename"]) == data / "train.arrow"
    flat = FlatPairs.of_table(prepared)
    text = load_data(parsed(data, **fields), None, None).encoded["train"]
    for side, name in ((flat.source, "input_ids"), (flat.target, "labels")):
        column = prepared.data.column(name).chunk(0)
        assert np.shares_memory(side.ids, column.flatten().to_numpy())
        assert np.shares_memory(side.starts, column.offsets.to_numpy())
        assert side.ids.dtype == np.uint8, "the smallest for the vocabulary"
        sentences = np.split(side.ids, side.starts[1:-1])
        assert [each.tolist() for each in sentences] == text[name][:]


def damaged(folder: Path) -> None:
    file = folder / "train.arrow"
    file.write_bytes(file.read_bytes()[:-2000])


def of_another_version(folder: Path) -> None:
    change_json(folder / "prepared.json", version=0)


def test_prepared_data_of_no_use_are_refused(folders: Folders, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for change, message in (
        (of_another_version, "was prepared by another version"),
        (damaged, "is damaged"),
        (shutil.rmtree, "is no folder of `vanilla-transformer prepare`"),
    ):
        shutil.copytree(folders[0], data, dirs_exist_ok=True)
        change(data)
        arguments = parsed(tmp_path / "run", data=data, vocab_size=None)
        assert error_of(load_data, arguments, None, None).startswith(f"data: {data} {message}")


@pytest.mark.parametrize(
    ("name", "value", "prepared", "remedy"),
    [
        ("max_source_length", 50, 60, ": leave it out"),
        ("max_source_length", 256, 60, ": leave it out"),  # the default, named
        ("vocab_size", 300, None, ""),
    ],
)
def test_other_data_than_prepared_are_refused(
    folders: Folders,
    name: str,
    value: int,
    prepared: int | None,
    remedy: str,
    tmp_path: Path,
) -> None:
    data, _ = folders
    arguments = parsed(tmp_path / "run", data=data, **{"vocab_size": None, name: value})
    message = f"{name}: {value}, but {data} was prepared with {prepared}{remedy}"
    assert error_of(load_data, arguments, None, None).startswith(message)


def test_all_flags_of_other_data_are_named(folders: Folders, tmp_path: Path) -> None:
    data, _ = folders
    fields = {"vocab_size": 300, "held_out_pairs": 7, "max_source_length": 50}
    arguments = parsed(tmp_path / "run", data=data, **fields)
    assert error_of(load_data, arguments, None, None) == (
        f"max_source_length: 50, held_out_pairs: 7, vocab_size: 300, but {data} was prepared with 60, 3, None: leave "
        "them out, or prepare the data again"
    )


def test_fields_of_a_recipe_yield_to_the_prepared_data(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data, _ = folders
    recipe = tmp_path / "recipe.yaml"
    rows = "by_pairs:\n  100:\n    vocab_size: 40\n"
    recipe.write_text(f"held_out_pairs: 500\nmax_source_length: 60\ntokens: bpe\n{rows}")
    flags = [str(recipe), *as_flags({"data": data, "output_dir": tmp_path / "run"})]
    loaded = load_data(parse_recipe(flags), None, None)
    assert vars(loaded.data_args).items() >= {"held_out_pairs": 3, "tokens": "chars"}.items()
    assert loaded.model_args.vocab_size is None
    values = (
        "held_out_pairs=3 (recipe: 500), tokens=chars (recipe: bpe), vocab_size=None (recipe: 40)"
    )
    assert capsys.readouterr().out.count(f"data: {data} was prepared with {values}\n") == 1
    flags += ["--held_out_pairs", "500"]
    message = f"held_out_pairs: 500, but {data} was prepared with 3: leave it out"
    assert error_of(load_data, parse_recipe(flags), None, None).startswith(message)


def test_recipe_of_the_prepared_data_is_no_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def parse(output: str, **fields: Any) -> Any:
        flags = as_flags({**fields, "output_dir": tmp_path / output})
        return parse_recipe([str(recipe), *flags])

    recipe = tmp_path / "recipe.yaml"
    rows = "by_pairs:\n  20:\n    vocab_size: 50\n  100:\n    vocab_size: 40\n"
    recipe.write_text(f"held_out_pairs: 3\nlearning_rate: 0.01\n{rows}")
    text = write_text(tmp_path / "text")
    fields = {name: text[name] for name in ("train", "tokens", "source_lang", "target_lang")}
    prepare_run(*parse("data", **fields))
    arguments = parse("run", data=tmp_path / "data")
    capsys.readouterr()
    assert load_data(arguments, None, None).model_args.vocab_size == 40
    assert "\ntrain: 42 pairs" in capsys.readouterr().out
    settings = read_prepared(tmp_path / "data").settings
    assert {"d_model", "dropout", "workers", "rewrite"}.isdisjoint(settings), (
        "no matter of the data"
    )


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {file.relative_to(folder): file.read_bytes() for file in files}


@pytest.mark.parametrize("shards", [False, True])
def test_folder_prepared_by_two_workers_has_the_same_bytes(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    data, fields = folders
    monkeypatch.setattr(encoded_blocks, "BLOCK", 20)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments = parsed(tmp_path / "data", workers=2, **fields)
    encoded = tmp_path / "cache" / "hf_vanilla_transformer"
    if shards:  # of four blocks, the first and the last are of shard 1
        for number, blocks in ((2, 1), (3, 2)):
            prepare_run(*arguments, shard=(number, 3))
            assert len(list(encoded.glob("encoded-*"))) == blocks
    assert not (tmp_path / "data").exists()
    prepare_run(*arguments)
    found = contents(tmp_path / "data")
    expected = contents(data)
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, name


def kill_preparing(folder: Path, workers: int, kills: int) -> None:
    """In a process of its own, which has no threads."""
    encoded_blocks.BLOCK = 8
    fields = {**write_text(folder / "text"), "tokens": "bpe", "vocab_size": 280}

    def prepare(case: Path, workers: int = workers) -> None:
        datasets.config.HF_DATASETS_CACHE = case / "cache"
        prepare_run(*parsed(case / "data", workers=workers, **fields))

    check_kills(prepare, partial(prepare, workers=1), folder, kills)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")
@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        (1, 3),
        pytest.param(1, 12, marks=pytest.mark.slow),
        pytest.param(2, 12, marks=pytest.mark.slow),
        pytest.param(4, 12, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_killed_preparation_goes_on_to_the_same_bytes(
    python: Interpreter, repository: Path, tmp_path: Path, workers: int, kills: int
) -> None:
    program = f"""
from pathlib import Path
from {__name__} import kill_preparing
kill_preparing(Path({str(tmp_path)!r}), {workers}, {kills})
"""
    done = python.run(["-c", program], cwd=repository, seconds=900)
    assert done.returncode == 0, done.stderr


def test_prepared_folder_is_not_written_by_several_ranks(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fields = folders
    arguments = parsed(tmp_path / "data", **fields)
    monkeypatch.setattr(RunArguments, "world_size", 2)
    assert error_of(prepare_run, *arguments).startswith("prepare: 2 processes of torchrun")


def test_prepared_folder_is_new(folders: Folders) -> None:
    data, fields = folders
    assert "exists already" in error_of(prepare_run, *parsed(data, **fields))
    again = parsed(data.parent / "other", data=data)
    assert error_of(prepare_run, *again).startswith("data: ")
