"""Translate a file that is large: in parts, by several processes, and again after whatever stopped it.

The input is cut into chunks of lines. Each becomes a file of its own, written beside and renamed, in a folder next to
the output; when all are there they become the output, in their order. So a chunk is either whole or absent: what was
killed goes on with the chunks that are missing, with as many processes as there are then.
"""

import gzip
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError
from .text_lines import read_lines
from .translating import Translator

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
    batch_size: int = 64,
    progress: Any = None,
    **settings: Any,
) -> int:
    """Translate a file into another.

    Args:
        translator: of this process.
        source: text, `.gz` too; None is standard input. Every process reads all of it and translates its share.
        output: as many lines in the same order; packed if its name ends in `.gz`. It appears when it is whole.
        processes: this one's number, and how many there are.
        batch_size, settings: those of `Translator.translate`.
        progress: called with the number of lines of each chunk that is done, and the seconds it took; 0 seconds for
            one that an earlier run left.

    Returns:
        The number of lines.

    Raises:
        UserError: another job has left its parts beside this output, or what `Translator.translate` raises.
    """
    if batch_size < 1:
        raise UserError(f"batch_size: must be at least 1, not {batch_size}")
    target = Path(output).resolve()
    parts = target.with_name(f".{target.name}.parts")
    size = batch_size * BATCHES_PER_CHUNK
    if processes.process_index == 0:
        _claim(parts, {"source": str(source), "size": size, "model": _model(translator), **settings})
    processes.wait_for_everyone()
    lines = 0
    try:
        for number, chunk in enumerate(_chunks(read_lines(source), size)):
            lines += len(chunk)
            if number % processes.num_processes == processes.process_index:
                start, part = time.perf_counter(), parts / f"{number:09d}"
                if not (old := part.exists()):
                    _write(part, translator.translate(chunk, batch_size=batch_size, **settings))
                if progress is not None:
                    progress(len(chunk), 0.0 if old else time.perf_counter() - start)
    except UserError:
        if not _finished(parts):  # nothing is lost
            shutil.rmtree(parts, ignore_errors=True)
        raise
    processes.wait_for_everyone()
    if processes.process_index == 0:
        _join(parts, target)
    processes.wait_for_everyone()
    return lines


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while chunk := list(islice(lines, size)):
        yield chunk


def _model(translator: Translator) -> str:
    return str(translator.model.config.name_or_path)


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
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            # a model can make any character, but a line has to stay one line
            file.write(line.replace("\n", " ") + end)
    os.replace(beside, path)


def _finished(parts: Path) -> list[Path]:
    return sorted(path for path in parts.glob("*") if path.name.isdigit())


def _join(parts: Path, target: Path) -> None:
    beside = parts / "whole"
    with gzip.open(beside, "wb") if target.suffix == ".gz" else open(beside, "wb") as stream:
        for part in _finished(parts):
            with open(part, "rb") as file:
                shutil.copyfileobj(file, stream)
    os.replace(beside, target)
    shutil.rmtree(parts)
