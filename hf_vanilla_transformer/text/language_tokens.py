"""The tokens that tell a model of many languages the languages of a sentence.

With `>>deu<<` (OPUS-MT; Johnson et al. 2017, arXiv 1611.04558) the source starts with the token of the target
language. With `__de__` (M2M-100) or `deu_Latn` (NLLB-200) the translation starts with it, and the source has the token
of its own language. Models that are trained here have one token, on either side.

A token is that of a language if the tokenizer's class says so (Marian, M2M-100, NLLB, mBART), or its
tokenizer_config.json: `language_tokens` has the token of each code, and `language_marks` the language that a source is
marked with, "source", "target" or null, and whether a translation starts with the token of its language. A token that
only looks like one, such as `__end__` or `[Ring1]`, is text.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from transformers import AddedToken, MarianTokenizer, NllbTokenizer, PreTrainedTokenizerBase

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
#: tokens by code.
DIRECTIONS = "directions"
MARKS = "language_marks"
RECORDED_TOKENS = "language_tokens"

# Tokens that are added here, before a source and at the start of a translation.
_ON_SOURCE = ">>{}<<"
_ON_TARGET = "__{}__"
_NLLB_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")  # of FLORES-200
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
        in_text: whether the tokenizer recognises the tokens in a text.
    """

    ids: Mapping[str, int]
    source_mark: str | None
    target_mark: bool
    at_end: bool = False
    directions: tuple[tuple[str, str], ...] = ()
    in_text: bool = True

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
        where = f"line {line_number}: >>{code}<<"
        if self.check(code, where) != code or self.source_mark != "target":
            raise UserError(f"{where}: the model does not read this mark; give target_lang")

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
    """The language tokens of a tokenizer, or None if it has none. `side` is of one with two vocabularies.

    Raises:
        UserError: tokenizer_config.json names a token that is missing or has another role, or no `language_marks`.
    """
    settings = tokenizer.init_kwargs
    marks = settings.get(MARKS)
    of_class = _tokens_of_class(tokenizer)
    recorded = recorded_tokens(settings)
    tokens = of_class | recorded
    ids = _ids_of(tokenizer, tokens, side)
    for code, token in recorded.items():
        if code not in ids:
            raise UserError(
                f"tokenizer_config.json: {RECORDED_TOKENS}: {code}: {shown(token)} is no token, or has another role"
            )
        if marks is None and not of_class:
            raise UserError(
                f'tokenizer_config.json: {RECORDED_TOKENS} needs {MARKS}, such as ["target", false] for >>de<< before '
                "a source"
            )
    if not ids:
        return None
    is_marian = isinstance(tokenizer, MarianTokenizer)
    source_mark, target_mark = marks or (("target", False) if is_marian else ("source", True))
    return LanguageTokens(
        ids,
        source_mark,
        target_mark,
        # mBART's class, and NLLB's in its legacy way
        at_end=len(getattr(tokenizer, "suffix_tokens", None) or ()) > 1,
        directions=tuple((source, target) for source, target in settings.get(DIRECTIONS) or ()),
        in_text=is_marian or tokenizer.get_added_vocab().keys() >= {*tokens.values()},
    )


def tokens_by_language(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The token of each language that the class of the tokenizer knows, or its tokenizer_config.json."""
    return _tokens_of_class(tokenizer) | recorded_tokens(tokenizer.init_kwargs)


def recorded_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The token of each language that tokenizer_config.json has a record of."""
    if RECORDED_TOKENS in settings or MARKS not in settings:
        return dict(settings.get(RECORDED_TOKENS) or {})
    # Models that were trained here before the tokens were recorded have one form each.
    form = _ON_TARGET if settings[MARKS][1] else _ON_SOURCE
    return {target: form.format(target) for _, target in settings.get(DIRECTIONS) or ()}


def _tokens_of_class(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The token of each language that the class of the tokenizer knows."""
    if isinstance(tokenizer, MarianTokenizer):
        # As its `supported_language_codes`, which is empty if source and target have a vocabulary each.
        tokens = tokenizer.get_vocab()
        return {token[2:-2]: token for token in tokens if token[:2] == ">>" and token[-2:] == "<<"}
    if isinstance(tokenizer, NllbTokenizer):
        special = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
        return {token: token for token in special if _NLLB_CODE.fullmatch(token)}
    # M2M-100 has tokens of other names than mBART's.
    tokens = getattr(tokenizer, "lang_code_to_token", {})
    return {code: tokens.get(code, code) for code in getattr(tokenizer, "lang_code_to_id", ())}


def _ids_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str], side: Side
) -> dict[str, int]:
    """The token id of each language, without tokens that are missing or have another role."""
    vocabulary = target_vocabulary(tokenizer) if tokens and side == "target" else None
    numbers = {token: number for number, token in (vocabulary or {}).items()}
    ids = {
        code: numbers.get(name, tokenizer.convert_tokens_to_ids(name))
        for code, name in tokens.items()
    }
    roles = {getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES} - {None}
    taken = {None, *tokenizer.convert_tokens_to_ids(sorted(map(str, roles)))}
    return {code: number for code, number in ids.items() if number not in taken}


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
        form = _ON_SOURCE if on_source else _ON_TARGET
        recorded = directions
        settings[MARKS] = ["target", False] if on_source else [None, True]
    else:
        code = next(iter(known.ids))
        form = tokens_by_language(tokenizer)[code].replace(code, "{}")
        codes |= {source for source, _ in directions if known.source_mark == "source"}
        on_source = not known.target_mark
        recorded = known.directions and (*known.directions, *directions)
    new = {
        code: form.format(code) for code in sorted(codes - (known.ids.keys() if known else set()))
    }
    # special tokens are left out of decoded text, but not recognised in a text
    added = [
        AddedToken(token, rstrip=on_source, normalized=False, special=not on_source)
        for token in new.values()
    ]
    tokenizer.add_tokens(added, special_tokens=not on_source)
    settings[RECORDED_TOKENS] = recorded_tokens(settings) | new
    if recorded:
        settings[DIRECTIONS] = [list(pair) for pair in dict.fromkeys(map(tuple, recorded))]
    return [*new]
