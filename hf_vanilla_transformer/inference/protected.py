"""Spans of a sentence that no model should translate, such as addresses, placeholders and times.

They leave the sentence before the search, and return verbatim at the place that word alignment gives them.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..text.words import WordSplitter, white_space_words, words
from .alignment import Link
from .placement import Element, Placement, TranslatedPart, is_letter
from .span_patterns import SIGN, SPAN

_BRACKETS = {"(": ")", "[": "]", '"': '"', "“": "”"}
_JOINING = ("-", "–", "/", ":", ".", ",", "&", "=", "+", "~", "|")

#: Markup that separates words, and that of a block.
BLOCK_TAG = r"</?(?:br|p|div|li|[uo]l|d[ltd]|h[1-6]|t[rdh]|hr|blockquote)(?![\w-])[^<>]*>"
_SPACING = re.compile(
    rf"(?:&(?:nbsp|ensp|emsp|thinsp|#160|#xa0);|\\[nrt]|{BLOCK_TAG})+", re.IGNORECASE
)
_OF_MOSES = re.compile(r"(?:&(?:amp|apos|quot|lt|gt|#91|#93|#124);)+")
_CLOSING = frozenset(".,;:!?)]}»”’'\"…。，、；：！？")
_OPENING = frozenset("([{«„“‘'\"¿¡")


def has_words(text: str) -> bool:
    """Return whether a text has a letter outside protected spans. A number alone, a rule or an address has none."""
    rest = ""
    position = 0
    for start, end in spans_in(text):
        rest += text[position:start]
        position = end
    return _has_letter(rest + text[position:])


def _has_letter(text: str) -> bool:
    """Return whether a text has a letter. Numerals such as ½, ² and Ⅳ are none."""
    return any(map(str.isalpha, text))


def spans_in(text: str) -> list[tuple[int, int]]:
    """The starts and ends of the protected spans of a text, with the brackets or quotation marks around them."""
    if SIGN.search(text) is None:
        return []
    spans: list[tuple[int, int]] = []
    last = 0
    while match := SPAN.search(text, last):
        start = match.start()
        end = _joined_end(text, start, len(text))
        closing = _BRACKETS.get(text[start - 1]) if start > last else None
        # an address may go on after the bracket, as in [https://a.org](a)
        for inner in (text.find(closing, start), end) if closing else ():
            if text[inner : inner + 1] == closing and _joined_end(text, start, inner) == inner:
                start -= 1
                end = inner + 1
                break
        spans.append((start, end))
        last = end
    return spans


def _joined_end(text: str, start: int, limit: int) -> int:
    """The end of the spans from `start` on that touch, or have one sign between them."""
    end = start
    while True:
        joined = (
            SPAN.match(text, end + 1, limit)
            if end > start and text[end : end + 1] in _JOINING
            else None
        )
        match = joined or SPAN.match(text, end, limit)
        if match is None:
            return end
        end = match.end()


@dataclass(frozen=True)
class Protected:
    """A sentence without its spans."""

    sentence: str  #: with its spans
    text: str  #: for the model
    spans: list[Element]  #: with the white space that left the sentence with them
    lengths: list[int]  #: how much shorter each span makes `text`

    def restore(self, translation: str, links: Sequence[Link] | None) -> tuple[str, list[Link]]:
        """The translation with every span exactly once, and its word alignment with the sentence.

        Args:
            translation: the translation of `text`.
            links: its (source word, target word) pairs, of `text.words.words`. None aligns by order.
        """
        placement = Placement(
            self.text, [TranslatedPart(self.text, translation, links)], self.spans
        )
        numbers = {id(span): number for number, span in enumerate(self.spans)}
        removed = [0, *accumulate(self.lengths)]  # characters before each span
        restored = ""
        position = 0
        inserts = [(0, 0)]  # a place in the translation, and the characters inserted up to it
        # Linked characters of the sentence and the restored translation.
        pairs: list[tuple[int, int]] = []
        placed = list(placement.places())
        for place, next_place in zip(placed, [*placed[1:], None], strict=True):
            restored += translation[position : place.opens]
            position = place.opens
            number = numbers[id(place.element)]
            opening = place.element.opening
            core = opening.strip()
            start = place.element.start + removed[number] + opening.index(core)
            end = start + len(core)
            following = translation[position : position + 1]
            if self.lengths[number] < len(opening):  # an entity for a space
                position += following.isspace()
            else:
                restored += self._space_before(restored[-1:], start)
            pairs += [(start + begin, len(restored) + begin) for begin, _ in words(core)]
            restored += core
            is_touched = next_place is not None and next_place.opens == position
            right = self.text[place.element.start :][:1]
            if position == place.opens and not is_touched:
                restored += self._space_after(following, end, right)
            inserts.append((place.opens, len(restored) - position))
        restored += translation[position:]
        pairs += self._linked_characters(translation, links, removed, inserts)
        return restored, word_links(pairs, self.sentence, restored)

    def _space_before(self, last: str, start: int) -> str:
        """The space between the last character of the translation and a span, as in the sentence."""
        left = self.sentence[:start].rstrip()
        space = self.sentence[len(left) : start]
        if not last.strip() or (last in _OPENING and last != left[-1:]):
            return ""
        is_new = is_letter(last) and not is_letter(left[-1:])
        return space or (" " if is_new else "")

    def _space_after(self, following: str, end: int, right: str) -> str:
        """The space between a span and the next character. `right` is the next one in the text."""
        after = self.sentence[end:].lstrip()
        space = self.sentence[end : len(self.sentence) - len(after)]
        if is_letter(following) and not is_letter(self.sentence[end : end + 1]):
            return space or " "
        is_apart = following not in _CLOSING or following == right
        return space if following.strip() and is_apart else ""

    def _linked_characters(
        self,
        translation: str,
        links: Sequence[Link] | None,
        removed: Sequence[int],
        inserts: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[int, int]]:
        """The starts of linked words in the sentence and in the restored translation."""
        sources = _starts(self.text, words)
        targets = _starts(translation, words)
        starts = [span.start for span in self.spans]
        places = [place for place, _ in inserts[1:]]
        if links is None:
            links = list(zip(range(len(sources)), range(len(targets)), strict=False))
        for i, j in links:
            if i < len(sources) and j < len(targets):
                in_sentence = sources[i] + removed[bisect_right(starts, sources[i])]
                _, inserted = inserts[bisect_right(places, targets[j])]
                yield in_sentence, targets[j] + inserted


def knows_escapes(vocabulary: Iterable[str]) -> bool:
    """Return whether a model was trained on text that Moses has escaped, in which &apos; and &quot; are words."""
    tokens = {token.strip("Ġ▁ ") for token in vocabulary}
    return {"apos", "quot"} <= tokens or any(
        "&apos" in token or "&quot" in token for token in tokens
    )


def protect(sentence: str, escaped: bool = False) -> Protected | None:
    """Take the spans out of a sentence. None if there are none, or nothing besides.

    If `escaped`, the characters that Moses escapes are words of the model, see `knows_escapes`.
    """
    text = ""
    position = 0
    spans: list[Element] = []
    lengths: list[int] = []
    for start, end in spans_in(sentence):
        opening = sentence[start:end]
        if escaped and _OF_MOSES.fullmatch(opening):
            continue
        text += sentence[position:start]
        position = end
        after = sentence[position : position + 1]
        # No space between this span and the one before.
        follows = spans and spans[-1].start == len(text)
        if (
            not follows
            and text[-1:].isspace()
            and (not after or after.isspace() or after in _CLOSING)
        ):
            before = text.rstrip()
            opening = text[len(before) :] + opening
            text = before
        elif not text.strip() and after.isspace():
            space = sentence[end : len(sentence) - len(sentence[end:].lstrip())]
            position += len(space)
            opening += space
        spans.append(Element(opening, len(text), end=len(text)))
        blank = " " if _SPACING.fullmatch(opening) and text[-1:].strip() and after.strip() else ""
        lengths.append(len(opening) - len(blank))
        text += blank
    text += sentence[position:]
    return Protected(sentence, text, spans, lengths) if spans and _has_letter(text) else None


def word_links(
    pairs: Iterable[tuple[int, int]], source: str, target: str, split: WordSplitter = words
) -> list[Link]:
    """The links between the words that contain linked characters."""
    sources = _starts(source, split)
    targets = _starts(target, split)
    return sorted({(bisect_right(sources, i) - 1, bisect_right(targets, j) - 1) for i, j in pairs})


def white_space_links(links: Iterable[Link], source: str, target: str) -> list[Link]:
    """Links between words of `text.words.words` as links between words that white space separates."""
    sources = _starts(source, words)
    targets = _starts(target, words)
    return word_links(
        [(sources[i], targets[j]) for i, j in links], source, target, white_space_words
    )


def _starts(text: str, split: WordSplitter) -> list[int]:
    return [start for start, _ in split(text)]
