"""`vanilla-transformer translate` as users run it: in a pipe, with files, and with wrong arguments."""

import gzip
import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers.utils import logging

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import echo_model
from vanilla_transformer_cli.main import main

# U+2028 and a lone carriage return are part of a line
LINES = ["two hundred and one", "", "seven", "fünf\u2028\rsechs", "   ", "日本 🙂"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(LINES * 3, 300)
    echo_model(tokenizer).save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder


@pytest.fixture
def run(capfdbinary):
    """Run the subcommand in this process. Return its exit status, standard output and standard error."""
    verbosity = logging.get_verbosity()

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["translate", *map(str, arguments)])
        captured = capfdbinary.readouterr()
        return leaving.value.code, captured.out, captured.err.decode()

    yield run
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def expected(model_folder, **settings):
    translator = Translator.from_pretrained(model_folder, device="cpu")
    return [
        line.replace("\n", " ") for line in translator.translate(LINES, protect=True, **settings)
    ]


@pytest.mark.parametrize("name", ["out.txt", "out.txt.gz"])
def test_file_is_translated_into_a_file(run, model_folder, tmp_path, name):
    (tmp_path / "in.gz").write_bytes(gzip.compress("\n".join(LINES).encode() + b"\n"))
    output = tmp_path / name
    arguments = (
        f"--model {model_folder} --input {tmp_path}/in.gz --output {output} --num_beams 1 --max_new_tokens 6 "
        "--batch_size 2 --length_penalty 1 --device cpu --dtype float32"
    )
    status, printed, _ = run(*arguments.split())
    assert status == 0 and printed == b""
    text = gzip.decompress(output.read_bytes()) if name.endswith(".gz") else output.read_bytes()
    found = text.decode().split("\n")
    assert found == [*expected(model_folder, num_beams=1, max_new_tokens=6), ""]
    assert sorted(os.listdir(tmp_path)) == ["in.gz", name]


def test_line_feed_in_a_translation_becomes_a_space(run, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: iter(["one\ntwo", "three"]))
    (tmp_path / "in").write_text("a\nb\n")
    assert run("--model", model_folder, "--input", tmp_path / "in")[1] == b"one two\nthree\n"


def test_prints_of_libraries_go_to_standard_error(run, model_folder, tmp_path, monkeypatch):
    def chatty(*_, **__):
        print("advice")
        yield "eins"

    monkeypatch.setattr(Translator, "translate", chatty)
    (tmp_path / "in").write_text("one\n")
    status, printed, errors = run("--model", model_folder, "--input", tmp_path / "in")
    assert (status, printed, errors) == (0, b"eins\n", "advice\n")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"--model": "missing"}, "missing: "),
        ({"--model": "."}, "config.json"),
        ({"--device": "cuda:99"}, "device: 'cuda:99'"),
        ({"--input": "missing.txt"}, "missing.txt"),
        ({"--input": "latin1.txt"}, "latin1.txt, line 2, byte 2 (0xfc)"),
        ({"--output": "."}, "error: output . is a folder"),
        ({"--output": "no/such/out.txt"}, "no/such"),
        ({"--output": "rows.csv"}, "rows.csv: a table is written as .jsonl or .parquet"),
        ({"--output": "rows.json.gz"}, "rows.json.gz: a table"),
        ({"--batch_size": "0"}, "batch_size"),
        ({"--max_tokens_per_batch": "0"}, "max_tokens_per_batch"),
        ({"--n_best": "5"}, "num_beams"),
        ({"--n_best": "1", "--num_beams": "1"}, "n_best: "),
        ({"--n_best": "2", "--score": "scored.txt"}, "--score"),
        ({"--score": "scored.txt"}, "--max_new_tokens"),
        ({"--input": "page.html", "--source_column": "a"}, "--source_column is for lines of text"),
        ({"--input": "film.srt", "--line_pattern": "(?P<a>.)"}, "--line_pattern is for lines"),
        ({"--paragraphs": "--alignment"}, "--paragraphs"),
        ({"--source_lang": "en"}, "--source_lang"),
        (
            {"--source_column": "a", "--source_lang": "en", "--paragraphs": "--raw"},
            "--source_column",
        ),
        ({"--input": "-", "--score": "-"}, "--score"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line_and_leave_no_file(
    run, model_folder, tmp_path, in_tmp_path, wrong, message
):
    (tmp_path / "latin1.txt").write_bytes("gut\nfür\n".encode("latin-1"))
    (tmp_path / "out.txt").write_text("old\n")
    arguments = {
        "--model": model_folder,
        "--input": "latin1.txt",
        "--output": "out.txt",
        "--max_new_tokens": "2",
    } | wrong
    status, printed, errors = run(*(part for pair in arguments.items() for part in pair))
    assert status == 2 and printed == b""
    assert errors.startswith("error: ") and message in errors
    assert (tmp_path / "out.txt").read_text() == "old\n"
    assert sorted(os.listdir(tmp_path)) == ["latin1.txt", "out.txt"]


def test_paragraphs_keep_the_layout_and_files_equal_pipes(run, model_folder, tmp_path):
    pytest.importorskip("sentencex", reason="needs the extra `documents`")
    text = "- seven. two hundred and one!\n\n  fünf\n" * 9
    (tmp_path / "in").write_text(text, encoding="utf-8")
    arguments = [
        "--model",
        model_folder,
        "--input",
        tmp_path / "in",
        "--num_beams",
        1,
        "--max_new_tokens",
        4,
    ]
    arguments += ["--paragraphs", "--batch_size", 1]
    status, printed, errors = run(*arguments)
    assert (status, errors) == (0, "")
    translator = Translator.from_pretrained(model_folder, device="cpu")
    sentences = ["seven.", "two hundred and one!", "fünf"]
    first, second, third = (
        line.replace("\n", " ")
        for line in translator.translate(sentences, num_beams=1, max_new_tokens=4, protect=True)
    )
    assert printed.decode() == f"- {first} {second}\n\n  {third}\n" * 9
    assert run(*arguments, "--output", tmp_path / "out", "--source_lang", "en") == (0, b"", "")
    assert (tmp_path / "out").read_bytes() == printed


def test_terminal_is_answered_line_by_line(run, model_folder, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as typed, os.fdopen(writing, "wb", buffering=0) as keyboard:
        keyboard.write(b"seven\n")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        original = Translator.translate

        def answering(self, sentences, **settings):
            for text in original(
                self, sentences, **settings
            ):  # it would wait for more if it read ahead
                yield text
                keyboard.close()

        monkeypatch.setattr(Translator, "translate", answering)
        flags = ["--device", "cpu", "--num_beams", 1, "--max_new_tokens", 4]
        status, printed, errors = run("--model", model_folder, *flags)
    assert status == 0 and "Ctrl-D" in errors
    (line,) = original(
        Translator.from_pretrained(model_folder), ["seven"], num_beams=1, max_new_tokens=4
    )
    assert printed.decode() == f"{line}\n"


def test_score_writes_log_probabilities_of_tokens(run, model_folder, tmp_path):
    (tmp_path / "source").write_text("two hundred and one\nseven\n", encoding="utf-8")
    (tmp_path / "target").write_text("seven\n\n", encoding="utf-8")
    status, printed, errors = run(
        "--model", model_folder, "--input", tmp_path / "source", "--score", tmp_path / "target"
    )
    assert status == 0, errors
    for line, tokens in zip(printed.decode().splitlines(), (None, 1), strict=True):
        total, each = line.split("\t")
        log_p = [float(number) for number in each.split()]
        assert tokens is None or len(log_p) == tokens
        assert float(total) == pytest.approx(sum(log_p), abs=1e-3) and max(log_p) < 0
    (tmp_path / "target").write_text("seven\n", encoding="utf-8")
    status, _, errors = run(
        "--model", model_folder, "--input", tmp_path / "source", "--score", tmp_path / "target"
    )
    assert status == 2 and " 2 " in errors and " 1" in errors


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return tmp_path / "source"


@pytest.mark.parametrize("to_file", [False, True])
def test_n_best_and_alignment_are_written(run, model_folder, source, to_file):
    output = source.with_name("best")
    arguments = f"--model {model_folder} --input {source} --n_best 3 --num_beams 4 --max_new_tokens 5 --batch_size 1"
    destination = ("--output", output) if to_file else ()
    status, printed, errors = run("--alignment", *arguments.split(), *destination)
    assert status == 0, errors
    lines = (output.read_bytes() if to_file else printed).decode("utf-8").split("\n")[:-1]
    found = {}
    for line in lines:
        number, text, score, links = line.split(" ||| ")
        found.setdefault(int(number), []).append((text, score, links))
    translator = Translator.from_pretrained(model_folder, device="cpu")
    wanted = translator.translate_nbest(
        LINES, 3, alignment=True, num_beams=4, max_new_tokens=5, protect=True
    )
    assert found == {
        number: [
            (one.text.replace("\n", " "), f"{one.score:.4f}", one.pharaoh) for one in hypotheses
        ]
        for number, hypotheses in enumerate(wanted)
    }


def test_several_models_form_an_ensemble(run, model_folder, source, tmp_path):
    other = VanillaTransformerForConditionalGeneration.from_pretrained(model_folder)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, dims=0))
    other.save_pretrained(tmp_path / "other")
    save_tokenizers(tmp_path / "other", Translator.from_pretrained(model_folder).source_tokenizer)
    command = ("--input", source, "--max_new_tokens", 4, "--model", model_folder)
    status, printed, errors = run(*command, tmp_path / "other")
    assert status == 0, errors
    translator = Translator.from_pretrained(
        model_folder, device="cpu", ensemble=[tmp_path / "other"]
    )
    lines = [
        line.replace("\n", " ")
        for line in translator.translate(LINES, max_new_tokens=4, protect=True)
    ]
    assert printed.decode("utf-8").split("\n") == [*lines, ""]
    assert run(*command)[1] != printed


def interrupted(self, sentences, **_):
    yield next(iter(sentences))
    raise KeyboardInterrupt


def test_interrupted_file_translation_resumes(run, model_folder, tmp_path, monkeypatch):
    source, output = tmp_path / "source", tmp_path / "out"
    source.write_text("".join(f"{line}\n" for line in LINES * 4), encoding="utf-8")
    original, chunks = Translator.translate, []

    def stopped_in_the_second(self, sentences, **settings):
        chunks.append(sentences)
        return (
            interrupted(self, sentences)
            if len(chunks) == 2
            else original(self, sentences, **settings)
        )

    monkeypatch.setattr(Translator, "translate", stopped_in_the_second)
    command = ("--model", model_folder, "--input", source, "--output", output, "--batch_size", 1)
    status, printed, errors = run(*command, "--max_new_tokens", 3)
    assert (status, printed, output.exists()) == (130, b"", False)
    assert errors.startswith("error: interrupted")
    # max_tokens_per_batch may change
    assert run(*command, "--max_new_tokens", 3, "--max_tokens_per_batch", 7)[0] == 0
    monkeypatch.undo()
    assert output.read_text(encoding="utf-8").split("\n") == [
        *expected(model_folder, max_new_tokens=3) * 4,
        "",
    ]
    assert sum(map(len, chunks)) == 4 * len(LINES) + len(chunks[1])


def translating(model_folder, *flags, **options):
    """The command in a process with another locale and working directory, answering each line at once."""
    command = [
        sys.executable,
        "-m",
        "vanilla_transformer_cli",
        "translate",
        "--model",
        model_folder,
    ]
    command += ["--batch_size", "1", "--max_new_tokens", "3", "--device", "cpu", *flags]
    locale = {"LC_ALL": "en_US.ISO-8859-1", "PYTHONIOENCODING": "latin-1"}
    environment = os.environ | locale
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": model_folder.parent}
    return subprocess.Popen(command, env=environment, **pipes, **options)


@pytest.mark.slow
def test_pipe_is_utf_8_in_any_locale_and_interruptible(repository, model_folder):
    flags = ["--max_new_tokens", "6", "--num_beams", "2"]
    with translating(model_folder, *flags, stdout=subprocess.PIPE) as process:
        process.stdin.write("\n".join([*LINES, ""]).encode())
        process.stdin.flush()
        # lines are written before the input ends
        found = [process.stdout.readline().decode("utf-8") for _ in LINES]
        assert found == [
            f"{line}\n" for line in expected(model_folder, max_new_tokens=6, num_beams=2)
        ]
        assert len(set(found)) >= 4 and found[1] == found[4] == "\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stdout.read() == b"" and process.stderr.read() == b"error: interrupted\n"


@pytest.mark.slow
def test_closed_output_pipe_is_no_error(repository, model_folder):
    reading, writing = os.pipe()
    with translating(model_folder, stdout=writing) as process:
        os.close(writing)
        process.stdin.write(b"seven\n")
        process.stdin.flush()
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.readline().endswith(b"\n")
        process.stdin.write(b"seven\nseven\n")  # the output pipe is closed by now
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
