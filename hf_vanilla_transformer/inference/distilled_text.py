"""Training text for sequence-level knowledge distillation (Kim & Rush 2016, arXiv 1606.07947, §3.2), and by
back-translation (Sennrich et al. 2016, arXiv 1511.06709).

A teacher, any sequence-to-sequence model that `AutoModelForSeq2SeqLM` loads or an ensemble of this package's
models, translates the source text. A student is trained on its translations, alone or with the references. In
back-translation it translates text in the target language, and its translations become the source.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from sacrebleu.metrics import CHRF

from ..data.columns import SIDES, Columns
from ..data.inputs import DISTILLED
from ..utils.errors import UserError
from ..utils.system_info import counted
from .file_translation import claim, translate_file
from .fingerprints import text_fingerprint, translator_fingerprint
from .ray_workers import RayPool
from .sentences import read_sentence_pairs, read_sentences
from .text_io import line_writer, read_lines, row_writer
from .translator import Translator

SOURCE, TARGET = DISTILLED
TRANSLATIONS = "translations.txt"  # of the teacher, in the format of `translate --n_best`
JOB = "distil.json"  # model, settings and source of the translations

logger = logging.getLogger(__name__)


def distil(
    teacher: Translator,
    source: str | Path,
    output: str | Path,
    processes: Any,
    *,
    n_best: int = 1,
    temperature: float = 0.0,
    mbr: bool = False,
    tag: str = "",
    references: str | Path | None = None,
    back_translation: bool = False,
    columns: Columns | None = None,
    progress: Any = None,
    shard: tuple[int, int] | None = None,
    pool: RayPool | None = None,
    pairs_format: str = "text",
    **settings: Any,
) -> int:
    """Translate text with a teacher and write parallel text to train a student on. A killed call resumes.

    Args:
        source: the text to translate, as `path` of `read_sentences`. Blank lines, and translations that are blank,
            are left out and counted in a warning.
        output: a folder. It gets `SOURCE` and `TARGET`, and keeps the `TRANSLATIONS`.
        processes: `accelerate.PartialState()`.
        n_best: translations of each sentence, each a training pair. More than 1 needs as many beams, or a temperature.
        temperature: sample each token from all of the vocabulary (Edunov et al. 2018, arXiv 1808.09381), with
            logits divided by it. 0 searches.
        mbr: of the translations of a sentence, take the one that is most similar to the others by chrF, which is
            minimum Bayes risk decoding over the n-best list (Eikema & Aziz 2020, arXiv 2005.10283).
        tag: what the sources of back-translations start with (Caswell et al. 2019, arXiv 1906.06442). Train with a
            tokenizer that knows it, by its `add_tokens`.
        references: translations by people of the same lines, to train on too, behind the teacher's.
        back_translation: write the lines as `TARGET`, and their translations as `SOURCE`.
        columns: of files with both languages, such as CSV or TMX.
        progress, shard, pool, settings: as in `translate_file`. A shard writes no pairs. The call without it does.
        pairs_format: "text" for the two files, "jsonl" or "parquet" for one table with columns `source` and `target`.

    Returns the number of pairs.

    Raises:
        UserError: as in `translate_file`, for references that do not match the source line by line, or a folder
            with the translations of a different call.
    """
    if mbr and n_best < 2:
        raise UserError(
            f"mbr: it chooses among several translations: give n_best and num_beams, not n_best={n_best}"
        )
    if tag and not back_translation:
        raise UserError(
            f"tag: {tag}: it marks back-translations: give back_translation too, or leave it out"
        )
    if not temperature >= 0:
        raise UserError(f"temperature: must be at least 0, not {temperature}")
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "num_beams": 1, "top_k": 0}
        settings = sampling | settings
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if references is None:
        lines = list(read_sentences(source, "source", columns))
        human = list[str]()
    else:
        lines, human = read_sentence_pairs(source, references, columns)
    translations = folder / TRANSLATIONS
    job = {
        "source": text_fingerprint(lines),
        "teacher": translator_fingerprint(teacher),
        "n_best": n_best,
    }
    other = "a different teacher, of other text or with a different search; name a new folder"
    claim(folder / JOB, job | settings, f"output_dir: {folder} contains translations by {other}")
    if not translations.exists():
        listed = n_best if n_best > 1 else None
        translate_file(
            teacher,
            lines,
            translations,
            processes,
            n_best=listed,
            progress=progress,
            shard=shard,
            pool=pool,
            **settings,
        )
    processes.wait_for_everyone()
    if processes.process_index or shard:
        return 0
    taught = _taught(translations, n_best, mbr)
    if tag:
        taught = ((number, f"{tag} {text}" if text.strip() else "") for number, text in taught)
    pairs = (
        (lines[number], translation) for number, translation in chain(taught, enumerate(human))
    )
    pairs = ((target, source) if back_translation else (source, target) for source, target in pairs)
    return _write_pairs(pairs, folder, pairs_format)


def _write_pairs(pairs: Iterable[tuple[str, str]], folder: Path, pairs_format: str) -> int:
    """Write the pairs with text on both sides, and return their number."""
    count = 0
    blank = 0
    table = pairs_format != "text"
    with ExitStack() as stack:
        if table:
            write_row = stack.enter_context(
                row_writer(folder / f"train.{pairs_format}", source=str, target=str)
            )
        writers = [
            stack.enter_context(line_writer(folder / name)) for name in DISTILLED if not table
        ]
        for pair in pairs:
            if not all(side.strip() for side in pair):
                blank += any(side.strip() for side in pair)
                continue
            count += 1
            if table:
                write_row(dict(zip(SIDES, pair, strict=True)))
            for write, side in zip(writers, pair, strict=False):
                write(side)
    if blank:
        logger.warning("%s: %s without a translation left out", folder, counted(blank, "line"))
    return count


def _taught(translations: Path, n_best: int, mbr: bool) -> Iterator[tuple[int, str]]:
    """The number of each line with its translations, or with the one of the highest mean chrF against the others."""
    if n_best == 1:
        yield from enumerate(read_lines(translations))
        return
    metric = CHRF()
    fields = (line.split(" ||| ", 1) for line in read_lines(translations))
    for number, group in groupby(fields, key=itemgetter(0)):
        texts = [scored.rpartition(" ||| ")[0] for _, scored in group]
        if mbr:
            scores = [
                sum(metric.sentence_score(text, [each]).score for each in texts) for text in texts
            ]
            texts = [texts[scores.index(max(scores))]]
        yield from ((int(number), text) for text in texts)
