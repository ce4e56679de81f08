"""Translations as lines of text, and resumable translation of a large file by several processes.

The input is cut into chunks of lines. The translation of each chunk is written atomically to a file in a folder next
to the output. In the end these files are concatenated. A killed job resumes with the missing chunks, with any number
of processes. A shard is a job that translates every N-th chunk, on any machine. The name of a chunk's file contains a
digest of its lines, the model and the settings, so that a different translation is never reused.
"""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from ..data.readers import file_format
from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError, check_at_least_one
from ..utils.normalization import Normalizer
from .batching import MAX_TOKENS, with_prefixes
from .candidates import FORMATS, candidate_lines, translate_candidates
from .fingerprints import text_fingerprint, translator_fingerprint
from .ray_workers import RayPool
from .text_io import TABLES, line_writer, on_one_line, open_to_write, read_lines, row_writer
from .translator import Hypothesis, Translator
from .unknown import UnknownSymbols

BATCHES_PER_CHUNK = 8

_JOB = "job.json"  # model and settings of the chunks
_ORDER = "chunks.json"  # names of all chunks, written at the end of each shard
_FIELDS = "n_best", "alignment", "probabilities"  # of plain text only
_NO_ROW = {"line": 0, "source": "", "translation": ""}  # the columns of a table without rows
_OTHER_JOB = (
    "an output of a different model or with other settings; delete it, or name a new output"
)

#: Translates paragraphs, given the translator, the lines, `first_line` and the settings of a search.
#: Its `repr` is part of the identity of a job. Worker processes get a copy of it.
ParagraphTranslator = Callable[..., Iterator[str]]


def translated_lines(
    translator: Translator,
    sentences: Iterable[str],
    *,
    n_best: int | None = None,
    alignment: bool = False,
    probabilities: bool = False,
    paragraphs: ParagraphTranslator | None = None,
    first_line: int = 1,
    n_best_format: str = "moses",
    normalize: Normalizer | None = None,
    spellings: int = 1,
    one_line: bool = True,
    **settings: Any,
) -> Iterator[str]:
    """Translate into lines of text, by default in the format of Moses, Marian and fairseq.

    Args:
        n_best: None gives one line per sentence: the translation, then " ||| " and its alignment if asked for. A
            number gives one line per hypothesis: `i ||| text ||| score`, or `i ||| text ||| score ||| alignment`,
            where i counts the sentences from 0. Of hypotheses with the same text, only the best is written.
        n_best_format: of n-best lists, one of `candidates.FORMATS`. "tsv" and "jsonl" have candidates with
            probabilities, see `candidates.candidate_lines`.
        normalize, spellings: of these candidates, see `candidates.translate_candidates`.
        probabilities: adds " ||| " and each token with its probability, as in `Ġhouse:0.9876 </s>:0.9912`.
        paragraphs: translates lines that are paragraphs, such as `documents.documents.Paragraphs`. None takes each
            line as one sentence.
        one_line: whether a line break in a translation becomes a space.
        others: as in `Translator.translate_nbest`.

    Raises:
        UserError: what that raises, and as early; `n_best` with greedy search, which has no scores; `paragraphs` with
            what belongs to a sentence.
    """
    if paragraphs is not None:
        if n_best is not None or alignment or probabilities or settings.get("prefixes") is not None:
            raise UserError(
                "paragraphs: n_best, alignment, probabilities and prefixes belong to single sentences"
            )
        settings.pop("prefixes", None)
        return paragraphs(translator, sentences, first_line=first_line, **settings)
    _check_n_best_format(n_best_format, n_best, normalize, spellings, alignment or probabilities)
    beams = settings.get("num_beams") or translator.model.generation_config.num_beams or 1
    if n_best is not None and beams == 1 and not settings.get("do_sample"):
        raise UserError("n_best: greedy search gives no scores; num_beams must be at least 2")
    if n_best is not None and n_best_format != "moses":
        found = translate_candidates(
            translator,
            sentences,
            n_best,
            normalize=normalize,
            spellings=spellings,
            first_line=first_line,
            **settings,
        )
        first_input = (first_line - 1) // spellings + 1
        return (
            line
            for number, candidates in enumerate(found, start=first_input)
            for line in candidate_lines(candidates, number, n_best_format)
        )
    if n_best is None and not alignment and not probabilities:
        texts = translator.translate(sentences, first_line=first_line, **settings)
        return map(on_one_line, texts) if one_line else texts
    settings |= {"alignment": alignment, "probabilities": probabilities, "first_line": first_line}
    results = translator.translate_nbest(sentences, n_best or 1, **settings)
    return (
        _line(None if n_best is None else number, one)
        for number, hypotheses in enumerate(results, start=first_line - 1)
        for one in _distinct(hypotheses)
    )


def _check_n_best_format(
    n_best_format: str,
    n_best: int | None,
    normalize: Normalizer | None,
    spellings: int,
    more_fields: bool,
) -> None:
    check_at_least_one(spellings=spellings)
    if n_best_format not in FORMATS:
        raise UserError(
            f"n_best_format: {n_best_format!r} is unknown; choose from {', '.join(FORMATS)}"
        )
    if n_best_format == "moses":
        if normalize is not None or spellings > 1:
            name = "spellings" if normalize is None else "normalize"
            raise UserError(f"{name}: it merges n-best lists; choose the format tsv or jsonl")
        return
    if n_best is None:
        raise UserError(f"n_best_format: {n_best_format} is for n-best lists; give n_best")
    if more_fields:
        raise UserError(
            f"n_best_format: {n_best_format} has neither alignment nor probabilities of tokens"
        )


def _distinct(hypotheses: list[Hypothesis]) -> Iterable[Hypothesis]:
    best: dict[str, Hypothesis] = {}
    for one in hypotheses:
        best.setdefault(one.text, one)
    return best.values()


def _line(number: int | None, one: Hypothesis) -> str:
    score = "" if one.score is None else f"{one.score:.4f}"
    fields = [on_one_line(one.text)]
    if number is not None:
        fields = [str(number), *fields, score]
    if one.alignment is not None:
        fields.append(one.pharaoh)
    if one.tokens is not None and one.probabilities is not None:
        pairs = zip(one.tokens, one.probabilities, strict=True)
        fields.append(" ".join(f"{token}:{probability:.4f}" for token, probability in pairs))
    return " ||| ".join(fields)


def translate_file(
    translator: Translator,
    source: str | Path | None | Iterable[str],
    output: str | Path,
    processes: Any,
    *,
    column: str = "translation",
    prefixes: str | Path | None = None,
    codes: Mapping[str, Iterator[str | None]] | None = None,
    batch_size: int = 64,
    max_tokens_per_batch: int = MAX_TOKENS,
    progress: Any = None,
    shard: tuple[int, int] | None = None,
    pool: RayPool | None = None,
    **settings: Any,
) -> int:
    """Translate a file, and return its number of lines.

    Args:
        source: sentences, or a file of text, `.gz` too. None is standard input. Every process reads all of it and
            translates its share.
        output: gets the lines of `translated_lines`, compressed if its name ends in `.gz`, when they are complete.
            A `.jsonl` or `.parquet` file gets rows of `line` (from 1), `source` and the `column`.
        processes: `accelerate.PartialState()`, each with its `translator`.
        column: the name of the translations in a table.
        prefixes: a file with as many target prefixes as the source has lines.
        codes: the languages of each line, `source_lang` and `target_lang`, for a model of many.
        batch_size, max_tokens_per_batch, settings: as in `translated_lines`. The limits may change on a resume.
        progress: called with the lines of each finished chunk and the seconds it took, 0 if an earlier run did it.
        shard: (i, N) translates chunks i, i + N, … from 1 only, and leaves their files to `merge_shards` or to a call
            without it. Shards may run at any time in any order.
        pool: translates the chunks with the same model as `translator`. This process reads and writes.

    Raises:
        UserError: chunks of a different job are next to this output, or as in `Translator.translate`.
    """
    number_of_shard, shards = shard or (1, 1)
    share = number_of_shard - 1 + shards * processes.process_index
    shares = shards * processes.num_processes
    parts = _parts_of(output)
    _check_columns(settings, Path(output))
    is_table = file_format(Path(output)) in TABLES and not settings.get("n_best")
    fingerprint = translator_fingerprint(translator)
    job = {"translator": fingerprint} | settings
    if is_table:
        job["table"] = column
    settings |= {"batch_size": batch_size, "max_tokens_per_batch": max_tokens_per_batch}
    translated_lines(translator, [], **settings)  # checks the arguments before anything is read
    if processes.process_index == 0:
        claim(parts / _JOB, job, f"output: {parts} contains parts of {_OTHER_JOB}")
    processes.wait_for_everyone()
    text: Any = read_lines(source) if source is None or isinstance(source, str | Path) else source
    pairs = with_prefixes(text, None if prefixes is None else read_lines(prefixes))
    codes = codes or {}
    rows_of_file = zip(pairs, *codes.values(), strict=False)
    column_of_table = column if is_table else None
    translate = partial(_translate_chunk, column=column_of_table, names=list(codes), **settings)
    run: Any = partial(map, partial(translate, translator))
    if pool is not None:
        run = partial(pool.map, translate, fingerprint=fingerprint)
    progress = progress or (lambda lines, seconds: None)
    spellings = settings.get("spellings", 1)
    inputs_per_chunk = -(-batch_size * BATCHES_PER_CHUNK // spellings)  # a chunk has whole inputs
    chunks = iter(lambda: list(islice(rows_of_file, inputs_per_chunk * spellings)), [])
    try:
        written, lines = _write_chunks(chunks, parts, _text(job), (share, shares), run, progress)
    except UserError:
        has_chunks = any(path.name != _JOB for path in parts.glob("*"))
        if shard is None and not has_chunks:
            shutil.rmtree(parts, ignore_errors=True)
        raise
    processes.wait_for_everyone()
    if processes.process_index == 0:
        if shard is None:
            _join(written, Path(output))
        else:
            refusal = f"output: {parts} contains shards of other text or another batch_size"
            claim(parts / _ORDER, [part.name for part in written], refusal)
    processes.wait_for_everyone()
    return lines


def _check_columns(settings: Mapping[str, Any], output: Path) -> None:
    """Refuse settings with a result for which a table has no column."""
    suffix = file_format(output)
    if suffix not in TABLES or suffix == f".{settings.get('n_best_format')}":
        return
    for name in _FIELDS:
        if settings.get(name):
            raise UserError(f"{name}: {output} has no column for it; name an output of plain text")


def _write_chunks(
    chunks: Iterator[list[Any]],
    parts: Path,
    job: str,
    turn: tuple[int, int],
    run: Any,
    progress: Any,
) -> tuple[list[Path], int]:
    """Translate the missing chunks of a turn (i, N), and return the files and the number of lines of all chunks."""
    lines = 0
    written = list[Path]()
    unknown = UnknownSymbols()

    def missing() -> Iterator[_Chunk]:
        nonlocal lines
        for number, rows in enumerate(chunks):
            written.append(parts / f"{number:09d}-{text_fingerprint([job, lines, *rows])}")
            if number % turn[1] == turn[0]:
                if not written[-1].exists():
                    yield _Chunk(written[-1], lines + 1, rows)
                else:
                    progress(len(rows), 0.0)
            lines += len(rows)

    try:
        for chunk, translations, seconds, unknown_of_chunk in run(missing()):
            with line_writer(chunk.part) as write:
                for line in translations:
                    write(line)
            progress(len(chunk.rows), seconds)
            unknown.add(unknown_of_chunk)
    finally:  # one warning for all chunks
        unknown.warn()
    return written, lines


class _Chunk(NamedTuple):
    part: Path
    first_line: int
    rows: list[tuple[Any, ...]]  # sentences with prefixes, and the codes of their languages


def _translate_chunk(
    translator: Translator,
    chunk: _Chunk,
    *,
    column: str | None,
    names: list[str],
    **settings: Any,
) -> tuple[_Chunk, list[str], float, UnknownSymbols]:
    """The chunk, its lines of output, the seconds that they took, and its unknown symbols."""
    start = time.perf_counter()
    translator = copy.copy(translator)
    translator.unknown_symbols = UnknownSymbols()
    pairs, *codes = map(list, zip(*chunk.rows, strict=True))
    sentences, prefixes = map(list, zip(*pairs, strict=True))
    settings |= dict(zip(names, codes, strict=True))
    settings |= {"prefixes": prefixes if any(prefixes) else None, "first_line": chunk.first_line}
    lines = translated_lines(translator, sentences, one_line=column is None, **settings)
    if column is not None:
        pairs_of_text = zip(sentences, lines, strict=True)
        rows = (
            {"line": line, "source": source, column: translation}
            for line, (source, translation) in enumerate(pairs_of_text, start=chunk.first_line)
        )
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    written = list(lines)
    return chunk, written, time.perf_counter() - start, translator.unknown_symbols


def merge_shards(output: str | Path) -> int:
    """Join the chunks of finished shards to the `output` that they name, and return the number of chunks.

    Raises:
        UserError: no shard has finished, a chunk is missing, or a file there is of other text, model or settings.
    """
    parts = _parts_of(output)
    if not (parts / _ORDER).is_file():
        raise UserError(f"output: no shard of {output} has finished: there is no {parts / _ORDER}")
    names = json.loads((parts / _ORDER).read_text(encoding="utf-8"))
    files = {path.name for path in parts.iterdir() if not path.name.startswith(".")}
    present = files - {_JOB, _ORDER}
    missing = [name for name in names if name not in present]
    foreign = sorted(present - set(names))
    if missing:
        also = ""
        if foreign:
            also = f" ({len(foreign)} files there are of other text, model or settings)"
        raise UserError(
            f"output: {len(missing)} of {len(names)} chunks of {output} are missing{also}, the first is number "
            f"{names.index(missing[0]) + 1}; finish its shard, or run without a shard"
        )
    if foreign:
        raise UserError(
            f"output: {parts / foreign[0]} is of other text, model or settings; move it elsewhere"
        )
    _join([parts / name for name in names], Path(output))
    return len(names)


def _parts_of(output: str | Path) -> Path:
    target = Path(output).resolve()
    return target.with_name(f".{target.name}.parts")


def _join(parts: list[Path], output: Path) -> None:
    """Concatenate the chunks, then delete their folder."""
    if file_format(output) == ".parquet":
        rows = (json.loads(line) for part in parts for line in read_lines(part))
        first = next(rows, _NO_ROW)
        columns = {name: type(value) for name, value in first.items()}
        with row_writer(output, **columns) as write:
            for row in chain([first], rows) if first is not _NO_ROW else ():
                write(row)
    else:
        with open_to_write(output) as stream:
            for part in parts:
                stream.write(part.read_bytes())
    shutil.rmtree(_parts_of(output))


def claim(note: Path, job: Any, refusal: str) -> None:
    """Record a job in `note`, or raise a UserError, `refusal`, if that has a different one."""
    text = _text(job)
    if not note.exists():
        note.parent.mkdir(exist_ok=True)
        with atomic_file(note) as temporary:
            temporary.write_text(text, encoding="utf-8")
    elif note.read_text(encoding="utf-8") != text:
        raise UserError(refusal)


def _text(job: Any) -> str:
    return json.dumps(job, default=_description, sort_keys=True)


def _description(value: object) -> str:
    """A text for a value that JSON lacks, the same in every process."""
    if isinstance(value, FunctionType):  # its `str` has an address
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
