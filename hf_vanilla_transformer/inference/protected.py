"""Spans of a sentence that no model should translate, such as addresses, placeholders and times.

They leave the sentence before the search, and return verbatim at the place that word alignment gives them.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .alignment import UNSPACED, WHITE_SPACE_WORD, WORD, Link
from .placement import Element, Placement, TranslatedPart, is_letter

_ADDRESS_END = r"(?<![.,;:!?'’”»\]}*_])"
_ADDRESS = rf"(?:[^\s<>\"()\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]|\([^\s()]*\))+{_ADDRESS_END}"

#: Letters that touch one of these belong to it, as in {count}th.
_IN_WORDS = (
    rf"(?:https?://|ftp://|(?<![A-Za-z0-9])www\.){_ADDRESS}",
    r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    r"[$#@%]?\{\{?\s*(?:[\w.$@#/^ \[\]-]*(?:[:!,|](?:[^{}]|\{[^{}]*\})*)?)\}\}?",  # {name}, {{ x }}, {n, plural, …}
    r"%\([^()\s]*\)[a-zA-Z]|%[A-Za-z_]\w+%(?!%)|%%",
    r"(?<![\d%])%(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[jtz])?[sdiufFeEgGxXocp@]",
    r"&[A-Za-z](?:acute|grave|circ|uml|tilde|cedil|ring|slash|caron|lig);|&szlig;",
    r"`[^`\n]+`",
    r"(?<![\d:.])\d{1,2}:\d\d(?::\d\d)?(?![\d:])",  # a time
)
_BETWEEN_WORDS = (
    r"</?[A-Za-z][^<>]*>|&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z]\w*);",
    r"(?<![A-Za-z0-9_:]):[a-z][a-z0-9_+-]+:(?![A-Za-z0-9_:])",  # an emoji by name
    "[0-9#*]\ufe0f?\u20e3|"
    "[\u231a-\u23ff\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001faff][\u200d\ufe0f\u20e3\U000e0020-\U000e007f]*",
)
_LETTERS = rf"[^\W{UNSPACED}\uac00-\ud7af]"
_IN_WORD = f"(?:{'|'.join(_IN_WORDS)})"
_ANY = rf"(?:(?<!{_LETTERS}){_LETTERS}*{_IN_WORD}(?:{_LETTERS}*{_IN_WORD})*{_LETTERS}*|{'|'.join(_BETWEEN_WORDS)})"
_JOINED = rf"{_ANY}(?:[-–/:.,&=+~|]?{_ANY})*"
_SPAN = re.compile("|".join([rf"\({_JOINED}\)", rf"\[{_JOINED}\]", rf"\"{_JOINED}\"", rf"“{_JOINED}”", _JOINED]))

#: A character of every span, so that a sentence without spans costs no more than this search.
_SIGN = re.compile(r"[{%<&@`:\u231a-\u23ff\u2600-\u27bf\u2b50\u2b55\ufe0f\u20e3\U0001f000-\U0001faff]")
_LETTER = re.compile(r"[^\W\d_]")

_SPACE_ENTITIES = frozenset(["&nbsp;", "&#160;", "&#xa0;", "&#xA0;", "&ensp;", "&emsp;", "&thinsp;"])
_CLOSING, _OPENING = frozenset(".,;:!?)]}»”’'\"…。，、；：！？"), frozenset("([{«„“‘'\"¿¡")


def has_words(text: str) -> bool:
    """Whether a text has a letter outside protected spans. A number alone, a rule or an address has none."""
    return _LETTER.search(_SPAN.sub("", text) if _has_sign(text) else text) is not None


def _has_sign(text: str) -> bool:
    return _SIGN.search(text) is not None or "www." in text


@dataclass(frozen=True)
class Protected:
    """A sentence without its spans."""

    sentence: str  #: with its spans
    text: str  #: for the model
    spans: list[Element]  #: with the white space that left the sentence with them
    lengths: list[int]  #: how much shorter each span makes `text`

    def restore(self, translation: str, links: Sequence[Link] | None) -> tuple[str, list[Link]]:
        """The translation with every span exactly once, and the alignment of its words with those of the sentence.

        Args:
            translation: of `text`.
            links: (source word, target word) of it, words as `alignment.WORD` matches them. None aligns by order.
        """
        placement = Placement(self.text, [TranslatedPart(self.text, translation, links)], self.spans)
        numbers = {id(span): number for number, span in enumerate(self.spans)}
        restored, position = "", 0
        insertions: list[tuple[int, int]] = []  # position in the translation, number of characters
        pairs: list[tuple[int, int]] = []  # linked characters of the sentence and the restored translation
        for place in placement.places():
            restored += translation[position : place.opens]
            position, length, opening = place.opens, len(restored), place.element.opening
            number, core = numbers[id(place.element)], opening.strip()
            start = place.element.start + sum(self.lengths[:number]) + opening.index(core)
            before, after = self.sentence[:start][-1:], self.sentence[start + len(core) :][:1]
            following = translation[position : position + 1]
            if self.lengths[number] < len(opening):  # an entity for a space
                position += following.isspace()
            elif restored[-1:].strip() and restored[-1] not in _OPENING:
                restored += " " if before.isspace() or (is_letter(restored[-1]) and not is_letter(before)) else ""
            pairs += [(start + word.start(), len(restored) + word.start()) for word in WORD.finditer(core)]
            restored += core
            if position == place.opens and is_letter(following) and not is_letter(after):
                restored += " "
            insertions.append((place.opens, len(restored) - length - (position - place.opens)))
        restored += translation[position:]
        sources, targets = _starts(self.text, WORD), _starts(translation, WORD)
        for i, j in links if links is not None else zip(range(len(sources)), range(len(targets)), strict=False):
            if i < len(sources) and j < len(targets):
                moved = sum(length for at, length in insertions if at <= targets[j])
                pairs.append((self._in_sentence(sources[i]), targets[j] + moved))
        return restored, word_links(pairs, self.sentence, restored, WORD)

    def _in_sentence(self, position: int) -> int:
        """The position in the sentence of a character of `text`."""
        before = zip(self.spans, self.lengths, strict=True)
        return position + sum(length for span, length in before if span.start <= position)


def protect(sentence: str) -> Protected | None:
    """Take the spans out of a sentence. None if there are none, or nothing besides."""
    if not _has_sign(sentence):
        return None
    text, position = "", 0
    spans: list[Element] = []
    lengths: list[int] = []
    for match in _SPAN.finditer(sentence):
        text += sentence[position : match.start()]
        position, opening = match.end(), match[0]
        after = sentence[position : position + 1]
        if text[-1:].isspace() and (not after or after.isspace() or after in _CLOSING):
            text, opening = text[:-1], text[-1] + opening
        elif not text.strip() and after.isspace():
            position, opening = position + 1, opening + after
        spans.append(Element(opening, len(text), end=len(text)))
        blank = " " if opening in _SPACE_ENTITIES and text[-1:].strip() and after.strip() else ""
        lengths.append(len(opening) - len(blank))
        text += blank
    text += sentence[position:]
    return Protected(sentence, text, spans, lengths) if spans and _LETTER.search(text) else None


def word_links(
    pairs: Iterable[tuple[int, int]], source: str, target: str, words: "re.Pattern[str]" = WHITE_SPACE_WORD
) -> list[Link]:
    """The links between the words that contain linked characters."""
    sources, targets = _starts(source, words), _starts(target, words)
    return sorted({(bisect_right(sources, i) - 1, bisect_right(targets, j) - 1) for i, j in pairs})


def white_space_links(links: Iterable[Link], source: str, target: str) -> list[Link]:
    """Links between words of `alignment.WORD` as links between words that white space separates."""
    sources, targets = _starts(source, WORD), _starts(target, WORD)
    return word_links([(sources[i], targets[j]) for i, j in links], source, target)


def _starts(text: str, words: "re.Pattern[str]") -> list[int]:
    return [word.start() for word in words.finditer(text)]
