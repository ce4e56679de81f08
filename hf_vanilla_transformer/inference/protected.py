"""Spans of a sentence that no model should translate, such as addresses, placeholders and times.

They leave the sentence before the search, and return verbatim at the place that word alignment gives them.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..data.words import UNSPACED, WordSplitter, white_space_words, words
from .alignment import Link
from .placement import Element, Placement, TranslatedPart, is_letter

_ADDRESS_END = r"(?<![.,;:!?'’”»\]}*_])"
_ADDRESS = (
    rf"(?:[^\s<>\"(){UNSPACED}\u3000-\u303f\uac00-\ud7af\uff00-\uffef]|\([^\s()]*\))+{_ADDRESS_END}"
)

_LETTERS = rf"[^\W{UNSPACED}\uac00-\ud7af]"
_EMOJI = "\u2190-\u21ff\u2300-\u257f\u25a0-\u27bf\u2b00-\u2bff\U0001f000-\U0001fbff"  # without ▁, which starts a piece
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"

#: Letters that touch one of these belong to it, as in {count}th.
_IN_WORDS = (
    rf"(?<![A-Za-z0-9])(?:[A-Za-z][A-Za-z0-9+.-]{{1,15}}://|www\.|(?:tel|sms|urn|sip|xmpp):(?=\S)){_ADDRESS}",
    # names of files and folders, hosts with a path, numbers of hosts, UUIDs
    rf"(?<![A-Za-z0-9_.~/\\])(?:[A-Za-z]:[\\/](?=[A-Za-z0-9_])|\\\\(?=[A-Za-z0-9_])|~/|\.\.?/(?=[A-Za-z0-9_])){_ADDRESS}",
    r"(?<![A-Za-z0-9_.~/<)\]])/[A-Za-z_.][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_.*-]+)+(?<![.,])",
    rf"(?<![A-Za-z0-9_./@-])(?:[A-Za-z0-9-]+\.)+[A-Za-z]{{2,}}/(?=[A-Za-z0-9_~?#]){_ADDRESS}",
    r"(?<![A-Za-z0-9_./-])(?:[A-Za-z_][A-Za-z0-9_-]*/)+[A-Za-z0-9_-]+\.[a-z][a-z0-9]{0,4}(?![A-Za-z0-9_/])",
    r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\d.]\d)",
    r"(?<![A-Za-z0-9_-])[\da-fA-F]{8}(?:-[\da-fA-F]{4}){3}-[\da-fA-F]{12}(?![A-Za-z0-9_-])",
    # LaTeX and escapes
    r"\\\((?:[^\\]|\\(?!\))){0,60}\\\)|\\\[(?:[^\\]|\\(?!\])){0,60}\\\]|\\\([A-Za-z0-9_.]+\)",
    rf"(?<![A-Za-z0-9])\\(?![nrt](?![a-z]))[A-Za-z]+\*?(?:\[[^\[\]]*\])*(?:\{{{_NESTED}\}})*",
    r"(?<![A-Za-z0-9_$])\$(?![ \d])(?=[^$\n]*[\\^_={}])[^$\n]{1,200}(?<! )\$(?![A-Za-z0-9_$])",
    r"(?<![A-Za-z0-9])(?:mailto:)?[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    # {name}, {{ x }}, {n, plural, …}
    r"[$#@%€£¥]?(?:\{{2,3}[^{}]*\}{2,3}"
    rf"|\{{(?!\\)\{{?\s*[\w.$@#/^\\ \[\]-]*(?:[:!,|]{_NESTED})?\}}\}}?)(?:[°€£¥]|%(?![A-Za-z0-9_%({{+#'*@-]|\.\d))?",
    r"\[\[[^\[\]]*\]\]",
    r"(?<![A-Za-z0-9])\$(?:[A-Za-z_]\w*(?:\([^()\s]*\))?|\([A-Za-z_]\w*\))",
    r"(?<![A-Za-z0-9_/@.])@[A-Za-z_](?:[A-Za-z0-9_./@-]*[A-Za-z0-9_])?(?::[A-Za-z0-9-]+\.[A-Za-z]+)?",
    rf"(?<![A-Za-z0-9_&#/])#(?!\d){_LETTERS}+",
    r"(?<![A-Za-z0-9_:/)\]]):[A-Za-z_][A-Za-z0-9_]*(?![A-Za-z0-9_:])",
    r"%%[A-Za-z_]\w*%%|%(?:\([^()\s]*\)|<\w+>)[-+#0]*\d*(?:\.\d+)?[a-zA-Z]|%[A-Za-z_]\w+%(?!%)|%%",
    r"(?<![\d%])%(?:\d+\$)?[-+#0'_^]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[jtzqL]|I64)?[A-Za-z@]",
    r"(?<![\d%])%[1-9](?!\d)",
    r"&[A-Za-z](?:acute|grave|circ|uml|tilde|cedil|ring|slash|caron|lig);|&szlig;",
    r"```[^`\n]+```|``(?!\s)[^`\n]+(?:`[^`\n]+)*``|`(?![\s`])[^`\n]+`",
    # a time
    r"(?:(?<!\d)\d{4}-\d\d-\d\dT|(?<![\d:.]))\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:Z\b|[+-]\d\d:\d\d)?(?![\d:])",
)
_BETWEEN_WORDS = (
    r"\{\\[A-Za-z][^{}]*\}",  # a format of subtitles, such as {\i1}
    r"\[/[A-Za-z][\w-]*\]|\[[biusq]\]|\[[A-Za-z][\w-]*(?:=| [\w-]+=)[^\[\]]+\]",  # BBCode
    r"</?[A-Za-z][^<>]*>|</?\d+/?>|<[@#!:&][^<>\s]+>|<%[^%]*%>|<\?[^?]*\?>|\{%[^{}]*%\}|\*\|[^|\s]+\|\*",
    r"&lt;/?[A-Za-z][^<>&]*&gt;|&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z]\w*);",
    r"(?<![A-Za-z0-9_:]):[a-z+-][a-z0-9_+-]*:(?![A-Za-z0-9_:])",  # an emoji by name
    r"(?<!\S)[:;]['’]?-?[()DPp](?![\w()])|\\[nrt](?![a-z])",
    rf"[0-9#*]\ufe0f?\u20e3|(?:[{_EMOJI}]|[^\w\s]\ufe0f)[\u200d\ufe0f\u20e3\U000e0020-\U000e007f]*",
)
_IN_WORD = f"(?:{'|'.join(_IN_WORDS)})"
_ANY = rf"(?:(?<!{_LETTERS}){_LETTERS}*{_IN_WORD}(?:{_LETTERS}*{_IN_WORD})*{_LETTERS}*|{'|'.join(_BETWEEN_WORDS)})"
_JOINED = rf"{_ANY}(?:[-–/:.,&=+~|]?{_ANY})*"
_SPAN = re.compile(
    "|".join([rf"\({_JOINED}\)", rf"\[{_JOINED}\]", rf"\"{_JOINED}\"", rf"“{_JOINED}”", _JOINED])
)

#: A character of every span, so that a sentence without spans costs no more than this search.
_SIGN = re.compile(
    rf"[{{%<&@`:;#$/\\\ufe0f\u20e3{_EMOJI}]|\[[\[/A-Za-z]|\*\||\d\.\d+\.\d|[\da-fA-F]-[\da-fA-F]{{4}}-"
)

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
    return _has_letter(_SPAN.sub("", text) if _has_sign(text) else text)


def _has_letter(text: str) -> bool:
    """Return whether a text has a letter. Numerals such as ½, ² and Ⅳ are none."""
    return any(map(str.isalpha, text))


def _has_sign(text: str) -> bool:
    return _SIGN.search(text) is not None or "www." in text


def spans_in(text: str) -> list[tuple[int, int]]:
    """The starts and ends of the protected spans of a text."""
    return [match.span() for match in _SPAN.finditer(text)] if _has_sign(text) else []


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
            links: its (source word, target word) pairs, of `data.words.words`. None aligns by order.
        """
        placement = Placement(
            self.text, [TranslatedPart(self.text, translation, links)], self.spans
        )
        numbers = {id(span): number for number, span in enumerate(self.spans)}
        removed = [0, *accumulate(self.lengths)]  # characters before each span
        restored = ""
        position = 0
        places = list[int]()
        moved = [0]  # of the spans in the translation, and characters inserted up to each
        # Linked characters of the sentence and the restored translation.
        pairs: list[tuple[int, int]] = []
        placed = list(placement.places())
        for place, next_place in zip(placed, [*placed[1:], None], strict=True):
            restored += translation[position : place.opens]
            position = place.opens
            length = len(restored)
            opening = place.element.opening
            number = numbers[id(place.element)]
            core = opening.strip()
            start = place.element.start + removed[number] + opening.index(core)
            before = self.sentence[:start][-1:]
            after = self.sentence[start + len(core) :][:1]
            following = translation[position : position + 1]
            left = self.sentence[:start].rstrip()[-1:]
            right = self.text[place.element.start :][:1]
            if self.lengths[number] < len(opening):  # an entity for a space
                position += following.isspace()
            elif restored[-1:].strip() and (restored[-1] not in _OPENING or restored[-1] == left):
                restored += (
                    " "
                    if before.isspace() or (is_letter(restored[-1]) and not is_letter(before))
                    else ""
                )
            pairs += [(start + begin, len(restored) + begin) for begin, _ in words(core)]
            restored += core
            apart = (
                after.isspace()
                and following.strip()
                and (following not in _CLOSING or following == right)
            )
            touches = position > place.opens or (
                next_place is not None and next_place.opens == position
            )
            if not touches and (apart or (is_letter(following) and not is_letter(after))):
                restored += " "
            places.append(place.opens)
            moved.append(moved[-1] + len(restored) - length - (position - place.opens))
        restored += translation[position:]
        sources = _starts(self.text, words)
        targets = _starts(translation, words)
        starts = [span.start for span in self.spans]
        for i, j in (
            links
            if links is not None
            else zip(range(len(sources)), range(len(targets)), strict=False)
        ):
            if i < len(sources) and j < len(targets):
                in_sentence = sources[i] + removed[bisect_right(starts, sources[i])]
                pairs.append((in_sentence, targets[j] + moved[bisect_right(places, targets[j])]))
        return restored, word_links(pairs, self.sentence, restored)


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
    if not _has_sign(sentence):
        return None
    text = ""
    position = 0
    spans: list[Element] = []
    lengths: list[int] = []
    for match in _SPAN.finditer(sentence):
        if escaped and _OF_MOSES.fullmatch(match[0]):
            continue
        text += sentence[position : match.start()]
        position = match.end()
        opening = match[0]
        after = sentence[position : position + 1]
        # No space between this span and the one before.
        follows = spans and spans[-1].start == len(text)
        if (
            not follows
            and text[-1:].isspace()
            and (not after or after.isspace() or after in _CLOSING)
        ):
            text, opening = text[:-1], text[-1] + opening
        elif not text.strip() and after.isspace():
            position = position + 1
            opening = opening + after
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
    """Links between words of `data.words.words` as links between words that white space separates."""
    sources = _starts(source, words)
    targets = _starts(target, words)
    return word_links(
        [(sources[i], targets[j]) for i, j in links], source, target, white_space_words
    )


def _starts(text: str, split: WordSplitter) -> list[int]:
    return [start for start, _ in split(text)]
