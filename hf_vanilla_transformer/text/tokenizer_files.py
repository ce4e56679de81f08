"""The tokenizers of a checkpoint: saving, loading, and a digest of their effect."""

import copy
import hashlib
import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..utils.atomic_write import atomic_file, report_full_disk
from ..utils.errors import UserError, missing_extra, shown
from ..utils.model_folder import check_model_files, check_tokenizer_file
from ..utils.untrusted import one_line, read_json_object
from .language_tokens import language_tokens
from .side_tokens import target_vocabulary

TARGET_FOLDER = "target_tokenizer"

# Arguments of `from_pretrained` that transformers saves with a tokenizer.
_LOADING = ("is_local", "local_files_only")

# Embeddings are padded to a multiple of this, or of more, for the sake of speed.
_LEAST_PADDING = 8

# Characters for each one of a text.
_MAX_GROWTH = 1000

# Case, accents, punctuation, numbers, ligatures and scripts, which classes of tokenizers treat differently.
_PROBE = "Where is the Café?  It costs 12.50 €, the ﬁrst door. ÄÖÜ ß привет 你好"
_PROBED_TOKENS = 500

_LOGGER = logging.getLogger(__name__)


def save_tokenizers(
    directory: str | Path,
    source: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase | None = None,
) -> None:
    """Save the tokenizers of a checkpoint, without BPE-dropout, and a separate target one in `target_tokenizer`.

    Args:
        directory: the checkpoint's folder, created if necessary.
        source: tokenizer of the source language, or of both.
        target: tokenizer of the target language, or None or `source` for a joint one.

    Raises:
        UserError: `directory` is a file.
        DiskFull: there is no space.
    """
    if Path(directory).is_file():  # `save_pretrained` would only log it
        raise UserError(f"{directory} is a file: name a folder for the tokenizer")
    target_folder = Path(directory) / TARGET_FOLDER
    with report_full_disk(directory):
        _save(source, Path(directory))
        if target is not None and target is not source:
            _save(target, target_folder)
    if (target is None or target is source) and target_folder.is_dir():
        shutil.rmtree(target_folder)  # of an earlier save, and `load_tokenizers` would load it


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save under a class name that transformers 4 knows, too, and without how the tokenizer was loaded."""
    recognising_added_tokens(_without_dropout(tokenizer)).save_pretrained(str(folder))
    config = folder / "tokenizer_config.json"
    saved = json.loads(config.read_text(encoding="utf-8"))
    settings = {name: value for name, value in saved.items() if name not in _LOADING}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if settings != saved:
        with atomic_file(config) as temporary:
            temporary.write_text(
                json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )


def _without_dropout(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(getattr(backend, "model", None), "dropout", None) is None:
        return tokenizer
    duplicate: Any = copy.deepcopy(tokenizer)
    duplicate.backend_tokenizer.model.dropout = None
    return duplicate


def load_tokenizers(
    directory: str | Path,
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load the tokenizers of a checkpoint.

    Args:
        directory: a folder of `save_tokenizers`, or a folder or name on the Hub that `AutoTokenizer` loads.

    Returns:
        (source tokenizer, target tokenizer), the same object if the folder has no `target_tokenizer`.

    Raises:
        UserError: there is no tokenizer, or one that cannot pad, or its special tokens are not the model's, or
            it is that of the source alone.
    """
    folder = Path(directory).expanduser()
    target_folder = folder / TARGET_FOLDER
    source = load_tokenizer(folder)
    if target_folder.is_file():
        raise UserError(f"{target_folder} is a file, not the folder of the target's tokenizer")
    target = load_tokenizer(target_folder) if target_folder.is_dir() else source
    for tokenizer, place in ((source, folder), (target, target_folder)):
        if tokenizer.pad_token is None:
            raise UserError(
                f"{place}: its tokenizer has no pad_token, which batches need: set one and save it again"
            )
    if (folder / "config.json").is_file():
        config = read_json_object(folder / "config.json")
        _check_source(source, folder, config)
        if target is source:
            _check_shared(source, folder, config)
        _check_target(target, target_folder if target is not source else folder, config)
    return source, target


def _check_source(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: Mapping[str, Any]
) -> None:
    """Refuse a tokenizer that adds tokens to every text which the model lacks, as one of another class does."""
    rows = config.get("vocab_size")
    added = max(tokenizer("").input_ids, default=0)
    if type(rows) is int and added >= rows:
        raise UserError(
            f"{folder}: its tokenizer, a {type(tokenizer).__name__}, adds token {added}, "
            f"{shown(tokenizer.convert_ids_to_tokens(added))}, to every text, and the model's vocab_size is {rows}: "
            "name the right tokenizer_class in tokenizer_config.json"
        )


def _check_shared(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: Mapping[str, Any]
) -> None:
    """Refuse one tokenizer for two vocabularies of other sizes. A vocabulary may have rows beyond the tokens."""
    sizes = config.get("vocab_size"), config.get("decoder_vocab_size")
    rows = [size for size in sizes if type(size) is int]
    if len({*rows}) < 2 or target_vocabulary(tokenizer) is not None:
        return
    step = max(rows) & -max(rows)  # the largest power of 2 to which they can be padded
    is_padded = step >= _LEAST_PADDING and max(rows) - len(tokenizer) < step
    is_of_source = len(tokenizer) == rows[0] and not is_padded
    if len(tokenizer) > min(rows) or is_of_source:
        raise UserError(
            f"{folder}: the folder lacks {TARGET_FOLDER}: the model has {rows[0]} source and {rows[1]} target tokens, "
            f"the one tokenizer has {len(tokenizer)}: copy the whole folder"
        )


def _check_target(
    tokenizer: PreTrainedTokenizerBase, place: Path, config: Mapping[str, Any]
) -> None:
    """Refuse a tokenizer to which the model's padding and end are text: they would stay in translations."""
    if target_vocabulary(tokenizer) is not None:  # of two, and the special ids of one
        return
    for name in ("pad_token", "eos_token"):
        number = config.get(f"decoder_{name}_id")
        number = config.get(f"{name}_id") if number is None else number
        ids = number if isinstance(number, list) else [number]
        if number is not None and set(ids).isdisjoint(tokenizer.all_special_ids):
            token = tokenizer.convert_ids_to_tokens(ids[0])
            raise UserError(
                f"{place}: {name}={shown(getattr(tokenizer, name))}: the model's is token {ids[0]}, {shown(token)}, "
                "which would stay in translations: name this one in tokenizer_config.json"
            )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load one tokenizer, which may lack tokens that a model needs.

    Raises:
        UserError: there is no tokenizer, or it would make texts much longer.
    """
    check_model_files(folder)
    try:
        tokenizer = recognising_added_tokens(AutoTokenizer.from_pretrained(str(folder)))
        saved = _described_by_file(tokenizer, folder)
    except Exception as error:  # the tokenizers library raises nothing more specific
        names = " ".join(path.name for path in folder.glob("*"))
        if folder.is_dir() and not re.search(r"token|vocab|\.spm|\.model\b", names):
            raise UserError(
                f"{folder}: this folder has no tokenizer, such as tokenizer.json"
            ) from error
        check_tokenizer_file(folder / "tokenizer.json")
        refusal = UserError(f"{folder}: cannot load the tokenizer ({one_line(error)})")
        raise missing_extra(error) or refusal from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for each, part in itertools.product((backend, saved), ("normalizer", "decoder")):
        step = getattr(each, part, None)
        # the state of a step is its part of tokenizer.json
        if step is not None and (growth := _growth(json.loads(step.__getstate__()))) > _MAX_GROWTH:
            raise UserError(
                f"{folder}/tokenizer.json: its {part} makes texts {growth:,.0f} times as long, more than {_MAX_GROWTH}"
            )
    if saved is not None and not _read_alike(tokenizer, saved):
        _LOGGER.warning(
            "%s: tokenizer_class=%s reads texts otherwise than tokenizer.json: if the model learned with that file, "
            "name PreTrainedTokenizerFast in tokenizer_config.json",
            folder,
            type(tokenizer).__name__,
        )
    return tokenizer


def _described_by_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Tokenizer | None:
    """What `tokenizer.json` describes, or None where the class of the tokenizer has read all of it.

    transformers 5 builds the steps of a named class itself, and takes only the vocabulary from the file.
    transformers 4 took the steps from the file.
    """
    file = folder / "tokenizer.json"
    has_steps = getattr(tokenizer, "backend_tokenizer", None) is not None
    if not has_steps or type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():
        return None
    return Tokenizer.from_file(str(file))


def _read_alike(tokenizer: PreTrainedTokenizerBase, saved: Tokenizer) -> bool:
    """Return whether both read a probe, and the first tokens of the vocabulary, as the same tokens."""
    size = min(saved.get_vocab_size(), _PROBED_TOKENS)
    special = set(tokenizer.all_special_ids)
    own_text = saved.decode([number for number in range(size) if number not in special])
    probe = f"{_PROBE} {own_text}"
    return _tokens(tokenizer.backend_tokenizer, probe) == _tokens(saved, probe)


def _tokens(backend: Tokenizer, text: str) -> list[str]:
    """The tokens of a text, without BPE-dropout, truncation and padding."""
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    tokens: list[str] = backend.encode(text, add_special_tokens=False).tokens
    return tokens


def _growth(step: Any) -> float:
    """How many times as long the replacements of a normalizer or a decoder may make a text, one after the other."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    if step.get("type") == "Replace":
        old = step["pattern"].get("String", " ")  # a regular expression may match one character
        return max(1, len(step["content"]) / max(1, len(old)))
    return math.prod(map(_growth, step.values()))


def unrecognised_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens beyond the named ones (`eos_token` and so on) that the tokenizer reads as ordinary text in a text.

    `split_special_tokens` leaves "</s>" in a text what it is, and with it every token of `add_special_tokens`.
    """
    if not tokenizer.split_special_tokens:
        return []
    named = {getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    languages = language_tokens(tokenizer)
    if languages and languages.source_mark is None:  # no text contains them
        named.update(tokenizer.convert_ids_to_tokens(list(languages.ids.values())))
    return [
        token
        for token in tokenizer.get_added_vocab()
        if token not in {*named, *tokenizer.tokenize(token)}
    ]


def recognising_added_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy that recognises tokens added by `add_special_tokens`."""
    tokens = unrecognised_tokens(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokens and backend is None:
        kind = type(tokenizer).__name__
        _LOGGER.warning(
            "a %s cannot recognise tokens that are added to it: %s is read as text", kind, tokens[0]
        )
    if not tokens or backend is None:
        return tokenizer
    state = json.loads(backend.to_str())
    for entry in state["added_tokens"]:
        if entry["content"] in tokens:
            entry |= {"special": False, "normalized": False}
    settings = {**tokenizer.init_kwargs, "tokenizer_object": Tokenizer.from_str(json.dumps(state))}
    for name in ("added_tokens_decoder", "extra_special_tokens", "tokenizer_file"):
        settings.pop(name, None)
    return type(tokenizer)(**settings)


def require_same_tokenizers(
    folder: str | Path,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    other: str | Path,
    others: Sequence[PreTrainedTokenizerBase],
    purpose: str,
) -> None:
    """Refuse two model folders with tokenizers of different effect for a purpose, such as "an ensemble"."""
    if tokenizer_digest(others) != tokenizer_digest(tokenizers):
        raise UserError(
            f"{other}: its tokenizer differs from that of {folder}; {purpose} shares one"
        )


def tokenizer_digest(tokenizers: Sequence[PreTrainedTokenizerBase]) -> str:
    """Digest of the effect of tokenizers on text. It survives saving, loading and use."""
    digest = hashlib.blake2b(digest_size=8)
    for tokenizer in dict.fromkeys(tokenizers):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        content: Any = sorted(tokenizer.get_vocab().items())
        if target := target_vocabulary(tokenizer):
            content = [content, sorted(target.items())]
        if backend is not None:
            described = json.loads(backend.to_str())
            described["model"].pop("dropout", None)
            content = [
                content,
                *(described[name] for name in ("normalizer", "pre_tokenizer", "model")),
            ]
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()
