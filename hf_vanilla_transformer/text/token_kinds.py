"""The values of `tokens`, and the fields of tokenizer_config.json that say what a model's tokens are.

`tokens` is the name. `task` is "language" or "sequence": log, card, page and metrics speak of translations and
languages, or of sequences alone. `normalize_source` says whether `text.source_text` normalises the source, and
`source_form` names the function that brings it to the form of the training text (`text.source_form`).
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Regex
from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError, did_you_mean, shown
from ..utils.untrusted import one_line

#: Regular expressions that have a name. `smiles` has the atoms, bonds, branches and rings of Schwaller et al. 2019
#: (arXiv 1811.02633), and RDKit's numbers of rings from 100. `tagged` has characters, and tags in brackets, whole. The
#: syntax is that which Rust, Python and JavaScript share.
PATTERNS = {
    "smiles": (
        r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>|\*|\$|%\([0-9]+\)|%[0-9]{2}|[0-9]"
    ),
    "tagged": r"\[[^\[\]]+\]|[\s\S]",
}
#: Names of `tokens`. Anything else is a regular expression.
KINDS_OF_TOKENS = ("bpe", "sentencepiece", "chars", "bytes", "words", *PATTERNS)
#: Tokens of text in a language. Its source is normalised.
LANGUAGE_TOKENS = ("bpe", "sentencepiece")
TASKS = ("language", "sequence")

_NAME = re.compile(r"\w+")


def check_tokens(tokens: str, field: str = "tokens") -> None:
    """Refuse what is neither one of `KINDS_OF_TOKENS` nor a regular expression. `field` starts the error.

    A word is no regular expression, because it would be a misspelt name.
    """
    if tokens in KINDS_OF_TOKENS:
        return
    if _NAME.fullmatch(tokens) or not tokens:
        hint = (
            did_you_mean(tokens, KINDS_OF_TOKENS)
            or f"choose from {', '.join(KINDS_OF_TOKENS)}, or give a regular expression"
        )
        raise UserError(f"{field}: {tokens!r} is unknown; {hint}")
    try:
        Regex(tokens)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(
            f"{field}: {tokens!r} is no regular expression ({one_line(error)})"
        ) from None


def task_of(*tokens: str) -> str:
    """The task of a model with these tokens, as `--tokens` names them: "language" or "sequence"."""
    return "language" if all(each in LANGUAGE_TOKENS for each in tokens) else "sequence"


def tokenizer_task(*tokenizers: PreTrainedTokenizerBase) -> str:
    """The task of a model with these tokenizers: "sequence", or "language" if they do not say it."""
    tasks = {getattr(tokenizer, "init_kwargs", {}).get("task") for tokenizer in tokenizers}
    return "sequence" if "sequence" in tasks else "language"


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, tokens: str, task: str) -> None:
    """Store the fields of tokenizer_config.json that say what the tokens are."""
    tokenizer.init_kwargs |= {
        "tokens": tokens,
        "task": task,
        "normalize_source": task == "language",
    }


def set_task(tokenizers: Iterable[PreTrainedTokenizerBase], task: str, new: bool) -> None:
    """Store the task of a model in its tokenizers.

    Args:
        tokenizers: of the model.
        task: one of `TASKS`.
        new: whether the weights are new. Trained ones keep the normalisation of their source.
    """
    for tokenizer in tokenizers:
        tokenizer.init_kwargs["task"] = task
        if new and task == "sequence":
            tokenizer.init_kwargs["normalize_source"] = False


def has_closed_vocabulary(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer was trained here with the symbols of a text only, so that others are unknown."""
    tokens = getattr(tokenizer, "init_kwargs", {}).get("tokens")
    return tokens is not None and tokens not in ("bytes", *LANGUAGE_TOKENS)


def token_splitter(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[str]] | None:
    """The function from a text to its tokens, if they are words or the matches of a regular expression.

    None for a tokenizer of characters or bytes, or of text in a language, and for one that does not say what it is.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    pre_tokenizer = getattr(backend, "pre_tokenizer", None)
    by_characters = getattr(tokenizer, "init_kwargs", {}).get("tokens") == "chars"
    if by_characters or pre_tokenizer is None or not has_closed_vocabulary(tokenizer):
        return None
    return lambda text: [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def unknown_symbols(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The symbols of a text that a tokenizer with a closed vocabulary reads as `<unk>`."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    encoded = backend.encode(text, add_special_tokens=False)
    pieces = zip(encoded.ids, encoded.offsets, strict=True)
    return [text[start:end] for number, (start, end) in pieces if number == tokenizer.unk_token_id]


def without_margins(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text without surrounding white space, if a closed vocabulary does not have that as a symbol."""
    core = text.strip()
    if core == text or not has_closed_vocabulary(tokenizer):
        return text
    before, _, after = text.partition(core)
    if not unknown_symbols(tokenizer, before):
        core = before + core
    return core if unknown_symbols(tokenizer, after) else core + after


def recorded_form(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The `source_form` of tokenizer_config.json, None without one.

    Raises:
        UserError: it is no name.
    """
    name = getattr(tokenizer, "init_kwargs", {}).get("source_form")
    if name is not None and not isinstance(name, str):
        raise UserError(
            f"source_form: {shown(name)} in tokenizer_config.json; give MODULE:FUNCTION"
        )
    return name


def record_form(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Store the form of the source, if there is one, in its tokenizer."""
    if name is not None:
        tokenizer.init_kwargs["source_form"] = name
