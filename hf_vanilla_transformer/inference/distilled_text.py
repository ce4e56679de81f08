"""Training text for sequence-level knowledge distillation (Kim & Rush 2016, arXiv 1606.07947, §3.2), and by
back-translation (Sennrich et al. 2016, arXiv 1511.06709).

A teacher, any sequence-to-sequence model that `AutoModelForSeq2SeqLM` loads or an ensemble of this package's
models, translates the source text. A student is trained on its translations. In back-translation it translates text
in the target language, and its translations become the source.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..corpora.columns import Columns
from ..corpora.inputs import DISTILLED
from ..utils.errors import UserError
from ..utils.system_info import counted
from .file_translation import claim, translate_file
from .fingerprints import text_fingerprint, translator_fingerprint
from .ray_workers import RayPool
from .sentences import read_sentences
from .text_io import input_lines, line_writer
from .translator import Translator

SOURCE, TARGET = DISTILLED
TRANSLATIONS = "translations.txt"  # of the teacher, one a line
JOB = "distil.json"  # model, settings and source of the translations

logger = logging.getLogger(__name__)


def distil(
    teacher: Translator,
    source: str | Path,
    output: str | Path,
    *,
    temperature: float = 0.0,
    back_translation: bool = False,
    columns: Columns | None = None,
    progress: Callable[[int], object] = lambda lines: None,
    shard: tuple[int, int] | None = None,
    pool: RayPool | None = None,
    **settings: Any,
) -> int:
    """Translate text with a teacher and write parallel text to train a student on. A killed call resumes.

    Args:
        source: the text to translate, as `path` of `read_sentences`. Blank lines, and translations that are blank,
            are left out. The latter are counted in a warning.
        output: a folder. It gets `SOURCE` and `TARGET`, and keeps the `TRANSLATIONS`.
        temperature: sample each token from all of the vocabulary (Edunov et al. 2018, arXiv 1808.09381), with
            logits divided by it. 0 searches.
        back_translation: write the lines as `TARGET`, and their translations as `SOURCE`.
        columns: of files with both languages, such as CSV or TMX.
        progress, shard, pool, settings: as in `translate_file`. A shard writes no pairs. The call without it does.

    Returns the number of pairs.

    Raises:
        UserError: as in `translate_file`, or a folder with the translations of a different call.
    """
    if not temperature >= 0:
        raise UserError(f"temperature: must be at least 0, not {temperature}")
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "num_beams": 1, "top_k": 0}
        settings = sampling | settings
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(read_sentences(source, "source", columns))
    job = {"source": text_fingerprint(lines), "teacher": translator_fingerprint(teacher)}
    other = "a different teacher, of other text or with a different search; name a new folder"
    claim(folder / JOB, job | settings, f"output_dir: {folder} contains translations by {other}")
    translations = folder / TRANSLATIONS
    if not translations.exists():
        translate_file(
            teacher,
            lines,
            translations,
            progress=progress,
            shard=shard,
            pool=pool,
            **{"protect": False} | settings,  # a student learns what its teacher writes
        )
    if shard:
        return 0
    names = (TARGET, SOURCE) if back_translation else (SOURCE, TARGET)
    count = 0
    blank = 0
    with (
        line_writer(folder / names[0]) as write_line,
        line_writer(folder / names[1]) as write_translation,
    ):
        for line, translation in zip(lines, input_lines(translations), strict=True):
            if not line.strip():
                continue
            if not translation.strip():
                blank += 1
                continue
            count += 1
            write_line(line)
            write_translation(translation)
    if blank:
        logger.warning("%s: %s without a translation left out", folder, counted(blank, "line"))
    return count
