"""The normalisation rules of a SentencePiece model, as steps of the tokenizers library that give the same text.

SentencePiece replaces the longest sequence that has a rule, then the next one. `Precompiled` of the library replaces
single characters right, but takes the shortest rule in a short cluster, drops its rest, and has no rule for a longer
cluster. So a mark goes before each character that may belong to a cluster, and each is replaced alone. Then the marks
inside the sequences that SentencePiece composes go, NFC composes these sequences, and the other marks go.
"""

import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import permutations

import torch
from tokenizers import Regex, normalizers

# noncharacters, which Unicode leaves to programs: no text of a file contains them
_APART = "\ufdd0"  # before a character that may join the one before it
_INSIDE = "\ufdd1"  # before such a character, if it is part of a replacement
# Characters that never do: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, punctuation, kana, Han, Hangul.
_ALONE = (
    " -~\u00a0-\u02ff\u0370-\u0482\u048a-\u052f\u05d0-\u05ea\u0620-\u064a\u0904-\u0939\u0e01-\u0e30"
    "\u1e00-\u1fff\u2010-\u2027\u3001-\u3029\u3041-\u3096\u30a1-\u30ff\u3400-\u9fff\uac00-\ud7a3\uff01-\uff60"
)
ALONE = re.compile(f"[{_ALONE}]")
_LAST_COMPOSED = 0x20000  # the planes above have no character that NFC composes

_LABEL = 0x800000FF  # of a unit in the trie: its byte, and the bit of a value
_PROBED = 1 << 12  # nodes at once


class Charsmap:
    """The rules of `precompiled_charsmap`: the double-array trie of Darts, then the replacements."""

    def __init__(self, content: bytes) -> None:
        size = int.from_bytes(content[:4], "little")
        self.units = struct.unpack_from(f"<{size // 4}I", content, 4)
        self.replacements = content[4 + size :]

    def get(self, sequence: str) -> str | None:
        """The replacement of a sequence, or None if it has no rule."""
        node = 0
        for byte in sequence.encode():
            node ^= _offset(self.units[node]) ^ byte
            if node >= len(self.units) or self.units[node] & _LABEL != byte:
                return None
        return self._value(node) if self.units[node] >> 8 & 1 else None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The sequences and their replacements."""
        units = torch.tensor(self.units)
        labels = torch.arange(1, 256)
        level, keys = torch.tensor([0]), [b""]
        while len(level):
            found, longer = [], []
            for start in range(0, len(level), _PROBED):
                nodes = level[start : start + _PROBED]
                unit = units[nodes]
                offsets = (unit >> 10) << ((unit & (1 << 9)) >> 6)
                children = (nodes ^ offsets)[:, None] ^ labels
                there = units[children.clamp(max=len(units) - 1)] & _LABEL
                hits = (there == labels) & (children < len(units))
                found.append(children[hits])
                for row, column in hits.nonzero().tolist():
                    longer.append(keys[start + row] + bytes([column + 1]))
            level, keys = torch.cat(found), longer
            for node, key in zip(level.tolist(), keys, strict=True):
                if self.units[node] >> 8 & 1:
                    yield key.decode(), self._value(node)

    def _value(self, node: int) -> str:
        start = self.units[node ^ _offset(self.units[node])] & 0x7FFFFFFF
        return self.replacements[start : self.replacements.index(b"\0", start)].decode()


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)


def charsmap_steps(content: bytes) -> list[normalizers.Normalizer]:
    """Normalizers with the effect of a `precompiled_charsmap`."""
    charsmap = Charsmap(content)
    steps = [
        # one at the start of a text would put the library's alignments out
        normalizers.Replace(Regex(f"(?<=[\\s\\S])(?=[^{_ALONE}])"), _APART),
        normalizers.Precompiled(content),
    ]
    if composed := _composed_by(charsmap):
        inside = Regex(f"(?<=[^{_APART}])(?=[^{_ALONE}{_APART}])")
        steps.append(normalizers.Replace(inside, _INSIDE))
        join = normalizers.Replace(Regex(composed), "")
        steps += [join, normalizers.NFC(), normalizers.Replace(_INSIDE, "")]
    return [*steps, normalizers.Replace(_APART, "")]


def _composed_by(charsmap: Charsmap) -> str:
    """A pattern of the mark between characters that the rules compose as NFC does."""
    by_length: dict[int, list[str]] = {}
    for sequence, composed in _compositions():
        is_kept = all(charsmap.get(character) in (None, character) for character in sequence)
        if is_kept and charsmap.get(sequence) == composed:
            by_length.setdefault(len(sequence), []).append(sequence)
    places = []
    for sequences in by_length.values():
        for *before, last in _classes(sequences):
            behind = "".join(f"[{letters}]{_APART}" for letters in before)
            places.append(f"(?<={behind})(?=[{last}])")
    return f"{_APART}(?:{'|'.join(places)})" if places else ""


def _classes(sequences: Iterable[str]) -> list[tuple[str, ...]]:
    """The characters for each place. All their combinations together are these sequences, of one length."""
    tails: dict[str, set[str]] = {}
    for sequence in sequences:
        tails.setdefault(sequence[0], set()).add(sequence[1:])
    firsts: dict[tuple[str, ...], str] = {}
    for first, after in tails.items():
        key = tuple(sorted(after))
        firsts[key] = firsts.get(key, "") + first
    return [
        (letters, *rest)
        for after, letters in firsts.items()
        for rest in (_classes(after) if after != ("",) else [()])
    ]


@cache
def _compositions() -> list[tuple[str, str]]:
    """The sequences that NFC composes to one character, and this character."""
    found = {}
    for number in range(_LAST_COMPOSED):
        composed = chr(number)
        base, *marks = list(unicodedata.normalize("NFD", composed))
        if not marks or unicodedata.normalize("NFC", composed) != composed:
            continue
        for order in permutations(marks):
            for taken in range(len(marks)):
                start = unicodedata.normalize("NFC", "".join([base, *order[:taken]]))
                sequence = start + "".join(order[taken:])
                if len(start) == 1 and unicodedata.normalize("NFC", sequence) == composed:
                    found[sequence] = composed
    return list(found.items())


def changed_rule(content: bytes) -> str | None:
    """A sequence for which `charsmap_steps` gives other characters than its rule, or None.

    A composed form and one in parts are the same characters, as are both cases: rules that fold case write a Greek
    letter in parts with its iota. So are characters newer than Python's Unicode.
    """
    normalizer = normalizers.Sequence(charsmap_steps(content))
    for sequence, replacement in Charsmap(content):
        given = normalizer.normalize_str(sequence)
        is_new = any(unicodedata.category(character) == "Cn" for character in sequence)
        if given != replacement and _folded(given) != _folded(replacement) and not is_new:
            return sequence
    return None


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
