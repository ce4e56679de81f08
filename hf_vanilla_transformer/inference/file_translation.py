"""Translate a file that is large: in parts, by several processes, and again after whatever stopped it.

The input is cut into chunks of lines. Each becomes a file of its own, written beside and renamed, in a folder next to
the output; when all are there they become the output, in their order. So a chunk is either whole or absent: what was
killed goes on with the chunks that are missing, with as many processes as there are then.
"""

import gzip
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..atomic_write import atomic_file
from ..errors import UserError
from .text_io import read_lines
from .translator import MAX_TOKENS, Translator, translated_lines, with_prefixes

BATCHES_PER_CHUNK = 8


class Processes(Protocol):
    """What is needed of `accelerate.PartialState`."""

    process_index: int
    num_processes: int

    def wait_for_everyone(self) -> None: ...


def translate_file(
    translator: Translator,
    source: str | Path | None,
    output: str | Path,
    processes: Processes,
    *,
    prefixes: str | Path | None = None,
    batch_size: int = 64,
    max_tokens_per_batch: int = MAX_TOKENS,
    progress: Any = None,
    **settings: Any,
) -> int:
    """Translate a file into another.

    Args:
        translator: of this process.
        source: text, `.gz` too; None is standard input. Every process reads all of it and translates its share.
        output: the lines of `translated_lines`; packed if its name ends in `.gz`. It appears when it is whole.
        processes: this one's number, and how many there are.
        prefixes: a file with what each translation must begin with, as many lines as the source has.
        batch_size, max_tokens_per_batch, settings: those of `translated_lines`. A job that goes on may have another
            `max_tokens_per_batch`, because the memory may have been too small for the last one.
        progress: called with the number of lines of each chunk that is done, and the seconds it took; 0 seconds for
            one that an earlier run left.

    Returns:
        The number of lines of the source.

    Raises:
        UserError: another job has left its parts beside this output, or what `Translator.translate` raises.
    """
    limits: dict[str, Any] = {"batch_size": batch_size, "max_tokens_per_batch": max_tokens_per_batch}
    translated_lines(translator, [], **limits, **settings)  # refuses what is wrong before anything is read
    target = Path(output).resolve()
    parts = target.with_name(f".{target.name}.parts")
    size = batch_size * BATCHES_PER_CHUNK
    if processes.process_index == 0:
        _claim(parts, {"source": str(source), "size": size, **_identity(translator, prefixes), **settings})
    processes.wait_for_everyone()
    settings |= limits
    pairs, lines = with_prefixes(read_lines(source), None if prefixes is None else read_lines(prefixes)), 0
    try:
        for number, chunk in enumerate(_chunks(pairs, size)):
            if number % processes.num_processes == processes.process_index:
                start, part = time.perf_counter(), parts / f"{number:09d}"
                if not (old := part.exists()):
                    _write(part, _translated(translator, chunk, lines + 1, prefixes is not None, settings))
                if progress is not None:
                    progress(len(chunk), 0.0 if old else time.perf_counter() - start)
            lines += len(chunk)
    except UserError:
        if not _finished(parts):  # nothing is lost
            shutil.rmtree(parts, ignore_errors=True)
        raise
    processes.wait_for_everyone()
    if processes.process_index == 0:
        _join(parts, target)
    processes.wait_for_everyone()
    return lines


def _chunks(pairs: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    while chunk := list(islice(pairs, size)):
        yield chunk


def _translated(
    translator: Translator, chunk: list[tuple[str, str]], first_line: int, forced: bool, settings: dict[str, Any]
) -> Iterator[str]:
    sentences, prefixes = map(list, zip(*chunk, strict=True))
    return translated_lines(
        translator, sentences, first_line=first_line, prefixes=prefixes if forced else None, **settings
    )


def _identity(translator: Translator, prefixes: str | Path | None) -> dict[str, Any]:
    """What else must be the same when a job goes on."""
    names = [str(model.config.name_or_path) for model in translator.models]
    identity: dict[str, Any] = {"model": names[0] if len(names) == 1 else names}
    return identity if prefixes is None else identity | {"prefixes": str(prefixes)}


def _claim(parts: Path, job: dict[str, Any]) -> None:
    """Make the folder of the parts, or see that it is this job's."""
    note = parts / "job.json"
    wanted = json.dumps(job, default=str, sort_keys=True)
    if note.exists():
        if note.read_text(encoding="utf-8") != wanted:
            raise UserError(f"{parts} holds parts of another translation; delete it, or name another output")
        return
    parts.mkdir(exist_ok=True)
    _write(note, [wanted], end="")


def _write(path: Path, lines: Iterable[str], end: str = "\n") -> None:
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(line + end)


def _finished(parts: Path) -> list[Path]:
    return sorted(path for path in parts.glob("*") if path.name.isdigit())


def _join(parts: Path, target: Path) -> None:
    opened = gzip.open if target.suffix == ".gz" else open
    with atomic_file(target) as temporary, opened(temporary, "wb") as stream:
        for part in _finished(parts):
            with open(part, "rb") as file:
                shutil.copyfileobj(file, stream)
    shutil.rmtree(parts)
