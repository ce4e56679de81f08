"""The table of options in the README of interop: each recipe in it can be run, and each row names another toolkit."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import hf_vanilla_transformer.interop as interop
from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from hf_vanilla_transformer.training.run.recipes import parse_recipe

TITLE = "## Other toolkits' options"
README = Path(next(iter(interop.__path__)), "README.md").read_text(encoding="utf-8")
TABLE = [
    line.strip("|").split("|")
    for line in README.partition(TITLE)[2].splitlines()
    if line.startswith("|")
]
HEAD = [cell.strip(" `") for cell in TABLE[0]]
ROWS = TABLE[2:]


def options(cell: str) -> list[str]:
    """The parts in backticks."""
    return re.findall(r"`(.+?)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" `").partition("`")[0])
def test_option_map_is_a_recipe(row: list[str], tmp_path: Path) -> None:
    recipe = {"output_dir": str(tmp_path / "run"), "numbers_size": 100, "preset": "base"}
    given = yaml.safe_load("\n".join(options(row[0])))
    known = {
        field.name
        for each in (ModelArguments, DataArguments, RunArguments)
        for field in fields(each)
    }
    assert given
    assert given.keys() <= known
    if given.keys() & {"save_steps", "bf16"}:
        recipe["use_cpu"] = True
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | given))
    parsed = parse_recipe([str(tmp_path / "recipe.yaml")])
    for name, value in given.items():
        found = [getattr(each, name) for each in parsed if hasattr(each, name)]
        assert any(getattr(each, "value", each) in (value, [value]) for each in found), name


def test_option_maps_have_a_column_for_each_trainer() -> None:
    assert HEAD == [
        "recipe",
        "fairseq-train",
        "marian",
        "onmt_train",
        "JoeyNMT's `config.yaml",
        "eole's `config.yaml",
    ]
    assert len(ROWS) >= 40
    signs = {
        1: r"--[a-z]",
        2: r"--[a-z]",
        3: r"-[a-z]|[a-z_]+: ",
        4: r"[a-z0-9_.]+: ",
        5: r"[a-z0-9_.]+: ",
    }
    for row in ROWS:
        assert len(row) == len(HEAD)
        assert any(cell.strip() for cell in row[1:])
        for column, sign in signs.items():
            assert all(re.match(sign, option) for option in options(row[column])), row[column]
