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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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

LINES = [f"{i} two hundred and {i}" if i % 7 else "" for i in range(28)]
SETTINGS: dict[str, Any] = {"batch_size": 1, "num_beams": 1, "max_new_tokens": 4}
CHUNK = SETTINGS["batch_size"] * BATCHES_PER_CHUNK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("model"),
        LINES,
        vocab_size=300,
        tie_word_embeddings=False,
    )


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


def translate(
    translator: Translator,
    source: Any,
    output: Path,
    **settings: Any,
) -> None:
    """Translate a file, or the lines of one."""
    translate_file(translator, source, output, **SETTINGS | settings)


def expected(translator: Translator, lines: list[str] = LINES) -> str:
    return _translated(translator, tuple(lines))


@functools.cache
def _translated(translator: Translator, lines: tuple[str, ...]) -> str:
    texts = translator.translate(lines, **SETTINGS)
    return "".join(text.replace("\n", " ") + "\n" for text in texts)


def assert_translated(
    translator: Translator,
    output: Path,
    lines: list[str] = LINES,
) -> None:
    """As in one run that nothing stops."""
    assert output.read_text(encoding="utf-8") == expected(translator, lines)


@pytest.fixture
def short_translator(translator: Translator) -> Translator:
    """It knows 64 positions."""
    model = tiny_model(
        vocab_size=300,
        tie_word_embeddings=False,
        position_encoding_type="learned",
        max_position_embeddings=64,
    )
    return Translator(model, translator.source_tokenizer)


LONG_LINE = "two hundred " * 80


@contextmanager
def stopped_after(sentences: int) -> Iterator[None]:
    """Interrupt the translation within the block after a number of sentences."""
    original = Translator.translate
    done = []

    def stopped(
        self: Translator,
        lines: list[str],
        **settings: Any,
    ) -> Any:
        for line in original(self, lines, **settings):
            if len(done) == sentences:
                raise KeyboardInterrupt
            done.append(line)
            yield line

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Translator, "translate", stopped)
        yield


def test_errors_name_the_line_of_the_file(
    short_translator: Translator,
    output: Path,
    tmp_path: Path,
) -> None:
    lines = [*LINES[:CHUNK], LONG_LINE]
    with pytest.raises(UserError, match=f"line {CHUNK + 1}: .* 64"):
        translate(short_translator, lines, output)
    targets = iter(LINES[: CHUNK + 1])
    with pytest.raises(UserError, match=f"line {CHUNK + 1}: .* 64"):
        translate_file(
            short_translator,
            lines,
            tmp_path / "scores",
            codes={"targets": targets},
            batch_size=1,
        )


def test_n_best_numbers_continue_over_chunks(translator: Translator, output: Path) -> None:
    settings = SETTINGS | {"num_beams": 2, "n_best": 2, "alignment": True}
    translate(translator, LINES, output, **settings)
    lines = output.read_text(encoding="utf-8").splitlines()
    assert lines == list(translated_lines(translator, LINES, **settings))
    assert sorted({int(line.split(" ||| ")[0]) for line in lines}) == list(range(len(LINES)))


@pytest.mark.parametrize(
    "lines",
    [
        ["seven"] * len(LINES),
        [*LINES[:CHUNK], "eight", *LINES[CHUNK + 1 :]],
        LINES[CHUNK:] + LINES[:CHUNK],
        LINES,
    ],
    ids=["text", "one line", "moved lines", "nothing"],
)
def test_chunks_of_other_text_are_not_reused(
    translator: Translator,
    output: Path,
    lines: list[str],
) -> None:
    with stopped_after(2 * CHUNK + 1):
        translate(translator, LINES, output)
    translate(translator, lines, output)
    assert_translated(translator, output, lines)


def test_missing_codes_of_lines_are_an_error(translator: Translator, output: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        translate(translator, LINES, output, codes={"target_lang": iter(["de"] * 5)})
    assert not output.exists()


def changed(translator: Translator, change: Callable[[Any], Any]) -> Translator:
    """With a copy of the model."""
    model = copy.deepcopy(translator.model)
    change(model)
    return Translator(model, translator.source_tokenizer)


def changed_weight(translator: Translator) -> Translator:
    return changed(translator, lambda model: model.lm_head.weight.data[5, 0].add_(1e-3))


def other_dtype(translator: Translator) -> Translator:
    return changed(translator, lambda model: model.bfloat16())


def other_search(translator: Translator) -> Translator:
    return changed(translator, lambda model: model.generation_config.update(num_beams=3))


def other_tokenizer(translator: Translator) -> Translator:
    return Translator(translator.model, train_tokenizer(["other text"] * 3, 280))


def second_model(translator: Translator) -> Translator:
    return Translator(
        translator.model, translator.source_tokenizer, ensemble=[changed_weight(translator).model]
    )


@pytest.mark.parametrize(
    "change", [changed_weight, other_dtype, other_search, other_tokenizer, second_model]
)
def test_chunks_of_another_model_are_refused(
    translator: Translator,
    output: Path,
    change: Any,
) -> None:
    """Also if the model is in the same folder and has the same name."""
    with stopped_after(CHUNK + 1):
        translate(translator, LINES, output)
    refusal = error_of(translate, change(translator), LINES, output)
    assert refusal.startswith("output: ")
    assert "different model" in refusal
    translate(translator, LINES, output)
    assert_translated(translator, output)


def test_fingerprint_survives_the_use_of_the_tokenizer(folder: Path) -> None:
    translator = Translator.from_pretrained(folder, "cpu")
    before = translator_fingerprint(translator)
    translator.source_tokenizer(
        ["one", "two hundred"],
        padding=True,
        truncation=True,
        max_length=3,
    )
    assert translator_fingerprint(translator) == before


def test_moved_model_resumes(
    translator: Translator,
    folder: Path,
    tmp_path: Path,
) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert translator_fingerprint(
        Translator.from_pretrained(moved, "cpu")
    ) == translator_fingerprint(translator)


def test_error_keeps_only_finished_chunks(
    translator: Translator,
    source: Path,
    output: Path,
) -> None:
    parts = output.with_name(".out.parts")
    for finished, files in ((0, 0), (CHUNK, 2)):
        source.write_bytes(b"one\n" * finished + b"f\xfcr\n")
        assert "UTF-8" in error_of(translate, translator, input_lines(source), output)
        assert parts.exists() == bool(files)
        assert len(list(parts.glob("*"))) == files


@pytest.mark.slow
def test_killed_job_resumes(
    translator: Translator,
    folder: Path,
    source: Path,
    output: Path,
    repository: Path,
) -> None:
    source.write_text("\n".join(LINES * 60) + "\n", encoding="utf-8")
    arguments = [*FLAGS, "--model", folder, "--input", source, "--output", output]
    command = [sys.executable, "-m", "vanilla_transformer_cli", "translate", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": f"{repository}:{repository}/scripts"}
    parts = output.with_name(".out.parts")
    for wanted in (2, 9):
        running = subprocess.Popen(command, env=environment)
        while len(list(parts.glob("0*"))) < wanted and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        assert not output.exists()
    subprocess.run(
        command,
        env=environment,
        timeout=300,
        check=True,
    )
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
    translator: Translator,
    source: Path,
    output: Path,
    shards: int,
    is_there: bool,
) -> None:
    counts: list[int] = []
    for shard in reversed(range(1, shards + 1)):
        translate(
            translator,
            source,
            output,
            shard=(shard, shards),
            progress=counts.append,
        )
    assert sum(counts) == len(LINES)
    assert len(counts) == 4
    if not is_there:
        source.unlink()
    assert merge_shards(output) == 4
    assert_translated(translator, output)


@pytest.mark.usefixtures("small_chunks")
def test_shards_of_a_file_with_another_batch_size_and_the_whole(
    translator: Translator,
    source: Path,
    output: Path,
) -> None:
    counts: list[int] = []
    translate(translator, source, output, shard=(2, 3))
    with pytest.raises(UserError, match="3 of 4 chunks"):
        merge_shards(output)
    translate(
        translator,
        source,
        output,
        progress=counts.append,
        batch_size=2,
    )
    assert len(counts) == 4
    assert_translated(translator, output)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("note", ["job.json", "text.json"])
@pytest.mark.parametrize("change", [{}, {"batch_size": 2}, {"max_new_tokens": 3}], ids=str)
def test_shards_that_start_together_are_one_job(
    translator: Translator,
    source: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    note: str,
    change: dict[str, int],
) -> None:
    rename = atomic_write.rename_to_new

    def rename_later(new: Path, target: Path) -> None:
        if target.name == note:
            monkeypatch.setattr(atomic_write, "rename_to_new", rename)
            translate(
                translator,
                source,
                output,
                shard=(2, 2),
                **change,
            )
        rename(new, target)

    monkeypatch.setattr(atomic_write, "rename_to_new", rename_later)
    if "max_new_tokens" in change:
        with pytest.raises(UserError, match="with other settings"):
            translate(translator, source, output, shard=(1, 2))
        return
    translate(translator, source, output, shard=(1, 2))
    merge_shards(output)
    assert_translated(translator, output)


@pytest.mark.usefixtures("small_chunks")
def test_shard_of_an_edited_file_is_refused(
    translator: Translator,
    source: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = source.read_bytes()
    edited = text.replace(b"9 two", b"9 six")
    translate(translator, source, output, shard=(1, 2))
    source.write_bytes(edited)
    with pytest.raises(UserError, match="other text; delete it"):
        translate(translator, source, output, shard=(2, 2))
    monkeypatch.setattr(text_chunks, "_END", 8)  # the edit is not at an end
    output.with_name(".out.parts").joinpath("text.json").unlink()
    for shard, content in ((1, text), (2, edited)):
        source.write_bytes(content)
        translate(translator, source, output, shard=(shard, 2))
    with pytest.raises(UserError, match="of other text, model or settings"):
        merge_shards(output)


@pytest.mark.usefixtures("small_chunks")
def test_shard_of_a_file_names_its_lines(
    short_translator: Translator,
    source: Path,
    output: Path,
) -> None:
    lines = [*LINES, LONG_LINE]
    source.write_text("\n".join(lines), encoding="utf-8")
    count = len(text_chunks.TextChunks.of(source, CHUNK))
    with pytest.raises(UserError, match=f"line {len(lines)}: .* 64"):
        for shard in range(1, count + 1):
            translate(short_translator, source, output, shard=(shard, count))


def test_warnings_of_a_chunk_name_the_line_of_the_file() -> None:
    of_chunk = LineWarnings()
    of_chunk.add_fault("fault", 2, "?")
    together = LineWarnings()
    together.add(of_chunk, lambda: 10)
    assert together.warnings() == ["fault, such as '?' (line 12)"]


@pytest.mark.parametrize("shards", [1, 3, 64])
def test_shards_in_any_order_are_one_translation(
    translator: Translator,
    tmp_path: Path,
    shards: int,
) -> None:
    output = tmp_path / "out.gz"
    order = list(range(1, shards + 1))
    random.Random(shards).shuffle(order)
    assert "output" in error_of(merge_shards, output)
    for shard in order:
        counts: list[int] = []
        translate(
            translator,
            LINES,
            output,
            shard=(shard, shards),
            progress=counts.append,
        )
        assert abs(sum(counts) - len(LINES) / shards) < CHUNK
    merge_shards(output)
    assert gzip.decompress(output.read_bytes()).decode() == expected(translator)
    assert list(tmp_path.iterdir()) == [output]


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> list[Any]:
    """What a function of a translator and of items gets."""
    original = getattr(owner, name)
    seen: list[Any] = []

    def record(
        translator: Translator,
        items: Iterable[Any],
        **settings: Any,
    ) -> Any:
        items = list(items)
        seen.extend(items)
        return original(translator, items, **settings)

    monkeypatch.setattr(owner, name, record)
    return seen


def test_killed_shard_is_repeated_or_left_to_the_whole(
    translator: Translator,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    translate(translator, LINES, output, shard=(2, 2))
    with stopped_after(1):
        translate(translator, LINES, output, shard=(1, 2))
    assert "2 of 4" in error_of(merge_shards, output)
    translated = recorded(monkeypatch, Translator, "translate")
    translate(translator, LINES, output)
    assert translated == LINES[:CHUNK] + LINES[2 * CHUNK : 3 * CHUNK], (
        "the finished shard is not translated again"
    )
    assert_translated(translator, output)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (["seven"] * 28, {}),
        (LINES, {"max_new_tokens": 3}),
        (LINES, {"batch_size": 2}),
    ],
    ids=["text", "settings", "batch_size"],
)
def test_foreign_shard_is_refused(
    translator: Translator,
    output: Path,
    tmp_path: Path,
    lines: list[str],
    settings: dict[str, int],
) -> None:
    """In the same folder it is refused at once, copied from a different machine it is refused by `merge_shards`."""
    translate(translator, LINES, output, shard=(1, 2))
    with pytest.raises(UserError, match="output"):
        translate(
            translator,
            lines,
            output,
            shard=(2, 2),
            **settings,
        )
    assert "output" in error_of(merge_shards, output)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    translate(
        translator,
        lines,
        elsewhere / "out",
        shard=(2, 2),
        **settings,
    )
    for part in (elsewhere / ".out.parts").glob("0*"):
        shutil.copy(part, tmp_path / ".out.parts")
    assert "output" in error_of(merge_shards, output)
    assert not output.exists()


# The command

FLAGS = ["--batch_size", 1, "--num_beams", 1, "--max_new_tokens", 4, "--device", "cpu"]


def test_shards_by_command(
    translator: Translator,
    folder: Path,
    source: Path,
    output: Path,
    command: Any,
) -> None:
    call = ["translate", *FLAGS, "--model", folder, "--input", source, "--output", output]
    for shard in ("2/2", "1/2"):
        status, _, errors = command(*call, "--shard", shard)
        assert status == 0, errors
    assert command("merge", "--output", output)[0] == 0
    assert_translated(translator, output)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2"):
        status, _, errors = command(*call, f"--shard={wrong}")
        assert status == 2
        assert wrong in errors


def test_scores_of_a_file_are_shared_and_resumed(
    folder: Path,
    source: Path,
    output: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = source.with_name("targets")
    targets.write_text("\n".join(reversed(LINES)) + "\n", encoding="utf-8")
    translate = ["translate", "--model", folder, "--input", source]
    score = [*translate, "--score", targets, "--batch_size", 1, "--device", "cpu"]
    status, printed, errors = command(*score)
    assert (status, errors, printed.count("\n")) == (0, "", len(LINES))
    assert command(*score, "--output", output, "--shard", "2/3")[0] == 0
    assert "chunks of" in command("merge", "--output", output)[2]
    scored = recorded(monkeypatch, file_translation, "score_translations_of")
    assert command(*score, "--output", output, "--shard", "1/3")[0] == 0
    pairs = list(zip(LINES, reversed(LINES), strict=True))
    assert scored == pairs[:CHUNK] + pairs[3 * CHUNK :]
    assert "different model or with other settings" in command(*translate, "--output", output)[2]
    scored.clear()
    assert command(*score, "--output", output)[0] == 0
    assert scored == pairs[2 * CHUNK : 3 * CHUNK], "no chunk is scored twice"
    assert output.read_text(encoding="utf-8") == printed
    assert "score: " in command(*score, "--output", output.with_name("out.jsonl"))[2]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_tables_have_a_row_for_each_line(
    translator: Translator,
    tmp_path: Path,
    suffix: str,
) -> None:
    output = tmp_path / f"out.{suffix}"
    for shard in (2, 1):
        translate(translator, LINES, output, shard=(shard, 2))
    merge_shards(output)
    translations = expected(translator).splitlines()
    right = [
        {
            "line": number,
            "source": line,
            "translation": translation,
        }
        for number, (line, translation) in enumerate(zip(LINES, translations, strict=True), start=1)
    ]
    assert [row for _, row in read_rows(output, {})] == right
    assert error_of(translate, translator, LINES, output, alignment=True).startswith("alignment: ")
    translate(translator, [], output)
    assert [row for _, row in read_rows(output, {})] == []
