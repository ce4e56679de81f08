"""The leaderboard has the numbers of the cards and of the experiments, and places a run."""

import csv
import re
from datetime import timedelta
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.hub import leaderboard
from vanilla_transformer_cli import train
from vanilla_transformer_cli.parsing import installed_recipes


def rows() -> list[dict[str, str]]:
    with Path(leaderboard.__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["recipe"])
def test_rows_have_the_numbers_of_their_sources(row: dict[str, str], repository: Path) -> None:
    text = (repository / row["source"]).read_text(encoding="utf-8")
    if not row["source"].startswith("model_cards/"):
        lines = [line for line in text.splitlines() if re.search(rf"[ ,|]{row['core_minutes']} \\|", line)]
        assert any(f" {row['bleu']} " in line for line in lines)
        return
    hours, minutes, seconds = map(int, re.findall(r"wall time.*?: (\d+):(\d+):(\d+)", text)[0])
    wall = timedelta(hours=hours, minutes=minutes, seconds=seconds).total_seconds() / 60
    threads = int(re.findall(r"(\d+) torch thread", text)[0])
    assert float(row["core_minutes"]) == pytest.approx(wall * threads, abs=0.05)
    scores = [each for each in ModelCard(text).data.eval_results or () if each.metric_type == "bleu"]
    assert f"{scores[0].metric_value:.2f}" == row["bleu"] and scores[0].dataset_split == "test"


def test_recipes_exist() -> None:
    known = set(installed_recipes())
    for row in rows():
        name = row["recipe"].split(",")[0]
        assert name in known or name == "the same"


def test_page_has_the_table(repository: Path) -> None:
    page = (repository / "model_cards" / "README.md").read_text(encoding="utf-8")
    assert leaderboard.leaderboard(leaderboard.entries()) in page


def test_run_is_placed_among_those_of_its_test_set() -> None:
    text = leaderboard.standing(["x/test_2016_flickr.en", "x/test_2016_flickr.de"], 40.0, 30.0)
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| test_2016")]
    minutes = [float(cells[1]) for cells in table]
    assert minutes == sorted(minutes) and minutes[1] == 30 and "this run" in table[1][3]
    assert "no run is better" in text
    assert "is better" in leaderboard.standing(["numbers"], 99.0, 2.0)


@pytest.mark.parametrize("test", [[], ["newstest2014"]])
def test_unknown_test_set_is_refused(test: list[str]) -> None:
    with pytest.raises(UserError, match="leaderboard"):
        leaderboard.standing(test, 40.0, 30.0)


def test_train_compares_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    results = {"test_bleu": 99.0, "train_seconds": 120.0}
    monkeypatch.setattr("hf_vanilla_transformer.training.run.run_training", lambda *_, **__: results)
    train.main(["numbers_en_de", "--output_dir", str(tmp_path), "--use_cpu", "true", "--compare"])
    assert "| numbers | 2.0 | 99.00 | **this run** |" in capsys.readouterr().out
    results.pop("test_bleu")
    with pytest.raises(UserError, match="compare"):
        train.main(["numbers_en_de", "--output_dir", str(tmp_path), "--use_cpu", "true", "--compare"])
