"""The output of a training: lines, sample translations, and a bar that knows the time limit."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import EvalPrediction, TrainerState

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.training.report import SampleTranslations, TrainingBar
from tests.trainer_helpers import run_tiny, write_pairs


def test_samples_are_decoded_from_the_predictions_without_padding() -> None:
    texts = ["eins", "zwei", "drei"]
    tokenizer = train_tokenizer(texts * 3, 280)
    samples = SampleTranslations.of([{"source": f"s{row}", "target": f"t{row}"} for row in range(3)], 3)
    compute = samples.taken_from(lambda prediction: {"bleu": 1.0}, tokenizer)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids = np.full((3, max(map(len, rows)) + 2), -100)
    for row, found in zip(ids, rows, strict=True):
        row[: len(found)] = found
    before = ids.copy()
    assert compute(EvalPrediction(predictions=ids, label_ids=ids)) == {"bleu": 1.0}
    assert samples.translations == texts and (ids == before).all()
    assert samples.lines()[:3] == ["  source       s0", "  reference    t0", "  translation  eins"]


def test_bar_counts_the_updates_that_the_time_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    stop: Any = SimpleNamespace(max_seconds=60.0, seconds=lambda: 6.0)
    bar = TrainingBar(stop)
    state = TrainerState(global_step=0, max_steps=1000, is_world_process_zero=True)
    bar.on_train_begin(None, state, None)
    state.global_step = 20  # in 6 of 60 seconds
    bar.on_step_end(None, state, None)
    assert bar.training_bar.total == 200 and bar.training_bar.n == 20
    stop.seconds = lambda: 0.1
    bar.on_step_end(None, state, None)
    assert bar.training_bar.total == 1000, "max_steps comes first"
    bar.on_train_end(None, state, None)


def test_run_prints_lines_and_samples_but_no_dictionary_and_no_bar(tmp_path, capfd, monkeypatch):
    sources = ["one dog", "two dogs", "three cats", "a ball", "one cat"]
    targets = ["ein Hund", "zwei Hunde", "drei Katzen", "ein Ball", "eine Katze"]
    files = write_pairs(tmp_path, list(zip(sources, targets, strict=True)), "train", "validation")
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": False}
    run_tiny(tmp_path / "run", **files, **settings)
    printed, errors = capfd.readouterr()
    assert re.search(r"^update 1 of 2  loss [\d.]+  nll .* target tokens/s  learning rate ", printed, re.MULTILINE)
    assert re.search(r"^update 2  validation  loss [\d.]+  perplexity .* BLEU [\d.]+ ", printed, re.MULTILINE)
    for source, target in zip(sources[0:5:2], targets[0:5:2], strict=True):
        assert re.search(
            rf"^  source       {source}\n  reference    {target}\n  translation  ?", printed, re.MULTILINE
        )
    assert "{'" not in printed and "'loss'" not in errors
    assert not sys.stderr.isatty() and "0/2 [" not in errors


def test_last_update_is_validated_once_and_averages_are_named(tmp_path, capsys):
    """One validation line for each update that is evaluated. The candidates have one line without samples."""
    pairs = [f"text {number}" for number in range(12)]
    for side in ("en", "de"):
        (tmp_path / f"text.{side}").write_text("\n".join(pairs) + "\n")
    text = [tmp_path / "text.en", tmp_path / "text.de"]
    flags = {"train": text, "validation": text, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    averages = {"save_steps": 1, "average_last": 2, "ema_decay": 0.5}
    run_tiny(tmp_path / "run", **flags, **averages, warmup_steps=9, vocab_size=270)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("training on cpu: 2 updates"))
    assert str(tmp_path / "run") in lines[start] and "warmup_steps=9" in lines[start + 1]
    assert re.search(r"^update 1 of 2", printed.split("warmup_steps=9")[1], re.MULTILINE)
    assert re.search(r"^trained 2 updates in \d+ s$", printed, re.MULTILINE)
    assert "precision: float32" in lines, "nobody set it"
    assert [line.split("  ")[0] for line in lines if "  validation  " in line] == ["update 1", "update 2"]
    assert sum(line.strip().startswith("source ") for line in lines) == 2 * 3
    (line,) = [line for line in lines if line.startswith("validation BLEU: ")]
    assert all(name in line for name in ("single", "averaged", "ema", "kept: "))
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_bleu" in entry] == [1, 2]
