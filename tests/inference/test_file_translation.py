"""Files are translated in chunks: a stopped job resumes without repeating or losing a chunk."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.inference.file_translation import BATCHES_PER_CHUNK, translate_file, translated_lines
from hf_vanilla_transformer.inference.fingerprints import translator_fingerprint
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, save_model, tiny_model

TRANSLATE = [sys.executable, "-m", "vanilla_transformer_cli", "translate"]
LINES = [f"{i} two hundred and {i}" if i % 7 else "" for i in range(28)]
SETTINGS = {"batch_size": 1, "num_beams": 1, "max_new_tokens": 4}
CHUNK = SETTINGS["batch_size"] * BATCHES_PER_CHUNK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), LINES, vocab_size=300, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return Translator.from_pretrained(folder, device="cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return tmp_path / "source"


def process(number: int = 0, of: int = 1) -> Any:
    return SimpleNamespace(process_index=number, num_processes=of, wait_for_everyone=lambda: None)


def expected(translator: Translator) -> str:
    lines = translator.translate(LINES, **SETTINGS)
    return "".join(line.replace("\n", " ") + "\n" for line in lines)


def test_chunks_are_shared_by_processes(translator: Translator, source: Path) -> None:
    # Rank 0, which joins the chunks, runs last.
    output, done = source.with_name("out"), {}
    for number in (2, 1, 0):
        counts: list[int] = []
        note = source.with_name(".out.parts")
        note.mkdir(exist_ok=True)
        translate_file(
            translator, source, output, process(number, of=3), progress=lambda n, _, c=counts: c.append(n), **SETTINGS
        )
        done[number] = sum(counts)
    assert sum(done.values()) == len(LINES)
    assert max(done.values()) - min(done.values()) <= CHUNK
    assert output.read_text(encoding="utf-8") == expected(translator)


def test_errors_name_the_line_of_the_file(folder: Path, source: Path) -> None:
    model = tiny_model(
        vocab_size=300, tie_word_embeddings=False, position_encoding_type="learned", max_position_embeddings=64
    )
    translator = Translator(model, Translator.from_pretrained(folder, device="cpu").source_tokenizer)
    source.write_text("\n".join(LINES[:CHUNK] + ["two hundred " * 80]), encoding="utf-8")
    with pytest.raises(UserError, match=f"line {CHUNK + 1}: .* 64"):
        translate_file(translator, source, source.with_name("out"), process(), **SETTINGS)


def test_n_best_numbers_continue_over_chunks(translator: Translator, source: Path) -> None:
    output, prefixes = source.with_name("out"), source.with_name("prefixes")
    begin = ["zwei" if i % 3 else "" for i in range(len(LINES))]
    prefixes.write_text("\n".join(begin) + "\n", encoding="utf-8")
    settings = {**SETTINGS, "num_beams": 2, "n_best": 2}
    translate_file(translator, source, output, process(), prefixes=prefixes, alignment=True, **settings)
    lines = output.read_text(encoding="utf-8").splitlines()
    wanted = list(translated_lines(translator, LINES, prefixes=begin, alignment=True, **settings))
    assert lines == wanted
    assert sorted({int(line.split(" ||| ")[0]) for line in lines}) == list(range(len(LINES)))


def test_chunks_of_another_job_are_refused(translator: Translator, source: Path) -> None:
    output = source.with_name("out")
    parts = source.with_name(".out.parts")
    parts.mkdir()
    (parts / "job.json").write_text("{}", encoding="utf-8")
    assert "output" in error_of(lambda: translate_file(translator, source, output, process(), **SETTINGS))
    assert (parts / "job.json").exists()


@contextmanager
def stopped_after(sentences: int) -> Iterator[None]:
    """Interrupt the translation within the block after a number of sentences."""
    original, done = Translator.translate, []

    def stopped(self: Translator, lines: list[str], **settings: Any) -> Any:
        for line in original(self, lines, **settings):
            if len(done) == sentences:
                raise KeyboardInterrupt
            done.append(line)
            yield line

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Translator, "translate", stopped)
        yield


@pytest.mark.parametrize("change", ["text", "one line", "moved lines", "prefixes", "nothing"])
def test_chunks_of_other_text_are_not_reused(translator, source, change):
    output, prefixes = source.with_name("out"), source.with_name("prefixes")
    with stopped_after(2 * CHUNK + 1):
        translate_file(translator, source, output, process(), **SETTINGS)
    lines, settings = list(LINES), dict(SETTINGS)
    if change == "text":
        lines = ["seven"] * len(LINES)
    elif change == "one line":
        lines[CHUNK] = "eight"
    elif change == "moved lines":
        lines = lines[CHUNK:] + lines[:CHUNK]
    elif change == "prefixes":
        prefixes.write_text("zwei\n" * len(lines), encoding="utf-8")
        settings["prefixes"] = prefixes
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    translate_file(translator, source, output, process(), **settings)
    begin = ["zwei"] * len(lines) if change == "prefixes" else None
    expected_lines = list(translated_lines(translator, lines, prefixes=begin, **SETTINGS))
    assert output.read_text(encoding="utf-8") == "".join(f"{line}\n" for line in expected_lines)


def changed_weight(translator: Translator) -> Translator:
    model = copy.deepcopy(translator.model)
    with torch.no_grad():
        model.lm_head.weight[5, 0] += 1e-3
    return Translator(model, translator.source_tokenizer)


def other_dtype(translator: Translator) -> Translator:
    return Translator(copy.deepcopy(translator.model).to(torch.bfloat16), translator.source_tokenizer)


def other_search(translator: Translator) -> Translator:
    model = copy.deepcopy(translator.model)
    model.generation_config.num_beams = 3
    return Translator(model, translator.source_tokenizer)


def other_tokenizer(translator: Translator) -> Translator:
    return Translator(translator.model, train_tokenizer(["other text"] * 3, 280))


def second_model(translator: Translator) -> Translator:
    return Translator(translator.model, translator.source_tokenizer, ensemble=[changed_weight(translator).model])


@pytest.mark.parametrize("change", [changed_weight, other_dtype, other_search, other_tokenizer, second_model])
def test_chunks_of_another_model_are_refused(translator, source, change):
    """Also if the model is in the same folder and has the same name."""
    output = source.with_name("out")
    with stopped_after(CHUNK + 1):
        translate_file(translator, source, output, process(), **SETTINGS)
    assert "output" in error_of(lambda: translate_file(change(translator), source, output, process(), **SETTINGS))
    translate_file(translator, source, output, process(), **SETTINGS)
    assert output.read_text(encoding="utf-8") == expected(translator)


def test_fingerprint_survives_the_use_of_the_tokenizer(folder: Path) -> None:
    translator = Translator.from_pretrained(folder, "cpu")
    before = translator_fingerprint(translator)
    translator.source_tokenizer(["one", "two hundred"], padding=True, truncation=True, max_length=3)
    assert translator_fingerprint(translator) == before


def test_moved_model_resumes(translator: Translator, folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert translator_fingerprint(Translator.from_pretrained(moved, "cpu")) == translator_fingerprint(translator)


def test_error_keeps_only_finished_chunks(translator: Translator, source: Path) -> None:
    parts, output = source.with_name(".out.parts"), source.with_name("out")
    source.write_bytes(b"f\xfcr\n")
    assert "UTF-8" in error_of(lambda: translate_file(translator, source, output, process(), **SETTINGS))
    assert not parts.exists()
    source.write_bytes(b"one\n" * CHUNK + b"f\xfcr\n")
    assert "UTF-8" in error_of(lambda: translate_file(translator, source, output, process(), **SETTINGS))
    assert len(list(parts.iterdir())) == 2


@pytest.mark.slow
def test_killed_job_resumes(translator: Translator, folder: Path, source: Path, repository: Path) -> None:
    output = source.with_name("out")
    many = LINES * 60
    source.write_text("\n".join(many) + "\n", encoding="utf-8")
    command = [*TRANSLATE, "--model", str(folder), "--input", str(source), "--output", str(output)]
    command += ["--batch_size", "1", "--num_beams", "1", "--max_new_tokens", "4", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    parts = source.with_name(".out.parts")
    for wanted in (2, 9):
        running = subprocess.Popen(command, env=environment)
        while len(list(parts.glob("0*"))) < wanted and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        assert not output.exists()
    assert subprocess.run(command, env=environment, timeout=300).returncode == 0
    torch.manual_seed(0)
    assert output.read_text(encoding="utf-8") == expected(translator) * 60


@pytest.mark.slow
def test_two_launched_processes_write_one_file(translator, folder, source, repository):
    output = source.with_name("out")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += [*TRANSLATE[1:], "--model", str(folder), "--input", str(source), "--output", str(output)]
    command += ["--batch_size", "1", "--num_beams", "1", "--max_new_tokens", "4", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    assert subprocess.run(command, env=environment, timeout=300).returncode == 0
    assert output.read_text(encoding="utf-8") == expected(translator)
    assert sorted(os.listdir(source.parent)) == ["out", "source"]
