"""The output of a training: lines, sample translations, and a bar that knows the time limit."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import EvalPrediction

from hf_vanilla_transformer.text.language_tokens import add_language_tokens
from hf_vanilla_transformer.training.run import report
from hf_vanilla_transformer.training.run.report import (
    SampleTranslations,
    TrainingBar,
    TrainingReport,
    duration,
    log_line,
    show_progress,
)
from tests.model_helpers import SPECIAL_TOKENS, word_tokenizer
from tests.trainer_helpers import run_tiny, write_pairs


@pytest.mark.parametrize(
    ("task", "items"), [("language", "2 sentences "), ("sequence", "2 sequences ")]
)
def test_evaluations_count_what_the_task_has(capsys, task, items):
    logs = {"eval_sentences": 2, "eval_loss": 1.0}
    state = SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=2, log_history=[])
    TrainingReport(task=task).on_log(None, state, None, logs=logs)
    assert items in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "done", "warmup", "begins", "ends"),
    [
        (None, 0, 3, "5 updates, into out", ""),
        (2.5, 0, 4, "5 updates, at most 2.5 minutes, into out", "warns"),
        (2.5, 3, 3, "5 updates, at most 2.5 minutes, into out", "warns"),
        (2.5, 4, 3, "5 updates, at most 2.5 minutes, into out", ""),
        (None, 3, 3, "5 updates, into out", ""),
        (None, 0, 5, "5 updates, into out warns", ""),
        (None, 0, 6, "5 updates, into out warns", ""),
        (2.5, 5, 5, "", ""),
    ],
)
def test_warm_up_of_the_whole_run_is_warned_of(
    capsys: pytest.CaptureFixture,
    limit: float | None,
    done: int,
    warmup: int,
    begins: str,
    ends: str,
) -> None:
    """At the start, and after a time limit."""

    def printed(event: str, is_main: bool) -> str:
        state = SimpleNamespace(is_world_process_zero=is_main, global_step=done, max_steps=5)
        getattr(TrainingReport(), event)(args, state)
        text = capsys.readouterr().out.replace("training on cpu: ", "")
        return re.sub(r"\s*warning: .*\n", " warns", text).strip()

    args = SimpleNamespace(
        device="cpu", output_dir="out", max_minutes=limit, get_warmup_steps=lambda updates: warmup
    )
    assert [printed(event, True) for event in ("on_train_begin", "on_train_end")] == [begins, ends]
    assert [printed(event, False) for event in ("on_train_begin", "on_train_end")] == ["", ""]


@pytest.mark.parametrize("is_main", [True, False])
def test_main_rank_prints_entries_and_samples(capsys: pytest.CaptureFixture, is_main: bool) -> None:
    state = SimpleNamespace(is_world_process_zero=is_main, global_step=1, max_steps=2)
    printer = TrainingReport(SimpleNamespace(lines=lambda: ["sample"]))
    for logs in ({"loss": 1.0}, {"train_runtime": 1.0}, {}, None):
        printer.on_log(None, state, logs=logs)
    printer.on_evaluate(None, state)
    TrainingReport().on_evaluate(None, state)
    assert capsys.readouterr().out == "update 1 of 2  loss 1.000\nsample\n" * is_main


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("has_metrics", [True, False])
@pytest.mark.parametrize("budget", [None, SimpleNamespace(rows=[1])])
def test_samples_are_of_generated_evaluations(
    has_pairs: bool, generates: bool, has_metrics: bool, budget: Any
) -> None:
    added: list[Any] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(disable_tqdm=True, predict_with_generate=generates),
        compute_metrics=(lambda prediction: {}) if has_metrics else None,
        budget=budget,
        add_callback=added.append,
        remove_callback=lambda callback: None,
    )
    pairs = [{"source": "a", "target": "b"}] if has_pairs else None
    show_progress(trainer, pairs, word_tokenizer(["<unk>"]))
    samples = added[0].samples
    assert (samples is not None) is (has_pairs and generates and has_metrics)
    if samples is not None:
        assert samples.evaluated() == (budget and [1])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_of_the_libraries_need_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    hidden: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(report, "disable_progress_bars", lambda: hidden.append("datasets"))
    monkeypatch.setattr(
        report.logging, "disable_progress_bar", lambda: hidden.append("transformers")
    )
    report.hide_bars_without_terminal()
    assert hidden == ([] if is_terminal else ["datasets", "transformers"])


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_terminal_has_a_bar_unless_the_user_wants_none(monkeypatch, is_terminal, disable_tqdm):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    added = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(disable_tqdm=disable_tqdm, predict_with_generate=False),
        add_callback=added.append,
        remove_callback=lambda callback: None,
    )
    show_progress(trainer, None, word_tokenizer(["a"], **SPECIAL_TOKENS))
    has_bar = any(isinstance(callback, TrainingBar) for callback in added)
    assert has_bar is (is_terminal and not disable_tqdm)


def test_run_prints_lines_and_samples_but_no_dictionary_and_no_bar(tmp_path, capfd):
    """One validation line for each update that is evaluated. The candidates have one line without samples."""
    pairs = [
        ("one dog", "ein Hund"),
        ("two dogs", "zwei Hunde"),
        ("three cats", "drei Katzen"),
        ("a ball", "ein Ball"),
        ("one cat", "eine Katze"),
    ]
    run_tiny(
        tmp_path / "run",
        **write_pairs(tmp_path, pairs, "train", "validation"),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        average_last=2,
        ema_decay=0.5,
        warmup_steps=9,
        disable_tqdm=False,
    )
    printed, errors = capfd.readouterr()
    assert "{'" not in printed
    assert "'loss'" not in errors
    assert not sys.stderr.isatty()
    assert "0/2 [" not in errors
    lines = printed.splitlines()
    (start,) = (
        number for number, line in enumerate(lines) if line.startswith("training on cpu: 2 updates")
    )
    assert str(tmp_path / "run") in lines[start]
    assert "warmup_steps=9" in lines[start + 1]
    assert "precision: float32" in lines, "nobody set it"
    of_training = printed.split("warmup_steps=9")[1]
    for expected in (
        r"^update 1 of 2  loss [\d.]+  nll .* target tokens/s  learning rate ",
        r"^update 2  validation  loss [\d.]+  perplexity .* BLEU [\d.]+ ",
        r"^trained 2 updates in \d+ s$",
    ):
        assert re.search(expected, of_training, re.MULTILINE)
    assert [line.split("  ")[0] for line in lines if "  validation  " in line] == [
        "update 1",
        "update 2",
    ]
    samples = re.findall(
        r"^  source       (.+)\n  reference    (.+)\n  translation  ?",
        printed,
        re.MULTILINE,
    )
    assert len(samples) == len(set(samples)) == 2
    assert set(samples) <= set(pairs)
    (line,) = [line for line in lines if line.startswith("validation BLEU: ")]
    for name in ("single", "averaged", "ema", "kept: "):
        assert name in line
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_bleu" in entry] == [1, 2]


@pytest.mark.parametrize(
    ("task", "name"), [("language", "translation"), ("sequence", "prediction")]
)
def test_sample_is_called_what_the_task_makes(
    monkeypatch: pytest.MonkeyPatch, task: str, name: str
) -> None:
    monkeypatch.setattr(report, "tokenizer_task", lambda tokenizer: task)
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "a"], **SPECIAL_TOKENS)
    samples = SampleTranslations([{"source": "b", "target": "c"}])
    prediction = EvalPrediction(predictions=np.array([[4]]), label_ids=None)
    samples.taken_from(lambda _: {}, tokenizer)(prediction)
    assert [line.split() for line in samples.lines()][-1] == [name, "a"]


def test_samples_are_texts_without_the_token_of_a_language():
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "oh", "no", "."], **SPECIAL_TOKENS)
    add_language_tokens(tokenizer, [("en", "de")], on_source=False)
    assert tokenizer.convert_ids_to_tokens(7) == "__de__"
    samples = SampleTranslations([{"source": "ach nein .", "target": "oh no ."}])
    predictions = np.array([[0, 7, 4, 5, 6, 2, -100]])
    samples.taken_from(lambda _: {}, tokenizer)(
        EvalPrediction(predictions=predictions, label_ids=None)
    )
    assert [line.split(None, 1)[1] for line in samples.lines()] == [
        "ach nein .",
        "oh no .",
        "oh no .",
    ]
    assert samples.lines() == []


STATE = SimpleNamespace(global_step=3000, max_steps=9000)


def test_one_sequence_is_not_several() -> None:
    for count, items in ((1, "1 sequence "), (2, "2 sequences ")):
        assert items in log_line({"eval_sentences": count, "eval_loss": 1.0}, STATE, "sequences")


def test_entries_of_the_log_are_one_line() -> None:
    logs = {
        "loss": 1.23456,
        "nll_loss": 1.5,
        "perplexity": 4.4817,
        "tokens_per_second": 1234.6,
        "learning_rate": 5e-4,
    }
    rates = "loss 1.235  nll 1.500  perplexity 4.48  1,235 target tokens/s  learning rate 5.00e-04"
    line = f"update 3,000 of 9,000  {rates}"
    assert log_line(logs, STATE) == line
    more = {"skipped_updates": 2, "minutes_left": 0.99, "epoch": 1}
    assert log_line(logs | more, STATE) == f"{line}  2 updates skipped  59 s left"
    endless = SimpleNamespace(global_step=3000, max_steps=-1)
    assert (
        log_line({"loss": 2, "minutes_left": 1}, endless)
        == "update 3,000  loss 2.000  1.0 min left"
    )
    assert log_line({"train_runtime": 3}, endless) == ""
    only = SimpleNamespace(global_step=1, max_steps=1)
    assert log_line({"loss": 2}, only) == "update 1 of 1  loss 2.000"


def test_scores_of_the_log_are_one_line() -> None:
    scores = {
        "eval_loss": 1,
        "eval_runtime": 3,
        "eval_bleu": 20.123,
        "eval_chrf": 40,
        "eval_exact_match": 5.55,
        "eval_bleu_de": 30,
        "eval_comet": 0.5,
        "eval_own": 7,
        "eval_samples": 9,
    }
    line = log_line(scores, STATE)
    assert line.startswith(
        "update 3,000  validation  loss 1.000  BLEU 20.12  chrF 40.00  exact match 5.5 %  3.0 s  "
    )
    assert "de 30.00" in line
    assert "own 7.00" in line
    assert "samples" not in line


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1.0 min"), (90, "1.5 min"), (60_000, "1,000.0 min")],
)
def test_duration_is_in_seconds_or_minutes(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_samples_are_other_sentences_and_short() -> None:
    texts = [f"{number} ".ljust(150 + number % 2, "x") for number in range(8)]
    pairs = [{"source": text, "target": "a"} for text in texts]
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "a"], **SPECIAL_TOKENS)
    places = [int((number + 0.5) * (1 + 5**0.5) / 2 % 1 * 8) for number in range(5)]
    rows = [None, range(8), [7, 6, 5, 4, 3, 2, 1, 0]]
    for chosen in rows:
        samples = SampleTranslations(pairs, lambda chosen=chosen: chosen)
        compute = samples.taken_from(lambda _: {}, tokenizer)
        shown = []
        for _ in range(5):
            compute(EvalPrediction(predictions=np.full((8, 2), 4), label_ids=None))
            shown += [
                line.split(None, 1)[1] for line in samples.lines() if line.startswith("  source ")
            ]
        expected = [texts[(chosen or range(8))[place]] for place in places]
        assert shown == [text if len(text) == 150 else f"{text[:147]}..." for text in expected]
        compute(EvalPrediction(predictions=[], label_ids=None))
        assert samples.lines() == []
