"""The tokens that tell a model of many languages the languages of a sentence.

With `>>deu<<` (OPUS-MT; Johnson et al. 2017, arXiv 1611.04558) the source starts with the token of the target
language. With `__de__` (M2M-100) or `deu_Latn` (NLLB-200) the translation starts with it, and the source has the token
of its own language. Models that are trained here have one token, on either side.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from transformers import AddedToken, PreTrainedTokenizerBase

from ..loss_vanilla_transformer import IGNORED
from ..utils.errors import UserError, did_you_mean, shown
from .side_tokens import AS_TEXT, Side, target_vocabulary

# The codes of source and target. None: not named.
Direction: TypeAlias = tuple[str | None, str | None]
#: Token ids (N, T), or a tuple of outputs that starts with them.
TokenIds: TypeAlias = "np.ndarray | Sequence[Sequence[int]] | tuple[np.ndarray, ...]"

#: The names of a direction's codes: columns of a table with the codes of each row, and arguments.
CODES = "source_lang", "target_lang"

#: Entries of tokenizer_config.json: the pairs of the training, the languages that the sides are marked with, and the
#: tokens by code, if their form does not tell.
DIRECTIONS = "directions"
MARKS = "language_marks"
TOKENS = "language_tokens"

_TOKEN = re.compile(
    r">>(?P<target>[^\s<>]+)<<|__(?P<both>[a-z]{2,3}(?:[-_]\w+)?)__|(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})|\[(?P<bart>\w{5})\]"
)
#: Group of `_TOKEN` -> the language that the source is marked with, and whether the translation has a mark.
_MARKS_OF_FORMS = {
    "target": ("target", False),
    "both": ("source", True),
    "nllb": ("source", True),
    "bart": ("source", True),
}
_WRITTEN_MARK = re.compile(r"\s*>>([^\s<>]+)<<")
_SHOWN = 8  # codes in an error


@dataclass(frozen=True)
class LanguageTokens:
    """The languages of a tokenizer.

    Args:
        ids: the token of each language, by its code.
        source_mark: "source" or "target", the language that a source is marked with. None: it has no mark.
        target_mark: whether a translation starts with the token of its language.
        at_end: whether the mark of a source follows its end token.
        directions: pairs of codes that the model translates. Empty: all, or unknown.
        by_name: whether the tokens have names that tokenizer_config.json lists.
    """

    ids: Mapping[str, int]
    source_mark: str | None
    target_mark: bool
    at_end: bool = False
    directions: tuple[tuple[str, str], ...] = ()
    by_name: bool = False

    @cached_property
    def marks(self) -> frozenset[int]:
        """The tokens of all languages."""
        return frozenset(self.ids.values())

    def source(self, ids: Sequence[int], direction: Direction) -> list[int]:
        """The ids of a source, with the mark of this direction instead of those that it has."""
        language = {"source": direction[0], "target": direction[1], None: None}[self.source_mark]
        if language is None and self.source_mark:
            return list(ids)
        # A mark in the middle would choose the language too.
        text = [number for number in ids if number not in self.marks]
        if language is None:
            return text
        mark = [self.ids[self.check(language, f"{self.source_mark}_lang")]]
        return [*text, *mark] if self.at_end else [*mark, *text]

    def unmarked(self, ids: Sequence[int]) -> list[int]:
        """The ids of a sentence without marks at its ends."""
        text = list(ids)
        while text and text[0] in self.marks:
            del text[0]
        while text and text[-1] in self.marks:
            del text[-1]
        return text

    def target(self, direction: Direction) -> list[int]:
        """The first ids of a translation in this direction."""
        if not self.target_mark or direction[1] is None:
            return []
        return [self.ids[self.check(direction[1], "target_lang")]]

    def translation(self, ids: Sequence[int], direction: Direction) -> list[int]:
        """The ids of a translation, with the mark of this direction instead of the one that it has."""
        return [*self.target(direction), *self.unmarked(ids)]

    def is_marked(self, ids: Sequence[int]) -> bool:
        """Return whether a source has the mark of a target language."""
        ends = (*ids[:1], *ids[-1:])
        return self.source_mark == "target" and not self.marks.isdisjoint(ends)

    def check_text(self, text: str, line_number: int) -> None:
        """Raise a UserError if a source starts with a mark that the model does not read."""
        match = _WRITTEN_MARK.match(text)
        if match is None:
            return
        code = match[1]
        if code not in self.ids:
            self.check(code, f"line {line_number}: >>{code}<<")
        if code not in self.ids or self.source_mark != "target":
            raise UserError(
                f"line {line_number}: >>{code}<<: the model does not read this mark; give target_lang"
            )

    @property
    def listed(self) -> str:
        """The first codes, for messages."""
        return ", ".join([*self.ids][:_SHOWN]) + (", …" if len(self.ids) > _SHOWN else "")

    def check(self, code: str, name: str) -> str:
        """Return the `known_code` of the tokenizer, or raise a UserError that names the argument."""
        known = known_code(code, self.ids)
        if known is None:
            hint = did_you_mean(code, self.ids) or f"it has {self.listed}"
            raise UserError(f"{name}: the model has no language {shown(code)}; {hint}")
        return known


def known_code(code: str, known: Collection[str]) -> str | None:
    """The known code that a code stands for, or None.

    Case and the sign between language and region may differ, so that TH is th and pt-br is pt_BR.
    """
    if code in known:
        return code
    spelled = [each for each in known if _spelling(each) == _spelling(code)]
    return spelled[0] if len(spelled) == 1 else None


def _spelling(code: str) -> str:
    return code.replace("_", "-").lower()


def language_tokens(
    tokenizer: PreTrainedTokenizerBase, side: Side = "source"
) -> LanguageTokens | None:
    """The language tokens of a tokenizer, or None if it has none. `side` is of one with two vocabularies."""
    settings = tokenizer.init_kwargs
    names = settings.get(TOKENS)
    if names:
        ids = _ids_of_names(tokenizer, names, side)
        form = "both"
    else:
        ids, form = _ids_of_form(tokenizer)
    if not ids:
        return None
    source_mark, target_mark = settings.get(MARKS) or _MARKS_OF_FORMS[form]
    return LanguageTokens(
        ids,
        source_mark,
        target_mark,
        at_end=form == "bart" or getattr(tokenizer, "legacy_behaviour", False),
        directions=tuple((source, target) for source, target in settings.get(DIRECTIONS) or ()),
        by_name=bool(names),
    )


def _ids_of_names(
    tokenizer: PreTrainedTokenizerBase, names: Mapping[str, str], side: Side
) -> dict[str, int]:
    """The token of each language, by the names in tokenizer_config.json."""
    vocabulary = target_vocabulary(tokenizer) if side == "target" else None
    numbers = {token: number for number, token in (vocabulary or {}).items()}
    return {
        code: numbers.get(name, tokenizer.convert_tokens_to_ids(name))
        for code, name in names.items()
    }


def _ids_of_form(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], str]:
    """The token of each language, by the form of the tokens, and the group of `_TOKEN` that it is."""
    ids = dict(getattr(tokenizer, "lang_code_to_id", None) or {})  # M2M-100
    tokens = list(tokenizer.get_added_vocab())
    # MarianTokenizer.supported_language_codes is empty if source and target have a vocabulary each
    if hasattr(tokenizer, "supported_language_codes"):
        tokens = [token for token in tokenizer.get_vocab() if token.startswith(">>")] + tokens
    matches = [match for match in map(_TOKEN.fullmatch, dict.fromkeys(tokens)) if match]
    form = "both" if ids or not matches else str(matches[0].lastgroup)
    for match in matches:
        if match.lastgroup == form:
            ids[match[form]] = tokenizer.convert_tokens_to_ids(match[0])
    return ids, form


def encode_targets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any
) -> list[list[int]]:
    """The ids of translations. M2M-100's tokenizer encodes none without a language, which `translation` replaces."""
    if getattr(tokenizer, "tgt_lang", "") is None and (languages := language_tokens(tokenizer)):
        tokenizer.tgt_lang = next(iter(languages.ids))
    return tokenizer(text_target=list(texts), **options)["input_ids"]


def token_ids(ids: TokenIds, pad_id: int) -> np.ndarray:
    """The ids (N, T) with -100 replaced by `pad_id`, as a copy, because the trainer keeps using its arrays."""
    array = np.asarray(ids[0] if isinstance(ids, tuple) else ids)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(
            f"compute_metrics: token ids (N, T) are needed, not {array.dtype} of shape {array.shape}; "
            "set predict_with_generate=True"
        )
    return np.where(array == IGNORED, pad_id, array)


def decode_targets(tokenizer: PreTrainedTokenizerBase, ids: TokenIds) -> list[str]:
    """The texts of predictions or labels (N, T), without the tokens of languages, which M2M-100 decodes as text."""
    ids = token_ids(ids, tokenizer.pad_token_id)
    languages = language_tokens(tokenizer, "target")
    marks = list(languages.marks) if languages and languages.target_mark else []
    return tokenizer.batch_decode(
        np.where(np.isin(ids, marks), tokenizer.pad_token_id, ids), **AS_TEXT
    )


def add_language_tokens(
    tokenizer: PreTrainedTokenizerBase,
    directions: Sequence[tuple[str, str]],
    on_source: bool = True,
) -> list[str]:
    """Add the tokens of languages that a tokenizer lacks, and record the directions in its tokenizer_config.json.

    Args:
        directions: pairs of codes, such as ("en", "de").
        on_source: the source starts with the token, `>>de<<`, which may also be written in a text. Otherwise the
            translation starts with it, `__de__`, by `forced_bos_token_id`. A tokenizer with languages keeps its way.

    Returns:
        The codes of the new languages.
    """
    known = language_tokens(tokenizer)
    settings = tokenizer.init_kwargs
    codes = {target for _, target in directions}
    if known is None:
        form = ">>{}<<" if on_source else "__{}__"
        recorded = directions
        settings[MARKS] = ["target", False] if on_source else [None, True]
    else:
        code, number = next(iter(known.ids.items()))
        form = str(tokenizer.convert_ids_to_tokens(number)).replace(code, "{}")
        codes |= {source for source, _ in directions if known.source_mark == "source"}
        on_source = not known.target_mark
        recorded = known.directions and (*known.directions, *directions)
    new = sorted(codes - (known.ids.keys() if known else set()))
    # special tokens are left out of decoded text, but not recognised in a text
    tokens = [
        AddedToken(form.format(code), rstrip=on_source, normalized=False, special=not on_source)
        for code in new
    ]
    tokenizer.add_tokens(tokens, special_tokens=not on_source)
    if TOKENS in settings:
        settings[TOKENS] = settings[TOKENS] | {code: form.format(code) for code in new}
    if recorded:
        settings[DIRECTIONS] = [list(pair) for pair in dict.fromkeys(map(tuple, recorded))]
    return new
