"""Put inline tags, placeholders and other text that is not translated where word alignment places it.

`text.words` finds the words. Units are the letters and the punctuation marks of a word, cut where an element starts
or ends.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import regex

from ..text.words import UNSPACED, Span, words
from .alignment import Link

_MAX_JOINED = 8  # elements whose words become one word
_MAX_UNITS = 16  # units of a word, but a longer word, such as an address, is one unit

# combining marks and joiners, which are no \w
_MARKS = (
    "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0711\u0730-\u074a\u07a6-\u07b0\u07eb-\u07f3"
    rf"\u0816-\u082d\u08d3-\u0dff\u200c\u200d{UNSPACED}"
)
# Letters, or one punctuation mark.
_UNIT = re.compile(rf"[\w{_MARKS}]+(?:[-'’][\w{_MARKS}]+)*|[^\w\s]")


@dataclass
class Element:
    """An inline element of a text, or a tag or placeholder alone, which has no end."""

    opening: str
    start: int  # in the text
    closing: str = ""
    end: int = 0
    children: list["Element"] = field(default_factory=list)
    name: str = ""  # of its kind. A kind is not nested in itself, as links are not


@dataclass(frozen=True)
class TranslatedPart:
    """A sentence of a text, or layout with equal texts and no links."""

    source: str
    target: str
    links: Sequence[Link] | None = None  # (source word, target word), counted from 0 in this part


#: Translates texts. The joined sources of the parts of each are the text.
TranslateTexts = Callable[[Sequence[str]], list[list[TranslatedPart]]]


@dataclass(frozen=True)
class _Unit:
    start: int
    end: int
    text: str

    @property
    def is_word(self) -> bool:
        return self.text[0].isalnum() or self.text[0] == "_"


@dataclass(frozen=True)
class Place:
    """An element's place in the translation: target units [first, last) and characters [opens, closes)."""

    element: Element
    first: int
    last: int
    opens: int
    closes: int


@dataclass
class _Shared:
    """Target units [first, last) and the elements of one kind that share their letters, in order."""

    elements: list[Element]
    first: int
    last: int
    joined: int = 1


class Placement:
    """Places the elements of a text in its translation, without overlap, each exactly once.

    An element that encloses text encloses some of the translation. If the words of several elements become one word,
    the later ones are placed inside the first one, and those of its kind share the letters of the word with it.

    Args:
        source: the text. Its elements are at its positions.
        parts: their sources joined are `source`.
        elements: the outermost ones.
    """

    def __init__(self, source: str, parts: Sequence[TranslatedPart], elements: list[Element]):
        self.source = source
        self.target = "".join(part.target for part in parts)
        self.root = Element("", 0, "", len(source), elements)
        self.sources: list[_Unit] = []
        self.targets: list[_Unit] = []
        self.linked: list[set[int]] = []  # for each source unit, its target units
        boundaries = sorted(set(_boundaries(elements)))
        source_start = target_start = 0
        for part in parts:
            self._add(part, source_start, target_start, boundaries)
            source_start = source_start + len(part.source)
            target_start = target_start + len(part.target)
        self.words = [number for number, unit in enumerate(self.targets) if unit.is_word]
        self.starts = [unit.start for unit in self.sources]
        self.ends = [unit.end for unit in self.sources]

    def places(self, parent: Place | None = None) -> Iterator[Place]:
        """The children of an element, or the outermost elements, in the order of the translation."""
        outer = parent or Place(self.root, 0, len(self.targets), 0, len(self.target))
        position = outer.opens
        for shared in self._spans(outer):
            first, last = shared.first, shared.last
            element = shared.elements[0]
            stands_left, ends_in_space = self._sides(element)
            following = self.targets[first].start if first < outer.last else outer.closes
            if stands_left:
                opens = self.targets[first - 1].end if first > outer.first else outer.opens
                opens = min(opens + self._spaces_before(element.start), following)
            else:
                opens = following
            opens = closes = min(max(opens, position), outer.closes)
            if ends_in_space:
                closes = self.targets[last].start if last < outer.last else outer.closes
            elif last > first:
                closes = self.targets[last - 1].end
            position = min(max(opens, closes), outer.closes)
            if len(shared.elements) == 1:
                yield Place(element, first, last, opens, position)
            else:
                yield from self._pieces(shared, opens, position)

    def _pieces(self, shared: _Shared, opens: int, closes: int) -> Iterator[Place]:
        """Divide the letters of a translation among elements. Each has the units that its letters touch."""
        ends = self._letter_ends(opens, closes)
        units = range(shared.first, shared.last)
        for number, element in enumerate(shared.elements, 1):
            end = ends[number * len(ends) // len(shared.elements) - 1]
            touched = [
                unit
                for unit in units
                if opens < self.targets[unit].end and self.targets[unit].start < end
            ] or units
            yield Place(element, touched[0], touched[-1] + 1, opens, end)
            opens = end

    def _letter_ends(self, start: int, end: int) -> list[int]:
        """Where the letters of a part of the translation end, each with its combining marks."""
        letters = regex.finditer(r"\s*(?=\S)\X", self.target[start:end])
        return [start + letter.end() for letter in letters]

    def _add(
        self, part: TranslatedPart, source_start: int, target_start: int, boundaries: list[int]
    ) -> None:
        """The units of a part, and the links between them."""
        sources = words(part.source)
        targets = words(part.target)
        links: dict[int, list[int]] = {}
        for i, j in [(i, i) for i in range(len(sources))] if part.links is None else part.links:
            if i < len(sources) and j < len(targets):
                links.setdefault(i, []).append(j)
        source_cuts: list[list[int]] = []
        target_cuts: list[set[int]] = [set() for _ in targets]
        for i, (begin, stop) in enumerate(sources):
            start = source_start + begin
            end = source_start + stop
            inside = boundaries[bisect_right(boundaries, start) : bisect_left(boundaries, end)]
            source_cuts.append([boundary - start for boundary in inside])
            for j in links.get(i, []):
                if part.source[begin:stop].casefold() == part.target[slice(*targets[j])].casefold():
                    target_cuts[j].update(source_cuts[i])
        numbers: list[list[int]] = []  # the target units of each target word
        for word, cuts in zip(targets, target_cuts, strict=True):
            units = _units(part.target, word, target_start, sorted(cuts))
            numbers.append(list(range(len(self.targets), len(self.targets) + len(units))))
            self.targets += units
        for i, word in enumerate(sources):
            units = _units(part.source, word, source_start, source_cuts[i])
            linked: list[set[int]] = [set() for _ in units]
            for j in links.get(i, []):
                for of_unit, aligned in zip(
                    linked, self._corresponding(units, numbers[j]), strict=True
                ):
                    of_unit.update(aligned)
            self.sources += units
            self.linked += linked
        # the full stop of a sentence is often attached to a different word
        if (
            sources
            and targets
            and not self.targets[-1].is_word
            and self.sources[-1].text == self.targets[-1].text
        ):
            self.linked[-1].add(len(self.targets) - 1)

    def _corresponding(self, units: list[_Unit], numbers: list[int]) -> list[list[int]]:
        """The target units that correspond to each unit of a word, among the units `numbers` of an aligned word.

        Units correspond by their order if both words have the same kinds of units. Otherwise letters correspond to
        letters, and punctuation to the same punctuation. If either has punctuation only, all units correspond.
        """
        others = [self.targets[number] for number in numbers]
        if [unit.is_word for unit in units] == [other.is_word for other in others]:
            return [[number] for number in numbers]
        alone = not any(unit.is_word for unit in units) or not any(
            other.is_word for other in others
        )
        return [
            [
                number
                for number, other in zip(numbers, others, strict=True)
                if alone or (unit.is_word and other.is_word) or unit.text == other.text
            ]
            for unit in units
        ]

    def _spans(self, outer: Place) -> list[_Shared]:
        """The children of an element with their target units, in the order of the translation, without overlap."""
        spans = []
        points = []  # (first, whether it does not belong to the unit before, order, last)
        for order, element in enumerate(outer.element.children):
            units = self._units_within(element)
            linked = (self.linked[unit] for unit in units)
            targets = sorted(
                {t for of_unit in linked for t in of_unit if outer.first <= t < outer.last}
            )
            if units and units == self._units_within(outer.element):
                spans.append((outer.first, True, order, outer.last))
            elif targets:
                spans.append((targets[0], True, order, targets[-1] + 1))
            elif units and outer.first < outer.last:
                nearest = self._nearest_word(self._place_of_point(element, outer), outer)
                spans.append((nearest, True, order, nearest + 1))
            else:
                points.append(
                    (self._place_of_point(element, outer), not self._sides(element)[0], order)
                )
        spans.sort()
        starts = [first for first, *_ in spans]
        for at, right, order in points:
            first, _, other, last = (
                spans[max(0, bisect_left(starts, at) - 1)] if starts else (at, True, 0, at)
            )
            if first < at < last:  # no element ends because of a point outside it
                at = first if order < other else last
            spans.append((at, right, order, at))
        spans.sort()
        disjoint: list[_Shared] = []
        enclosing: _Shared | None = None  # the one before, if it has units
        position = outer.first
        for index, (first, _, order, last) in enumerate(spans):
            element = outer.element.children[order]
            is_point = first == last
            first = max(first, position)
            following = spans[index + 1][0] if index + 1 < len(spans) else outer.last
            position = last = max(first, min(last, following) if following > first else last)
            is_lost = first == last and not is_point
            if is_lost and enclosing and self._is_joined(enclosing, element, outer):
                continue
            disjoint.append(_Shared([element], first, last))
            if first < last:
                enclosing = disjoint[-1]
        return disjoint

    def _is_joined(self, shared: _Shared, element: Element, outer: Place) -> bool:
        """Place an element on the units of others: after those of its kind if there are letters for all, or inside.

        Return False, and leave the element empty, if there are too many already.
        """
        owners = shared.elements
        letters = self._letter_ends(
            max(outer.opens, self.targets[shared.first].start),
            min(outer.closes, self.targets[shared.last - 1].end),
        )
        shared.joined += 1
        if shared.joined > _MAX_JOINED:
            return False
        if owners[0].name == element.name and len(owners) < len(letters):
            owners.append(element)
        else:
            owners[0] = replace(owners[0], children=[*owners[0].children, element])
        return True

    def _nearest_word(self, position: int, outer: Place) -> int:
        """A target unit of an element next to a position, a word if there is one."""
        number = bisect_left(self.words, position)
        near = self.words[max(0, number - 1) : number + 1]
        inside = [word for word in near if outer.first <= word < outer.last]
        return inside[-1] if inside else min(position, outer.last - 1)

    def _units_within(self, element: Element) -> range:
        """The source units that share a character with an element."""
        return range(bisect_right(self.ends, element.start), bisect_left(self.starts, element.end))

    def _sides(self, element: Element) -> tuple[bool, bool]:
        """Return whether an element follows the unit before it directly, and whether it ends after white space."""
        before = self.source[max(0, element.start - 1) : element.start]
        after = self.source[element.start : element.start + 1]
        if element.start < element.end:
            return after.isspace(), self.source[element.end - 1].isspace()
        between_words = is_letter(before) and is_letter(after)
        if not before.strip():
            return after.isspace(), False
        stands_left = not after.strip() or (is_letter(before) and not between_words)
        return stands_left, False

    def _spaces_before(self, position: int) -> int:
        return next(
            (n for n in range(position) if not self.source[position - n - 1].isspace()), position
        )

    def _place_of_point(self, element: Element, outer: Place) -> int:
        """The target unit that an element without aligned units precedes."""
        next_unit = bisect_left(self.starts, element.start)
        stands_left, _ = self._sides(element)
        before = range(next_unit - 1, -1, -1)
        for unit in before if stands_left else range(next_unit, len(self.linked)):
            if targets := [
                target for target in self.linked[unit] if outer.first <= target < outer.last
            ]:
                return max(targets) + 1 if stands_left else min(targets)
        return outer.first if stands_left else outer.last


def is_letter(character: str) -> bool:
    """Return whether a character belongs to a word of a script with spaces."""
    return character.isalnum() and not re.match(f"[{UNSPACED}]", character)


def _boundaries(elements: Iterable[Element]) -> Iterator[int]:
    for element in elements:
        yield from (element.start, element.end)
        yield from _boundaries(element.children)


def _units(text: str, word: Span, start: int, cuts: Sequence[int]) -> list[_Unit]:
    """The units of a word of a text that starts at position `start`.

    Args:
        cuts: positions in the word at which units end, sorted.
    """
    letters = text[slice(*word)]
    spans = [unit.span() for unit in _UNIT.finditer(letters)]
    if not 0 < len(spans) <= _MAX_UNITS:
        spans = [(0, len(letters))]
    units: list[_Unit] = []
    for begin, end in spans:
        points = [begin, *(cut for cut in cuts if begin < cut < end), end]
        for left, right in zip(points, points[1:], strict=False):
            at = start + word[0]
            units.append(_Unit(at + left, at + right, letters[left:right]))
    return units
