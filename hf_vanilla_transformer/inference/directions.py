"""The direction of each sentence, for a model of many languages."""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, product, repeat, starmap

from transformers import PreTrainedTokenizerBase

from ..text.language_tokens import CODES, Direction, encode_targets, known_code, language_tokens
from ..utils.errors import UserError

Codes = str | Iterable[str] | None
# The number of a line, for messages, and the direction of its sentence.
PlacedDirection = tuple[int, Direction]


class Directions:
    """The languages of a model, and the direction of sentences without their own.

    A model of one direction has no language tokens. Nothing is marked then, and only its own direction can be named.
    `forced` is the `forced_bos_token_id` of the generation config.
    """

    def __init__(
        self,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        forced: int | None = None,
    ):
        self.source = language_tokens(source_tokenizer)
        self.target = language_tokens(target_tokenizer, "target")
        self.default: Direction = (None, None)
        self.unmarked = False  # whether a text needs no mark
        self._names = (
            _setting(source_tokenizer, "source_lang") or _setting(source_tokenizer, "src_lang"),
            _setting(source_tokenizer, "target_lang") or _setting(source_tokenizer, "tgt_lang"),
        )
        if self.source is None or self.target is None:
            return
        pairs = self.source.directions
        source, target = pairs[0] if len(pairs) == 1 else self._names
        for code, number in self.target.ids.items():
            if number == forced:
                target = code
        # OPUS models of one target language, which has two letters, may have its token, or those of its scripts, and
        # translate without one. Groups of languages have more letters
        is_converted = self.source.source_mark == "target" and not self.source.directions
        name = self._names[1]
        self.unmarked = is_converted and (len(self.source.ids) == 1 or len(name or "") == 2)
        if self.unmarked or target not in self.target.ids:
            target = None
        self.default = (source, target)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of codes of the training, or all pairs if they are unknown. Empty for a model of one direction."""
        if self.source is None or self.target is None:
            return []
        if self.source.directions:
            return list(self.source.directions)
        every = product(self._sources, self.target.ids)
        return [(source, target) for source, target in every if source != target]

    @property
    def _sources(self) -> Collection[str]:
        """The source languages, if the tokenizers tell. Marks of a target do not."""
        assert self.source is not None
        if self.source.directions:
            return {source for source, _ in self.source.directions}
        is_named = self.source.source_mark == "target" and self._names[0] is not None
        return [str(self._names[0])] if is_named else self.source.ids

    @property
    def chosen(self) -> Direction:
        """The default direction, or the first one if a text needs a mark and there is no default."""
        if self.default[1] or self.unmarked or not self.pairs:
            return self.default
        return self.pairs[0]

    @property
    def prefix_length(self) -> int:
        """Tokens of `prefix`."""
        return int(self.target is not None and self.target.target_mark)

    @property
    def needs_target(self) -> bool:
        """Whether the target language of each sentence must be named. The text of OPUS models may have its mark."""
        if self.target is None or self.default[1] is not None:
            return False
        return self.target.target_mark or bool(self.target.directions)

    def completed(self, source_lang: str | None, target_lang: str | None) -> Direction:
        """The direction with a missing code: that of the only trained pair with the other code, or the default."""
        codes = source_lang, target_lang
        if self.source is not None and any(codes) and not all(codes):
            fitting = [
                pair
                for pair in self.source.directions
                if all(
                    not code or known_code(code, [own])
                    for code, own in zip(codes, pair, strict=True)
                )
            ]
            if len(fitting) == 1:
                return fitting[0]
        return source_lang or self.default[0], target_lang or self.default[1]

    def changed(self, source_lang: str | None, target_lang: str | None) -> "Directions":
        """The same languages with this default. None keeps the one that there is, or the one of the only pair."""
        self.check((source_lang, target_lang))
        other = copy.copy(self)
        other.default = self.completed(source_lang, target_lang)
        return other

    def check(self, direction: Direction) -> Direction:
        """Return the direction, or raise a UserError if the model lacks a language. Untrained pairs are permitted."""
        if self.source is None or self.target is None:
            for name, code, known in zip(CODES, direction, self._names, strict=True):
                if code is not None and code != known:
                    raise UserError(
                        f"{name}: {code}: this model has one direction, and its tokenizer_config.json names no "
                        "language_tokens"
                    )
            return direction
        if direction[1] is not None:
            self.target.check(direction[1], "target_lang")
        if direction[0] is not None and known_code(direction[0], self._sources) is None:
            self.source.check(direction[0], "source_lang")
        return direction

    def each(self, source_lang: Codes, target_lang: Codes) -> Iterator[Direction]:
        """The direction of each sentence. Codes for all sentences are checked at once, and have no end."""
        for_all = isinstance(source_lang, str | None) and isinstance(target_lang, str | None)
        sources, targets = _repeated(source_lang), _repeated(target_lang)
        directions = starmap(self.completed, zip(sources, targets, strict=False))
        if for_all:
            self.check(next(directions))
        return map(self.check, directions)

    def mark(self, ids: Sequence[int], direction: Direction, line_number: int) -> list[int]:
        """The ids of a source with the mark of its direction. A UserError if neither names a target."""
        if self.source is None:
            return list(ids)
        if direction[1] is None and not self.unmarked and not self.source.is_marked(ids):
            raise UserError(
                f"line {line_number}: target_lang: the model has several: {self.source.listed}; give one"
            )
        return self.source.source(ids, direction)

    def prefix(self, direction: Direction) -> list[int]:
        """The first ids of a translation in this direction."""
        return [] if self.target is None else self.target.target(direction)

    def encode_targets(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        directions: Sequence[Direction],
        ends: bool = True,
    ) -> list[list[int]]:
        """The ids of translations, each with the mark of its language, and with an end token if `ends`."""
        rows = encode_targets(tokenizer, texts, add_special_tokens=ends)
        if self.target is None:
            return rows
        return [
            self.target.translation(row, direction)
            for row, direction in zip(rows, directions, strict=True)
        ]

    def marks(self, source_lang: Codes, target_lang: Codes) -> frozenset[int]:
        """The ids that are not text of a source. A mark in the text is a word of it."""
        codes = (source_lang, target_lang, *self.default)
        if self.source is None or all(code is None for code in codes):
            return frozenset()
        return frozenset(self.source.ids.values())


def next_places(places: Iterator[PlacedDirection], count: int) -> list[PlacedDirection]:
    """The places of the next sentences.

    Raises:
        UserError: there are fewer codes than sentences.
    """
    taken = list(islice(places, count))
    if len(taken) < count:
        raise UserError(f"source_lang, target_lang: {count - len(taken)} sentences have no code")
    return taken


def _repeated(codes: Codes) -> Iterator[str | None]:
    return repeat(codes) if isinstance(codes, str | None) else iter(codes)


def _setting(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    value = getattr(tokenizer, name, None) or tokenizer.init_kwargs.get(name)
    return value if isinstance(value, str) else None
