"""Translations as lines of text, and resumable translation of a large file.

The input is cut into chunks of lines. The translation of each chunk is written atomically to a file in a folder next
to the output. In the end these files are concatenated. A killed job resumes with the missing chunks. A shard is a job
that translates every N-th chunk, on any machine. The name of a chunk's file contains a digest of its lines, the model
and the settings, so that a different translation is never reused.

A file of plain text is cut by its bytes where the output has no numbers of lines. A shard then reads its own chunks
alone. Of other input each shard reads all, and hashes it to know the names of all chunks.
"""

import copy
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from ..corpora.readers import file_format
from ..text.token_kinds import has_closed_vocabulary
from ..utils.atomic_write import require_parent, write_first
from ..utils.errors import UserError, check_at_least_one
from ..utils.normalization import Normalizer
from .batching import MAX_TOKENS
from .candidates import FORMATS, candidate_lines, translate_candidates
from .fingerprints import text_fingerprint, translator_fingerprint
from .line_warnings import LineWarnings
from .ray_workers import RayPool
from .scoring import ScoredTranslation, score_translations_of
from .text_chunks import TextChunks
from .text_io import input_lines, line_writer, on_one_line, open_to_write
from .translator import Hypothesis, Translator

BATCHES_PER_CHUNK = 8

_JOB = "job.json"  # model and settings of the chunks
_ORDER = "chunks.json"  # names of all chunks, written at the end of each shard
_TEXT = "text.json"  # or the file whose bytes are cut, and the size of its chunks
_NOTES = {_JOB, _ORDER, _TEXT}
_CHUNKS_OF_A_SIZE = 1000  # of input without a known end. The next ones are twice as large
_TABLES = (".jsonl", ".parquet")
_ROWS_PER_GROUP = 50_000  # of Parquet
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
    paragraphs: ParagraphTranslator | None = None,
    targets: Iterable[str] | None = None,
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
        paragraphs: translates lines that are paragraphs, such as `documents.documents.translate_documents`.
            None takes each line as one sentence.
        targets: existing translations. The lines are their scores: the log-probability of each, a tab, and those of
            its tokens. The only settings are those of `score_translations_of`.
        one_line: whether a line break in a translation becomes a space.
        others: as in `Translator.translate_nbest`.

    Raises:
        UserError: what that raises, and as early; `n_best` with greedy search, which has no scores; `paragraphs` with
            what belongs to a sentence.
    """
    if targets is not None:
        pairs = zip(sentences, targets, strict=True)
        scored = score_translations_of(translator, pairs, first_line=first_line, **settings)
        return map(_score_line, scored)
    if paragraphs is not None:
        if n_best is not None or alignment or settings.get("prefixes") is not None:
            raise UserError("paragraphs: n_best, alignment and prefixes belong to single sentences")
        settings.pop("prefixes", None)
        return paragraphs(translator, sentences, first_line=first_line, **settings)
    check_at_least_one(spellings=spellings)
    if n_best_format not in FORMATS:
        raise UserError(
            f"n_best_format: {n_best_format!r} is unknown; choose from {', '.join(FORMATS)}"
        )
    if n_best_format == "moses" and (normalize is not None or spellings > 1):
        raise UserError("n_best_format: moses: normalize and spellings need tsv or jsonl")
    if n_best_format != "moses" and (n_best is None or alignment):
        raise UserError(f"n_best_format: {n_best_format}: it is for n_best, and has no alignment")
    settings["first_line"] = first_line
    if n_best is None:
        if alignment:
            best = translator.translate_nbest(sentences, alignment=True, **settings)
            return (f"{on_one_line(one.text)} ||| {one.pharaoh}" for one, *_ in best)
        texts = translator.translate(sentences, **settings)
        return map(on_one_line, texts) if one_line else texts
    beams = settings.get("num_beams") or translator.model.generation_config.num_beams or 1
    if beams == 1 and not settings.get("do_sample"):
        raise UserError("n_best: greedy search gives no scores; num_beams must be at least 2")
    if n_best_format == "moses":
        lists = translator.translate_nbest(sentences, n_best, alignment=alignment, **settings)
        numbered = enumerate(lists, start=first_line - 1)
        return (line for number, one in numbered for line in _moses_lines(number, one))
    merged = translate_candidates(
        translator, sentences, n_best, normalize=normalize, spellings=spellings, **settings
    )
    first_input = (first_line - 1) // spellings + 1
    return (
        line
        for number, candidates in enumerate(merged, start=first_input)
        for line in candidate_lines(candidates, number, n_best_format)
    )


def _moses_lines(number: int, hypotheses: Iterable[Hypothesis]) -> Iterator[str]:
    """`i ||| text ||| score`, and an alignment if there is one, of each text."""
    written = set[str]()
    for one in hypotheses:
        if one.text in written:
            continue
        written.add(one.text)
        score = "" if one.score is None else f"{one.score:.4f}"
        line = f"{number} ||| {on_one_line(one.text)} ||| {score}"
        yield line if one.alignment is None else f"{line} ||| {one.pharaoh}"


def _score_line(scored: ScoredTranslation) -> str:
    tokens = " ".join(f"{log_p:.4f}" for log_p in scored.log_probabilities)
    return f"{scored.log_probability:.4f}\t{tokens}"


def translate_file(
    translator: Translator,
    sentences: Iterable[str] | Path,
    output: str | Path,
    *,
    column: str = "translation",
    codes: Mapping[str, Iterator[Any]] | None = None,
    batch_size: int = 64,
    max_tokens_per_batch: int = MAX_TOKENS,
    progress: Callable[[int], object] = lambda lines: None,
    shard: tuple[int, int] | None = None,
    pool: RayPool | None = None,
    **settings: Any,
) -> None:
    """Translate sentences into a file. A killed call resumes.

    Args:
        sentences: sentences, or a file of plain text that is not compressed, so that a shard need not read all of it.
        output: gets the lines of `translated_lines`, compressed if its name ends in `.gz`, when they are complete.
            A `.jsonl` or `.parquet` file gets rows of `line` (from 1), `source`, the `column`, and the list `unknown`:
            the symbols of the source that the model does not know, if its vocabulary is closed.
        column: the name of the translations in a table.
        codes: what `translated_lines` takes for each line: `source_lang` and `target_lang`, the languages for a model
            of many, and `targets`, which are scored.
        batch_size, max_tokens_per_batch, settings: as in `translated_lines`. The limits may change on a resume.
        progress: called with the number of lines of each chunk, also of one that an earlier call finished.
        shard: (i, N) translates chunks i, i + N, … from 1 only, and leaves their files to `merge_shards` or to a call
            without it. Shards may run at any time in any order.
        pool: translates the chunks with the same model as `translator`. This process reads and writes.

    Raises:
        UserError: chunks of a different job are next to this output, or as in `Translator.translate`.
    """
    number_of_shard, shards = shard or (1, 1)
    parts = _parts_of(output)
    codes = codes or {}
    _check_columns(settings, Path(output), scores="targets" in codes)
    is_table = file_format(Path(output)) in _TABLES and not settings.get("n_best")
    fingerprint = translator_fingerprint(translator)
    job = {"translator": fingerprint} | settings
    if "targets" in codes:
        job["score"] = True
    if is_table:
        job["table"] = column
        job["unknown"] = has_closed_vocabulary(translator.source_tokenizer)
    settings |= {"batch_size": batch_size, "max_tokens_per_batch": max_tokens_per_batch}
    translated_lines(translator, [], **settings)  # checks the arguments before anything is read
    claim(parts / _JOB, job, f"output: {parts} contains parts of {_OTHER_JOB}")

    spellings = settings.get("spellings", 1)
    lines_per_chunk = -(-batch_size * BATCHES_PER_CHUNK // spellings) * spellings  # whole inputs
    has_numbers = is_table or settings.get("n_best") or (pool and shard)  # of lines
    text = None
    if isinstance(sentences, Path) and not codes and not has_numbers:
        text = _claimed_text(sentences, lines_per_chunk, parts)
        chunks = _chunks_of_text(text, parts, _text(job), number_of_shard, shards)
    else:
        lines = input_lines(sentences) if isinstance(sentences, Path) else sentences
        rows = zip(lines, *codes.values(), strict=True)
        chunks = _chunks(rows, lines_per_chunk, parts, _text(job))
    names: list[str] = []

    def missing() -> Iterator[_Chunk]:
        for chunk in chunks:
            names.append(chunk.part.name)
            if text is None and len(names) % shards != number_of_shard % shards:
                continue
            if chunk.part.exists():
                progress(len(chunk.rows))
            else:
                yield chunk

    translate = partial(
        _translate_chunk, column=column if is_table else None, codes=list(codes), **settings
    )
    warnings = LineWarnings()
    try:
        results: Iterator[_Result]
        if pool is None:
            results = map(partial(_translate_located, partial(translate, translator)), missing())
        else:
            results = pool.map(translate, missing(), fingerprint)
        for chunk, translations, warnings_of_chunk in results:
            with line_writer(chunk.part) as write:
                for line in translations:
                    write(line)
            progress(len(chunk.rows))
            warnings.add(warnings_of_chunk, chunk.lines_before)
    except UserError:
        has_chunks = any(path.name not in _NOTES for path in parts.glob("*"))
        if shard is None and not has_chunks:
            shutil.rmtree(parts, ignore_errors=True)
        raise
    finally:  # one warning for all chunks
        warnings.warn()
    if shard is None:
        _join(names, output)
    elif text is None:
        refusal = f"output: {parts} contains shards of other text or another batch_size"
        claim(parts / _ORDER, names, refusal)


def _check_columns(settings: Mapping[str, Any], output: Path, scores: bool) -> None:
    """Refuse a table that is not written, and settings with a result for which a table has no column."""
    suffix = file_format(output)
    if suffix in (".csv", ".json"):
        raise UserError(
            f"output: {output}: a table is written as .jsonl or .parquet, lines of text as .txt"
        )
    if suffix not in _TABLES or suffix == f".{settings.get('n_best_format')}":
        return
    values = {**settings, "score": scores}
    for name in ("n_best", "alignment", "score"):
        if values.get(name):
            raise UserError(f"{name}: {output} has no column for it; name an output of plain text")


class _Chunk(NamedTuple):
    part: Path
    first_line: int
    rows: list[tuple[Any, ...]]  # sentences, and the codes of their languages
    lines_before: Callable[[], int] | None = None  # of the input, which `first_line` leaves out


_Result: TypeAlias = tuple[_Chunk, list[str], LineWarnings]


def _chunks(rows: Iterator[tuple[Any, ...]], size: int, parts: Path, job: str) -> Iterator[_Chunk]:
    """Cut rows into chunks, each with the name of its file."""
    first_line = 1
    for number in count():
        chunk = list(islice(rows, size << number // _CHUNKS_OF_A_SIZE))
        if not chunk:
            return
        digest = text_fingerprint([job, first_line, *chunk])
        yield _Chunk(parts / f"{number:09d}-{digest}", first_line, chunk)
        first_line += len(chunk)


def _chunks_of_text(
    text: TextChunks, parts: Path, job: str, number_of_shard: int, shards: int
) -> Iterator[_Chunk]:
    """The chunks of a shard of a file. Of several shards, each counts the lines before them only if it must."""
    first_line = 1
    for number in range(number_of_shard - 1, len(text), shards):
        raw = text.read(number)
        rows = [(line,) for line in text.decode(number, raw)]
        part = parts / _name_in_text(number, raw, job)
        if shards > 1:
            yield _Chunk(part, 1, rows, partial(text.lines_before, number))
        else:
            yield _Chunk(part, first_line, rows)
            first_line += len(rows)


def _name_in_text(number: int, raw: bytes, job: str) -> str:
    return f"{number:09d}-{blake2b(job.encode() + raw, digest_size=8).hexdigest()}"


def _claimed_text(path: Path, lines: int, parts: Path) -> TextChunks:
    """The chunks of a file, of the size that an earlier call chose. Of another file they are refused."""
    text = TextChunks.of(path, lines)
    found = {"path": str(path.resolve()), "total": text.total, "size": text.size}
    found["ends"] = text.ends()
    known = json.loads(write_first(parts / _TEXT, _text(found)))
    if (known["total"], known["ends"]) != (found["total"], found["ends"]):
        raise UserError(
            f"output: {parts} contains parts of an output of other text; delete it, or name a new output"
        )
    return replace(text, size=known["size"])


def _translate_located(translate: Callable[[_Chunk], _Result], chunk: _Chunk) -> _Result:
    """Translate a chunk. An error names the line of the file."""
    try:
        return translate(chunk)
    except UserError:
        if chunk.lines_before is None:
            raise
    return translate(chunk._replace(first_line=chunk.lines_before() + 1))


def _translate_chunk(
    translator: Translator,
    chunk: _Chunk,
    *,
    column: str | None,
    codes: list[str],
    **settings: Any,
) -> _Result:
    """The chunk, its lines of output, and its warnings. `codes` names the cells after the first of its rows."""
    if not chunk.rows:  # a line is longer than a chunk
        return chunk, [], LineWarnings()
    translator = copy.copy(translator)
    translator.line_warnings = LineWarnings()
    sentences, *codes_of_rows = map(list, zip(*chunk.rows, strict=True))
    settings |= dict(zip(codes, codes_of_rows, strict=True))
    settings["first_line"] = chunk.first_line
    lines = translated_lines(translator, sentences, one_line=column is None, **settings)
    if column is not None:
        pairs_of_text = zip(sentences, lines, strict=True)
        numbered = enumerate(pairs_of_text, start=chunk.first_line)
        lines = (_table_row(translator, column, line, *pair) for line, pair in numbered)
    return chunk, list(lines), translator.line_warnings


def _table_row(
    translator: Translator, column: str, line: int, source: str, translation: str
) -> str:
    row: dict[str, object] = {"line": line, "source": source, column: translation}
    if has_closed_vocabulary(translator.source_tokenizer):
        row["unknown"] = translator.unknown_in(source)
    return json.dumps(row, ensure_ascii=False)


def merge_shards(output: str | Path) -> int:
    """Join the chunks of finished shards to the `output` that they name, and return the number of chunks.

    Raises:
        UserError: no shard has finished, a chunk is missing, or a file there is of other text, model or settings.
    """
    parts = _parts_of(output)
    if not any((parts / note).is_file() for note in (_ORDER, _TEXT)):
        raise UserError(f"output: no shard of {output} has finished: there is no {parts / _ORDER}")
    files = {path.name for path in parts.iterdir() if not path.name.startswith(".")}
    present = files - _NOTES
    names = _names_of_text(parts, present) if (parts / _TEXT).is_file() else _read(parts / _ORDER)
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
    _join(names, output)
    return len(names)


def _names_of_text(parts: Path, present: Collection[str]) -> list[str]:
    """The names of all chunks of a file, or where the file is not, of those that are present, by their numbers."""
    note = _read(parts / _TEXT)
    text = TextChunks(Path(note["path"]), note["total"], note["size"])
    if text.path.is_file():
        job = (parts / _JOB).read_text(encoding="utf-8")
        return [_name_in_text(number, text.read(number), job) for number in range(len(text))]
    by_number = {int(name.split("-")[0]): name for name in sorted(present)}
    return [by_number.get(number, f"{number:09d}-") for number in range(len(text))]


def _read(note: Path) -> Any:
    return json.loads(note.read_text(encoding="utf-8"))


def _parts_of(output: str | Path) -> Path:
    require_parent(Path(output))
    target = Path(output).resolve()
    return target.with_name(f".{target.name}.parts")


def _join(names: list[str], output: str | Path) -> None:
    """Concatenate the chunks, then delete their folder."""
    folder = _parts_of(output)
    parts = [folder / name for name in names]
    if file_format(Path(output)) == ".parquet":
        job = _read(folder / _JOB)
        _write_parquet(parts, output, job["table"], job["unknown"])
    else:
        with open_to_write(output) as stream:
            for part in parts:
                stream.write(part.read_bytes())
    shutil.rmtree(folder)


def _write_parquet(parts: list[Path], output: str | Path, column: str, unknown: bool) -> None:
    """Write chunks of JSON lines as one table. `unknown` says whether it has the column of that name."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns = [("line", pa.int64()), ("source", pa.string()), (column, pa.string())]
    if unknown:
        columns.append(("unknown", pa.list_(pa.string())))
    schema = pa.schema(columns)
    rows = (json.loads(line) for part in parts for line in input_lines(part))
    with open_to_write(output) as stream, parquet.ParquetWriter(stream, schema) as file:
        while group := list(islice(rows, _ROWS_PER_GROUP)):
            file.write_table(pa.Table.from_pylist(group, schema))


def claim(note: Path, job: Any, refusal: str) -> None:
    """Record a job in `note`, or raise a UserError, `refusal`, if that has a different one."""
    text = _text(job)
    if write_first(note, text) != text:
        raise UserError(refusal)


def _text(job: Any) -> str:
    return json.dumps(job, default=_description, sort_keys=True)


def _description(value: object) -> str:
    """A text for a value that JSON lacks, the same in every process."""
    if isinstance(value, FunctionType):  # its `str` has an address
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
