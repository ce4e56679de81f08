"""A run with several seeds: what a kill leaves is finished, and the table is that of the scores."""

import json
import re
import shutil
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest

from hf_vanilla_transformer.training.run import run, seeds
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.run.seeds import run_seeds, scores_of_seeds
from hf_vanilla_transformer.utils.errors import UserError
from tests.trainer_helpers import SAVING, TINY_RUN, as_flags, error_of, write_pairs

PAIRS = [
    ("One dog", "Ein Hund"),
    ("A cat", "Eine Katze"),
    ("Three dogs", "Drei Hunde"),
    ("Two cats", "Zwei Katzen"),
]


@pytest.fixture
def train(command, tmp_path):
    flags = as_flags(
        {
            **TINY_RUN,
            **SAVING,
            **write_pairs(tmp_path / "data", PAIRS, "train", "test"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "metrics": ["character_error_rate"],
        }
    )

    def train(folder, *more, seeds=(1, 2)):
        return command("train", *flags, "--seeds", *seeds, "--output_dir", folder, *more)

    return train


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


CODE = """
from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration

def rewrite(source, target, dice):
    return source, target

class Model(VanillaTransformerForConditionalGeneration):
    pass
"""
CARD = "# Run\n\n## Limits\n\nIt is small.\n\n## Licence\n"


def write_results(folder, seed):
    """Write what a run does, with a test score of 50 + the seed."""
    folder.mkdir(exist_ok=True)
    scores = {"test_exact_match": 50 + seed, "test_mine:f": 1}
    (folder / "all_results.json").write_text(json.dumps(scores))
    (folder / "README.md").write_text(CARD)


class Runs:
    """Runs of three seeds that only write their results and cards."""

    facts = {"test data": "2 pairs", "code of rewrite": None, "precision": "float32"}

    def __init__(self, folder, *flags):
        seeds = ["--seeds", "1", "2", "3", "--train", "é.tsv", "--metrics", "mine:f"]
        self.parsed = parse_recipe(["--output_dir", str(folder), *seeds, *flags])
        self.table = folder / "seeds.json"
        self.cards = [folder / f"seed-{seed}" / "README.md" for seed in (1, 2, 3)]
        self.had_scores = {}
        self.flags = {}

    def make(self):
        self.had_scores.clear()
        run_seeds(self.parsed, self.run)

    def run(self, flags, check_facts):
        check_facts(self.facts)
        values = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        assert (values["seeds"], values["resume_from_checkpoint"]) == ("null", "auto")
        seed = int(values["seed"])
        self.flags[seed] = flags
        self.had_scores[seed] = "scores" in read(self.table)
        write_results(Path(values["output_dir"]), seed)


def test_table_of_seeds_is_stored_and_added_to_cards(tmp_path, capsys):
    runs = Runs(tmp_path / "new" / "run")
    runs.make()
    assert runs.had_scores == {1: False, 2: False, 3: False}
    lines = ["| test exact match | 52.00 ± 1.00 | 51.00 | 52.00 | 53.00 |"]
    lines.append("| test mine:f | 1.00 ± 0.00 | 1.00 | 1.00 | 1.00 |")
    printed = capsys.readouterr().out
    before, after = CARD.split("## Limits")
    for card in runs.cards:
        text = card.read_text()
        assert all(line in shown for line in lines for shown in (printed, text))
        assert text.startswith(f"{before}## Seeds\n")
        assert text.endswith(f" |\n\n## Limits{after}")
    text = runs.table.read_text()
    assert read(runs.table)["facts"] == runs.facts
    assert '\n  "fields": {\n    "metrics"' in text
    assert "é.tsv" in text
    assert re.search(r'"deviation": 1.0,\s+"mean": 52', text)
    assert "by_pairs" not in text

    cards = [card.read_text() for card in runs.cards]
    for removed, made in ([], {}), ([0, 2], {1: True, 3: True}):
        for index in removed:
            runs.cards[index].unlink()
        runs.make()
        assert runs.had_scores == made
        assert [card.read_text() for card in runs.cards] == cards
        assert runs.table.read_text() == text


def test_seeds_have_the_same_fields(tmp_path):
    rows = tmp_path / "rows.yaml"
    rows.write_text("by_pairs:\n  9:\n    vocab_size: 50\n")
    Runs(tmp_path / "run").make()
    for flags, name in ((["--max_steps", "3"], "max_steps"), ([str(rows)], "by_pairs")):
        other = Runs(tmp_path / "run")
        folder = ["--output_dir", str(tmp_path / "run"), "--seeds", "1", "2"]
        other.parsed = parse_recipe([*flags, *folder, "--train", "é.tsv", "--metrics", "mine:f"])
        assert error_of(other.make).startswith(f"{name}: ")


@pytest.mark.parametrize("name", Runs.facts)
def test_seeds_have_the_same_facts(tmp_path, name):
    runs = Runs(tmp_path / "run")
    runs.make()
    runs.cards[2].unlink()
    runs.facts = Runs.facts | {name: "another"}
    assert error_of(runs.make) == (
        f"{name}: another, but the runs in {tmp_path / 'run'} have {Runs.facts[name]}: name a new output_dir, "
        "or restore what they had"
    )
    for card in runs.cards[:2]:
        card.unlink()
    runs.make()  # none is complete
    assert read(runs.table)["facts"] == runs.facts


@pytest.mark.parametrize(("precision", "bf16"), [("float32", "false"), ("bf16", "true")])
def test_seeds_have_the_precision_that_the_first_has_measured(tmp_path, precision, bf16):
    runs = Runs(tmp_path / "run", "--auto_bf16", "true")
    runs.facts = Runs.facts | {"precision": precision}
    runs.make()
    first, *others = runs.flags.values()
    assert not any("bf16" in flag for flag in first)
    for flags in others:
        assert {"--auto_bf16=false", f"--bf16={bf16}"} < set(flags)


def test_facts_of_seeds_are_those_of_content_and_code(tmp_path, monkeypatch):
    def facts(seed):
        def stop(facts):
            found.append(facts)
            raise UserError("enough")

        found = []
        fields = TINY_RUN | files | {"seed": seed, "output_dir": tmp_path / "run"}
        fields |= {"rewrite": "seeds_code:rewrite", "model_class": "seeds_code:Model"}
        sys.modules.pop("seeds_code", None)
        parsed = parse_recipe(as_flags(fields))
        assert error_of(run_training, *parsed, check_facts=stop) == "enough"
        return found[0]

    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "seeds_code.py"
    code.write_text(CODE)
    files = write_pairs(tmp_path / "data", PAIRS, "train", "validation", "test")
    first = facts(seed=1)
    write_pairs(tmp_path / "data", PAIRS[::-1], *files)
    code.write_text(f"{CODE}# changed\n")
    second = facts(seed=2)
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == {
        "training data",
        "validation data",
        "test data",
        "code of rewrite",
        "code of model_class",
    }


def test_other_ranks_write_no_table(tmp_path, monkeypatch):
    runs = Runs(tmp_path / "run")
    runs.make()
    runs.table.unlink()
    monkeypatch.setenv("RANK", "1")
    runs.make()
    assert not runs.table.exists()


def test_all_ranks_make_the_runs_that_the_main_rank_chooses(tmp_path, monkeypatch):
    """It may still write the card of the run before when another rank looks for it."""
    runs = Runs(tmp_path / "run")
    runs.make()
    runs.flags.clear()
    flags = ["--seeds=null", "--seed=2", "--resume_from_checkpoint=auto", "--bf16=true"]
    flags.append(f"--output_dir={tmp_path / 'run' / 'seed-2'}")
    chosen = iter([None, flags, None])
    monkeypatch.setattr(seeds, "broadcast_from_main", lambda make: next(chosen))
    monkeypatch.setenv("RANK", "1")
    runs.make()
    assert runs.flags == {2: flags}


def test_seeds_are_not_published(tmp_path):
    runs = Runs(tmp_path / "run", "--push_to_hub", "true")
    assert error_of(runs.make).startswith("push_to_hub: ")
    assert not (tmp_path / "run").exists()


def test_command_makes_a_run_of_each_seed(train, tmp_path, monkeypatch):
    def make(model_args, data_args, args, **_):
        made.append((args.seed, args.seeds, args.resume_from_checkpoint))
        write_results(Path(args.output_dir), args.seed)

    made = []
    monkeypatch.setattr(run, "run_training", make)
    status, printed, errors = train(tmp_path / "run")
    assert status == 0, errors
    assert "| test exact match | 51.50 ± 0.71 | 51.00 | 52.00 |" in printed
    assert made == [(seed, None, "auto") for seed in (1, 2)]


@pytest.mark.slow
def test_killed_seeds_end_in_the_same_table(train, tmp_path):
    whole = tmp_path / "whole"
    status, printed, errors = train(whole)
    assert status == 0, errors
    folders = [whole / "seed-1", whole / "seed-2"]
    scores = [read(each / "all_results.json")["test_character_error_rate"] for each in folders]
    assert scores[0] != scores[1]
    cells = f"{mean(scores):.2f} ± {stdev(scores):.2f} | {scores[0]:.2f} | {scores[1]:.2f}"
    row = f"| test character error rate | {cells} |"
    cards = [(each / "README.md").read_text(encoding="utf-8") for each in folders]
    assert [text.count(row) for text in (printed, *cards)] == [1, 1, 1]

    # as a kill after the first update of the second seed leaves it
    killed = tmp_path / "killed"
    card = killed / "seed-1" / "README.md"
    weights = killed / "seed-1" / "model.safetensors"
    shutil.copytree(whole / "seed-1", killed / "seed-1")
    shutil.copytree(whole / "seed-2" / "checkpoint-1", killed / "seed-2" / "checkpoint-1")
    stored = read(whole / "seeds.json")
    (killed / "seeds.json").write_text(
        json.dumps({name: stored[name] for name in ("facts", "fields")})
    )
    kept = weights.stat()
    status, resumed, errors = train(killed)
    assert status == 0, errors
    assert weights.stat() == kept
    assert "checkpoint-1" in resumed
    assert read(killed / "seeds.json") == stored
    assert card.read_text(encoding="utf-8") == cards[0]

    # as a kill between the results and the card leaves them
    card.unlink()
    status, _, errors = train(killed)
    assert status == 0, errors
    assert read(killed / "seeds.json") == stored
    assert card.read_text(encoding="utf-8").count(row) == 1

    status, _, errors = train(whole, "--max_steps", "3")
    assert status == 2
    assert re.match(
        r"error: max_steps: 3, but the runs in .* have 2: name a new output_dir", errors
    )


@pytest.mark.parametrize("seeds", ["1", "1 1"])
def test_seeds_are_several_different_ones(train, tmp_path, seeds):
    status, _, errors = train(tmp_path / "run", seeds=seeds.split())
    assert status == 2
    assert errors == f"error: seeds: {seeds}: give two or more different ones, such as 1 2 3\n"


def test_one_run_refuses_seeds(tmp_path):
    parsed = parse_recipe(["--output_dir", str(tmp_path / "run"), "--seeds", "1", "2"])
    assert error_of(run_training, *parsed).startswith("seeds: this is one run")
    assert not (tmp_path / "run").exists()


def test_table_has_test_scores_and_those_of_validation_without_a_test():
    first = {
        "test_mine:f": 1.0,
        "test_exact_match": 50.0,
        "test_seconds": 2.0,
        "eval_exact_match": 3.0,
    }
    second = first | {"test_exact_match": 52.0}
    scores = scores_of_seeds({3: first, 5: second}, ["mine:f"])
    assert list(scores) == ["test_exact_match", "test_mine:f"]
    assert scores["test_exact_match"] == {
        "mean": 51,
        "deviation": 2**0.5,
        "seeds": {"3": 50.0, "5": 52.0},
    }
    without_test = {"eval_exact_match": 3.0}
    assert list(scores_of_seeds({1: without_test, 2: without_test})) == ["eval_exact_match"]
