"""Files are translated in chunks: stopped jobs and shards in any order join to the translation of one run."""

import copy
import functools
import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.corpora.readers import read_rows
from hf_vanilla_transformer.inference import file_translation, text_chunks
from hf_vanilla_transformer.inference.file_translation import (
    BATCHES_PER_CHUNK,
    merge_shards,
    translate_file,
    translated_lines,
)
from hf_vanilla_transformer.inference.fingerprints import translator_fingerprint
from hf_vanilla_transformer.inference.line_warnings import LineWarnings
from hf_vanilla_transformer.inference.text_io import input_lines
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.utils import atomic_write
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, save_model, tiny_model

TRANSLATE = [sys.executable, "-m", "vanilla_transformer_cli", "translate"]
LINES = [f"{i} two hundred and {i}" if i % 7 else "" for i in range(28)]
SETTINGS: dict[str, Any] = {"batch_size": 1, "num_beams": 1, "max_new_tokens": 4}
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


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def translate(translator: Translator, source: Path, output: Path, **settings: Any) -> None:
    translate_file(translator, input_lines(source), output, **SETTINGS | settings)


def expected(translator: Translator, lines: list[str] = LINES, **settings: Any) -> str:
    return _translated(translator, tuple(lines), tuple(settings.items()))


@functools.cache
def _translated(translator: Translator, lines: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> str:
    texts = translator.translate(lines, **SETTINGS | dict(settings))
    return "".join(text.replace("\n", " ") + "\n" for text in texts)


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


def test_errors_name_the_line_of_the_file(folder: Path, source: Path, output: Path, tmp_path: Path) -> None:
    model = tiny_model(
        vocab_size=300, tie_word_embeddings=False, position_encoding_type="learned", max_position_embeddings=64
    )
    translator = Translator(model, Translator.from_pretrained(folder, device="cpu").source_tokenizer)
    source.write_text("\n".join(LINES[:CHUNK] + ["two hundred " * 80]), encoding="utf-8")
    with pytest.raises(UserError, match=f"line {CHUNK + 1}: .* 64"):
        translate(translator, source, output)
    with pytest.raises(UserError, match=f"line {CHUNK + 1}: .* 64"):
        targets = {"targets": iter(LINES[: CHUNK + 1])}
        translate_file(translator, input_lines(source), tmp_path / "scores", codes=targets, batch_size=1)


def test_n_best_numbers_continue_over_chunks(translator: Translator, output: Path) -> None:
    settings = {**SETTINGS, "num_beams": 2, "n_best": 2, "alignment": True}
    translate_file(translator, LINES, output, **settings)
    lines = output.read_text(encoding="utf-8").splitlines()
    assert lines == list(translated_lines(translator, LINES, **settings))
    assert sorted({int(line.split(" ||| ")[0]) for line in lines}) == list(range(len(LINES)))


@pytest.mark.parametrize("change", ["text", "one line", "moved lines", "nothing"])
def test_chunks_of_other_text_are_not_reused(translator: Translator, source: Path, output: Path, change: str) -> None:
    with stopped_after(2 * CHUNK + 1):
        translate(translator, source, output)
    lines = list(LINES)
    if change == "text":
        lines = ["seven"] * len(LINES)
    elif change == "one line":
        lines[CHUNK] = "eight"
    elif change == "moved lines":
        lines = lines[CHUNK:] + lines[:CHUNK]
    translate_file(translator, lines, output, **SETTINGS)
    assert output.read_text(encoding="utf-8") == expected(translator, lines)


def test_missing_codes_of_lines_are_an_error(translator: Translator, output: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        translate_file(translator, LINES, output, codes={"target_lang": iter(["de"] * 5)}, **SETTINGS)
    assert not output.exists()


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
def test_chunks_of_another_model_are_refused(translator: Translator, source: Path, output: Path, change: Any) -> None:
    """Also if the model is in the same folder and has the same name."""
    with stopped_after(CHUNK + 1):
        translate(translator, source, output)
    assert "output" in error_of(translate, change(translator), source, output)
    translate(translator, source, output)
    assert output.read_text(encoding="utf-8") == expected(translator)


def test_fingerprint_survives_the_use_of_the_tokenizer(folder: Path) -> None:
    translator = Translator.from_pretrained(folder, "cpu")
    before = translator_fingerprint(translator)
    translator.source_tokenizer(["one", "two hundred"], padding=True, truncation=True, max_length=3)
    assert translator_fingerprint(translator) == before


def test_moved_model_resumes(translator: Translator, folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert translator_fingerprint(Translator.from_pretrained(moved, "cpu")) == translator_fingerprint(translator)


def test_error_keeps_only_finished_chunks(translator: Translator, source: Path, output: Path) -> None:
    parts = output.with_name(".out.parts")
    source.write_bytes(b"f\xfcr\n")
    assert "UTF-8" in error_of(translate, translator, source, output)
    assert not parts.exists()
    source.write_bytes(b"one\n" * CHUNK + b"f\xfcr\n")
    assert "UTF-8" in error_of(translate, translator, source, output)
    assert len(list(parts.iterdir())) == 2


@pytest.mark.slow
def test_killed_job_resumes(
    translator: Translator, folder: Path, source: Path, output: Path, repository: Path
) -> None:
    many = LINES * 60
    source.write_text("\n".join(many) + "\n", encoding="utf-8")
    command = [*TRANSLATE, "--model", str(folder), "--input", str(source), "--output", str(output)]
    command += ["--batch_size", "1", "--num_beams", "1", "--max_new_tokens", "4", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": f"{repository}:{repository}/scripts"}
    parts = output.with_name(".out.parts")
    for wanted in (2, 9):
        running = subprocess.Popen(command, env=environment)
        while len(list(parts.glob("0*"))) < wanted and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        assert not output.exists()
    assert subprocess.run(command, env=environment, timeout=300).returncode == 0
    assert output.read_text(encoding="utf-8") == expected(translator) * 60


# Shards


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a file of about as many lines as those of an iterator."""
    monkeypatch.setattr(text_chunks, "_BYTES_OF_LINE", 17)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shards", [1, 3, 64])
@pytest.mark.parametrize("is_there", [True, False])
def test_shards_of_a_file_are_one_translation(
    translator: Translator, source: Path, output: Path, shards: int, is_there: bool
) -> None:
    counts: list[int] = []
    for shard in reversed(range(1, shards + 1)):
        translate_file(translator, source, output, shard=(shard, shards), progress=counts.append, **SETTINGS)
    assert sum(counts) == len(LINES) and len(counts) == 4
    if not is_there:
        source.unlink()
    assert merge_shards(output) == 4
    assert output.read_text(encoding="utf-8") == expected(translator)


@pytest.mark.usefixtures("small_chunks")
def test_shards_of_a_file_with_another_batch_size_and_the_whole(
    translator: Translator, source: Path, output: Path
) -> None:
    counts: list[int] = []
    translate_file(translator, source, output, shard=(2, 3), **SETTINGS)
    with pytest.raises(UserError, match="3 of 4 chunks"):
        merge_shards(output)
    translate_file(translator, source, output, progress=counts.append, **SETTINGS | {"batch_size": 2})
    assert len(counts) == 4 and output.read_text(encoding="utf-8") == expected(translator)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("note", ["job.json", "text.json"])
@pytest.mark.parametrize("change", [{}, {"batch_size": 2}, {"max_new_tokens": 3}], ids=str)
def test_shards_that_start_together_are_one_job(
    translator: Translator, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, note: str, change: Any
) -> None:
    rename = atomic_write.rename_to_new

    def rename_later(new: Path, target: Path) -> None:
        if target.name == note:
            monkeypatch.setattr(atomic_write, "rename_to_new", rename)
            translate_file(translator, source, output, shard=(2, 2), **SETTINGS | change)
        rename(new, target)

    monkeypatch.setattr(atomic_write, "rename_to_new", rename_later)
    if "max_new_tokens" in change:
        with pytest.raises(UserError, match="with other settings"):
            translate_file(translator, source, output, shard=(1, 2), **SETTINGS)
        return
    translate_file(translator, source, output, shard=(1, 2), **SETTINGS)
    merge_shards(output)
    assert output.read_text(encoding="utf-8") == expected(translator)


@pytest.mark.usefixtures("small_chunks")
def test_shard_of_an_edited_file_is_refused(translator: Translator, source: Path, output: Path) -> None:
    translate_file(translator, source, output, shard=(1, 2), **SETTINGS)
    text = source.read_bytes()
    source.write_bytes(text.replace(b"9 two", b"9 six"))
    with pytest.raises(UserError, match="other text; delete it"):
        translate_file(translator, source, output, shard=(2, 2), **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_chunks, "_END", 8)  # the edit is not at an end
        source.write_bytes(text)
        (output.with_name(".out.parts") / "text.json").unlink()
        translate_file(translator, source, output, shard=(1, 2), **SETTINGS)
        source.write_bytes(text.replace(b"9 two", b"9 six"))
        translate_file(translator, source, output, shard=(2, 2), **SETTINGS)
    with pytest.raises(UserError, match="of other text, model or settings"):
        merge_shards(output)


@pytest.mark.usefixtures("small_chunks")
def test_shard_of_a_file_names_its_lines(folder: Path, source: Path, output: Path) -> None:
    model = tiny_model(
        vocab_size=300, tie_word_embeddings=False, position_encoding_type="learned", max_position_embeddings=64
    )
    translator = Translator(model, Translator.from_pretrained(folder, device="cpu").source_tokenizer)
    lines = [*LINES, "two hundred " * 80]
    source.write_text("\n".join(lines), encoding="utf-8")
    count = len(text_chunks.TextChunks.of(source, CHUNK))
    with pytest.raises(UserError, match=f"line {len(lines)}: .* 64"):
        for shard in range(1, count + 1):
            translate_file(translator, source, output, shard=(shard, count), **SETTINGS)
    of_chunk, together = LineWarnings(), LineWarnings()
    of_chunk.add_fault("fault", 2, "?")
    together.add(of_chunk, lambda: 10)
    assert together.warnings() == ["fault, such as '?' (line 12)"]


@pytest.mark.parametrize("shards", [1, 3, 64])
def test_shards_in_any_order_are_one_translation(translator: Translator, source: Path, shards: int) -> None:
    output, order = source.with_name("out.gz"), list(range(1, shards + 1))
    random.Random(shards).shuffle(order)
    assert "output" in error_of(merge_shards, output)
    for shard in order:
        counts: list[int] = []
        translate(translator, source, output, shard=(shard, shards), progress=counts.append)
        assert abs(sum(counts) - len(LINES) / shards) < CHUNK
    merge_shards(output)
    assert gzip.decompress(output.read_bytes()).decode() == expected(translator)
    assert sorted(path.name for path in source.parent.iterdir()) == ["out.gz", "source"]


def test_killed_shard_is_repeated_or_left_to_the_whole(
    translator: Translator, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate(translator, source, output, shard=(2, 2))
    with stopped_after(1):
        translate(translator, source, output, shard=(1, 2))
    assert "2 of 4" in error_of(merge_shards, output)
    original, translated = Translator.translate, []

    def recorded(self: Translator, lines: list[str], **settings: Any) -> Any:
        translated.extend(lines)
        return original(self, lines, **settings)

    monkeypatch.setattr(Translator, "translate", recorded)
    translate(translator, source, output)
    assert translated == LINES[:CHUNK] + LINES[2 * CHUNK : 3 * CHUNK], "the finished shard is not translated again"
    assert output.read_text(encoding="utf-8") == expected(translator)


@pytest.mark.slow
def test_many_shards_with_killed_ones_and_one_of_another_model(translator: Translator, tmp_path: Path) -> None:
    """64 shards in random order, three killed and repeated, one copied from a run of another model."""
    lines, rng = [f"{i} two hundred and {i}" for i in range(64 * 8 + 3)], random.Random(3)
    settings = SETTINGS | {"max_new_tokens": 2}
    shards, output, elsewhere = list(range(1, 65)), tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    rng.shuffle(shards)
    for shard in shards[:3]:
        with stopped_after(1):
            translate_file(translator, lines, output, shard=(shard, 64), **settings)
    for shard in rng.sample(shards[1:], 63):
        translate_file(translator, lines, output, shard=(shard, 64), **settings)
    other = Translator(copy.deepcopy(translator.model), translator.source_tokenizer)
    other.model.lm_head.weight.data.neg_()
    with pytest.raises(UserError, match="different model"):
        translate_file(other, lines, output, shard=(shards[0], 64), **settings)
    translate_file(other, lines, elsewhere / "out", shard=(shards[0], 64), **settings)
    foreign = [shutil.copy(part, tmp_path / ".out.parts") for part in (elsewhere / ".out.parts").glob("0*")]
    assert "missing" in error_of(merge_shards, output)
    translate_file(translator, lines, output, shard=(shards[0], 64), **settings)
    assert "other text, model or settings" in error_of(merge_shards, output)
    for part in foreign:
        os.remove(part)
    merge_shards(output)
    assert output.read_text(encoding="utf-8") == expected(translator, lines, **settings)


@pytest.mark.parametrize("change", ["text", "settings", "batch_size"])
@pytest.mark.parametrize("copied", [False, True])
def test_foreign_shard_is_refused(
    translator: Translator, source: Path, output: Path, tmp_path: Path, change: str, copied: bool
) -> None:
    """In the same folder it is refused at once, copied from a different machine it is refused by `merge_shards`."""
    translate(translator, source, output, shard=(1, 2))
    settings: dict[str, Any] = {"text": {}, "settings": {"max_new_tokens": 3}, "batch_size": {"batch_size": 2}}[change]
    if change == "text":
        source.write_text("seven\n" * 28, encoding="utf-8")
    if copied:
        (tmp_path / "elsewhere").mkdir()
        translate(translator, source, tmp_path / "elsewhere" / "out", shard=(2, 2), **settings)
        for part in (tmp_path / "elsewhere" / ".out.parts").glob("0*"):
            shutil.copy(part, tmp_path / ".out.parts")
    else:
        with pytest.raises(UserError, match="output"):
            translate(translator, source, output, shard=(2, 2), **settings)
    assert "output" in error_of(merge_shards, output)
    assert not output.exists()


def test_shards_by_command(translator: Translator, folder: Path, source: Path, output: Path, command: Any) -> None:
    flags = ["--model", folder, "--input", source, "--output", output]
    flags += ["--batch_size", 1, "--max_new_tokens", 4, "--num_beams", 1, "--device", "cpu"]
    for shard in ("2/2", "1/2"):
        status, _, errors = command("translate", *flags, "--shard", shard)
        assert status == 0, errors
    assert command("merge", "--output", output)[0] == 0
    assert output.read_text(encoding="utf-8") == expected(translator)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2"):
        status, _, errors = command("translate", *flags, f"--shard={wrong}")
        assert status == 2 and wrong in errors


def test_scores_of_a_file_are_shared_and_resumed(
    folder: Path, source: Path, output: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = source.with_name("targets")
    targets.write_text("\n".join(reversed(LINES)) + "\n", encoding="utf-8")
    call = [
        "translate",
        "--model",
        folder,
        "--input",
        source,
        "--score",
        targets,
        "--batch_size",
        1,
        "--device",
        "cpu",
    ]
    status, printed, errors = command(*call)
    assert (status, errors, printed.count("\n")) == (0, "", len(LINES))
    assert command(*call, "--output", output, "--shard", "2/3")[0] == 0
    assert "chunks of" in command("merge", "--output", output)[2]
    original, scored = file_translation.score_translations_of, []

    def recorded(translator: Translator, pairs: Iterator[tuple[str, str]], **settings: Any) -> Any:
        scored.extend(chunk := list(pairs))
        return original(translator, chunk, **settings)

    monkeypatch.setattr(file_translation, "score_translations_of", recorded)
    assert command(*call, "--output", output, "--shard", "1/3")[0] == 0
    pairs = list(zip(LINES, reversed(LINES), strict=True))
    assert scored == pairs[:CHUNK] + pairs[3 * CHUNK :]
    assert "different model or with other settings" in command(*call[:5], "--output", output)[2]
    assert command(*call, "--output", output)[0] == 0
    assert scored[len(LINES) - 2 * CHUNK :] == pairs[2 * CHUNK : 3 * CHUNK], "no chunk is scored twice"
    assert output.read_text(encoding="utf-8") == printed
    assert "score: " in command(*call, "--output", output.with_name("out.jsonl"))[2]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_tables_have_a_row_for_each_line(translator: Translator, source: Path, suffix: str) -> None:
    output = source.with_name(f"out.{suffix}")
    for shard in (2, 1):
        translate(translator, source, output, shard=(shard, 2))
    merge_shards(output)
    rows = [(row["line"], row["source"], row["translation"]) for _, row in read_rows(output, {})]
    assert rows == list(zip(range(1, len(LINES) + 1), LINES, expected(translator).split("\n"), strict=False))
    assert error_of(translate, translator, source, output, alignment=True).startswith("alignment: ")
    translate_file(translator, [], output, **SETTINGS)
    assert [row for _, row in read_rows(output, {})] == []
