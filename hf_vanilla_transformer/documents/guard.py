"""Check a translated document before it is written: nothing is lost, invented or broken.

A second reader of the format, which shares no code with the one that finds the passages, reads the document before and
after. Three things must hold, otherwise the file is refused by name:

1. The translated document is read again, and has the markup of its source.
2. Its text has the letters of the source, less those of the passages, plus those of their translations.
3. No passage has an empty translation.

A link or an emphasis that has no text after, but had some before, is still in the file. A warning counts these.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..inference.placement import TranslatedPart, TranslateTexts
from ..inference.protected import has_words
from ..utils.errors import UserError

logger = logging.getLogger(__name__)

Document = TypeVar("Document", str, bytes)


@dataclass
class Reading:
    """The blocks, the markup and the text that a reader finds in a document."""

    order: list[Hashable] = field(default_factory=list)  #: blocks, and what stays in its place
    markup: Counter[Hashable] = field(default_factory=Counter)  #: what may move with its words
    letters: Counter[str] = field(default_factory=Counter)  #: of the text that may change
    empty: int = 0  #: links and emphases without text

    def add_text(self, text: str) -> None:
        self.letters.update(letters_of(text))


def letters_of(text: str) -> Counter[str]:
    """The letters and digits of a text. White space and escapes depend on the format."""
    return Counter(filter(str.isalnum, text))


def guarded(
    document: Document,
    translated: Callable[[Document, TranslateTexts], Document],
    translate: TranslateTexts,
    read: Callable[[Document], Reading],
    fills: bool = False,
) -> Document:
    """Translate a document, and check the result with a second reader.

    Args:
        document: the document.
        translated: translates the document by a function that translates texts.
        translate: translates texts.
        read: the second reader.
        fills: whether a translation stands next to its source, and not in its place.

    Raises:
        UserError: the reader disagrees with the passages, or the translation would change more than their text.
    """
    before = read(document)
    sources: list[str] = []
    targets: list[str] = []

    def recorded(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        sources.extend(texts)
        if not fills:
            _check_passages(before, texts)
        answers = translate(texts)
        targets.extend("".join(part.target for part in parts) for parts in answers)
        _check_targets(sources, targets)
        return answers

    result = translated(document, recorded)
    removed = [] if fills else sources
    _check_result(before, read(result), removed, targets)
    return result


def _check_passages(before: Reading, texts: Sequence[str]) -> None:
    """Before anything is translated: the second reader has found all that the passages have."""
    missing = letters_of("".join(texts)) - before.letters
    if missing:
        raise _refusal(f"two readers disagree on its text, by {_named(missing)}")


def _check_targets(sources: Sequence[str], targets: Sequence[str]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if has_words(source) and not target.strip():
            raise _refusal(f"the translation of {source[:60]!r} is empty")


def _check_result(
    before: Reading, after: Reading, sources: Sequence[str], targets: Sequence[str]
) -> None:
    pairs = zip([*before.order, None], [*after.order, None], strict=False)
    changed = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if changed is not None:
        raise _refusal(f"its translation would have {_short(changed[1])}, not {_short(changed[0])}")
    lost = before.markup - after.markup
    invented = after.markup - before.markup
    if lost or invented:
        kind = "lose" if lost else "add"
        raise _refusal(f"its translation would {kind} {_short(next(iter(lost or invented)))}")
    letters = Counter(before.letters)
    letters.subtract(letters_of("".join(sources)))
    letters.update(letters_of("".join(targets)))
    if after.letters != letters:
        missing = letters - after.letters
        kind = "lose" if missing else "add"
        raise _refusal(f"its translation would {kind} {_named(missing or after.letters - letters)}")
    if after.empty > before.empty:
        logger.warning(
            "documents: %d links or emphases have no text in the translation",
            after.empty - before.empty,
        )


class Refused(UserError):
    """The translation of a document would change more than its text."""


def _refusal(reason: str) -> Refused:
    return Refused(f"documents: this file is not translated: {reason}")


def _named(letters: Counter[str]) -> str:
    return f"{letters.total()} letters ({''.join(sorted(letters))[:40]})"


def _short(item: object) -> str:
    words = item if isinstance(item, tuple) else (item,)
    return repr(" ".join(str(word) for word in words)[:80])
