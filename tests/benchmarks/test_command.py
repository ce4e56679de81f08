"""`python -m scripts.benchmarks`: its tables and files, and arguments that it refuses before measuring."""

import json
import os
import signal

import pytest

from scripts.benchmarks import __main__ as benchmarks
from scripts.benchmarks import decoding as decoding_benchmark
from scripts.benchmarks import training as training_benchmark
from scripts.benchmarks.report import Measurement
from tests.benchmarks.conftest import SENTENCES
from vanilla_transformer_cli.main import run_module


@pytest.fixture
def run(capfd, tmp_path, in_tmp_path):
    """Run a benchmark. Return exit status, standard output and standard error."""
    for name in ("source", "reference"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in SENTENCES), encoding="utf-8")
    terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments, command="decode"):
        capfd.readouterr()  # the output before
        with pytest.raises(SystemExit) as leaving:
            run_module(benchmarks, [command, *map(str, arguments)], "python -m scripts.benchmarks")
        return leaving.value.code or 0, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGTERM, terminate)


@pytest.mark.slow
def test_decoding_figures_are_printed_and_written(run, folder, tmp_path):
    arguments = (
        f"--model {folder} --source source --reference reference --bleu_tokenize none --engines ours_fp32 "
        "--batch_sizes 2 --num_beams 1 4 --rounds 1 --threads 1 --output found.json"
    )
    status, printed, errors = run(*arguments.split())
    assert status == 0, errors
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["setting"]["beams"] for one in found["measurements"]] == [1, 4]
    assert all(
        "tok:none" in one["more"]["bleu_signature"] and one["seconds"]
        for one in found["measurements"]
    )
    assert all(one["more"]["KV caches, MiB"] > 0 for one in found["measurements"])
    assert found["settings"]["threads"] == 1 and printed.count("| ours_fp32 |") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "reference", "source"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_reports_the_finished_rounds(
    run, folder, tmp_path, monkeypatch, number
):
    def compare(*_, **__):
        one = Measurement("ours_fp32", {"batch": 2, "beams": 1})
        one.add(2.0, 30, None)
        yield one
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was ignored")

    monkeypatch.setattr(decoding_benchmark, "compare", compare)
    status, printed, errors = run("--model", folder, "--source", "source", "--output", "found.json")
    assert status == 130 and "| ours_fp32 | 2 | 1 | 15 |" in printed
    assert errors == "interrupted: the figures are those of the rounds finished by then\n"
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["seconds"] for one in found["measurements"]] == [[2.0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--engines", "fairseq"), "engines: fairseq"),
        (("--batch_sizes", "0"), "batch_sizes: "),
        (("--rounds", "0"), "rounds: "),
        (("--source", "missing"), "missing"),
        (("--reference", "short"), "references: "),
        (("--bleu_tokenize", "13b"), "'13b'"),
        (("--output", "."), "error: output . is a folder"),
    ],
)
def test_wrong_arguments_are_refused_before_an_engine_starts(
    run, folder, tmp_path, monkeypatch, wrong, message
):
    def refuse(*_, **__):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(decoding_benchmark, "Worker", refuse)
    (tmp_path / "short").write_text("one\n")
    status, printed, errors = run("--model", folder, "--source", "source", *wrong)
    assert status == 2 and printed == ""
    assert errors.startswith("error: ") and message in errors


@pytest.mark.slow
def test_training_figures_are_printed_and_written(run, tmp_path):
    arguments = (
        "--source source --target reference --preset tiny --vocab_size 300 --tokens 30 "
        "--engines ours_fp32 marian_bf16 --updates 1 --warm_up 1 --rounds 2 --threads 1 --output found.json"
    )
    status, printed, errors = run(*arguments.split(), command="train")
    assert status == 0, errors
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["engine"] for one in found["measurements"]] == ["ours_fp32", "marian_bf16"]
    assert all(
        len(one["rates"]) == 2 and one["tokens_per_second"] > 0 for one in found["measurements"]
    )
    assert found["settings"]["tokens"] == 30
    assert printed.count("| ours_fp32 |") == 1 and printed.count("| marian_bf16 |") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--engines", "ours"), "engines: ours"),
        (("--preset", "huge"), "preset: huge"),
        (("--processes", "0"), "processes: "),
        (("--target", "missing", "--source", "source"), "missing"),
        (("--device", "tpu"), "device: tpu"),
        (("--output", "."), "error: output . is a folder"),
    ],
)
def test_wrong_training_arguments_are_refused_before_an_engine_starts(
    run, monkeypatch, wrong, message
):
    def refuse(*_, **__):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(training_benchmark, "Worker", refuse)
    status, printed, errors = run("--preset", "tiny", "--tokens", 32, *wrong, command="train")
    assert status == 2 and printed == ""
    last = errors.splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in errors
