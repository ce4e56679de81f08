"""The files of a model folder that are published."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_imports

from ..text.tokenizer_files import TARGET_FOLDER
from ..utils.errors import UserError
from ..utils.model_folder import read_shards
from ..utils.untrusted import read_json_object, read_safetensors_header
from .card import SECRET

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-?????-of-?????.safetensors"
CARD = "README.md"

# BPE and WordPiece files, SentencePiece files and vocabularies of Marian and FSMT.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
)
# Files that `from_pretrained` reads: outdated ones in a repository must be deleted.
_MODEL = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    SHARDS,
    *_TOKENIZER,
    *(f"{TARGET_FOLDER}/{name}" for name in _TOKENIZER),
    TARGET_FOLDER,  # a symbolic link, which is refused
    "*_vanilla_transformer.py",
)
_OTHER = (
    CARD,
    "curve.png",
    "attention.png",
    "all_results.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


@dataclass
class ModelFiles:
    """The files to upload."""

    #: name in the repository -> the file, or its content if it was changed
    chosen: dict[str, Path | bytes]
    #: files and folders (ending in `/`) of the model folder that are not uploaded
    left: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Bytes by name, sorted by name."""
        files = sorted(self.chosen.items())
        return {
            name: file.stat().st_size if isinstance(file, Path) else len(file)
            for name, file in files
        }


def is_model_file(name: str) -> bool:
    """True for configuration, weights, tokenizer and code of a model in a repository."""
    return _matches(name, _MODEL)


def choose_files(folder: Path) -> ModelFiles:
    """Choose the weights, configuration, tokenizers, code, card, plots and results of a model.

    Other files, such as optimizer states, checkpoints, text and hidden files, are not uploaded.
    """
    names = list(_files(folder))
    code = [f"{module}.py" for module in _named_modules(folder)] if "config.json" in names else []
    chosen = [name for name in names if name in code or _matches(name, _MODEL + _OTHER)]
    # `from_pretrained` prefers the single file of weights, then the index, and ignores the rest
    used: set[str] = set()
    if WEIGHTS in chosen:
        used = {WEIGHTS}
    elif INDEX in chosen:
        used = {INDEX, *read_shards(folder / INDEX)}
    chosen = [
        name for name in chosen if name in used or not _matches(name, (WEIGHTS, INDEX, SHARDS))
    ]
    for name in chosen:
        _check_location(folder, name)
        _check_content(folder / name)
    _check_complete(folder, chosen)
    left = [name for name in names if name not in chosen]
    return ModelFiles({name: folder / name for name in chosen}, _by_folder(left, chosen))


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of all files in the folder. A link to a folder counts as a file."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # the "*" of fnmatch also matches "/"
    return any(
        name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns
    )


def _check_location(folder: Path, name: str) -> None:
    path = folder / name
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()) or not path.is_file():
        raise UserError(f"{path} is no file of this folder, but {real}; put the file itself there")


def _check_content(path: Path) -> None:
    """Refuse damaged weights, and files that contain an access token, a key or a password."""
    if path.suffix == ".safetensors":
        read_safetensors_header(path)
        return
    found = SECRET.search(path.read_bytes().decode("latin-1"))
    if found is not None:
        raise UserError(
            f"{path} seems to contain a secret ({found[0][:4]}…); remove it before you publish"
        )


def _check_complete(folder: Path, names: list[str]) -> None:
    """Refuse a folder without a model, or without a file that another one of these names."""
    if "config.json" not in names or not {WEIGHTS, INDEX} & {*names}:
        raise UserError(
            f"{folder} contains no model: it needs config.json with {WEIGHTS} (or shards and {INDEX}); "
            "other formats are not uploaded"
        )
    needed = dict.fromkeys(read_shards(folder / INDEX), INDEX) if INDEX in names else {}
    needed |= _needed_code(folder, names)
    for file, named_in in sorted(needed.items()):
        if file not in names:
            raise UserError(f"{folder} lacks {file}, named in {named_in}; save the model again")


def _named_modules(folder: Path) -> set[str]:
    """The modules of this repository that config.json names. "--" marks code of a different one."""
    config = read_json_object(folder / "config.json")
    entries = [*config.get("auto_map", {}).values()]
    entries += [
        entry["impl"] for entry in config.get("custom_pipelines", {}).values() if "impl" in entry
    ]
    return {module for entry in entries if "--" not in (module := str(entry).split(".")[0])}


def _needed_code(folder: Path, names: list[str]) -> dict[str, str]:
    """The files of code that config.json or other code names, each with the file that names it."""
    modules = dict.fromkeys(_named_modules(folder), "config.json")
    for file in (name for name in names if name.endswith(".py")):
        modules |= dict.fromkeys(get_relative_imports(folder / file), file)
    return {f"{module}.py": named_in for module, named_in in modules.items()}


def _by_folder(left: list[str], chosen: list[str]) -> list[str]:
    """The files that are not uploaded. A folder without uploaded files is listed by its name only."""
    used = {name.split("/")[0] for name in chosen if "/" in name}
    parts = (name.partition("/") for name in left)
    tops = (
        f"{top}/" if rest and top not in used else f"{top}{slash}{rest}"
        for top, slash, rest in parts
    )
    return list(dict.fromkeys(tops))
