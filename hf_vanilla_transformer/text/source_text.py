"""The normalisation of source text: characters that look the same become the same before they are tokenized.

It applies to the source alone, in training and in translation, if the tokenizer was trained by this package for text
in a language. Target text, the stored tokenizers and their decoding do not change. Tokenizers of other origin have
other rules.
Exported folders contain `normalizing` tokenizers, because programs that use them tokenize sources only.
"""

import copy
import re
import unicodedata

from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase

# NFKC would put a space before these spacing accents. SentencePiece keeps the full-width tilde, too.
_KEPT = re.compile(
    "([¨¯´¸\u02d8-\u02dd\u037a\u0384\u0385\u1fbd\u1fbf-\u1fc1\u1fcd-\u1fcf\u1fdd-\u1fdf\u1fed\u1fee\u1ffd\u1ffe\u2017"
    "\u203e\ufc5e-\ufc63\ufdfa\ufdfb\ufe49-\ufe4c\ufe70\ufe72\ufe74\ufe76\ufe78\ufe7a\ufe7c\ufe7e\uff5e\uffe3]+)"
)
#: Patterns, in the syntax of Python, Rust and JavaScript, and their replacements: spaces, controls, then soft hyphens,
#: marks of direction, and joiners and the Mongolian vowel separator after Latin, Greek and Cyrillic letters.
#: A space of no width, or a byte order mark, is a space between letters, and nothing next to a space or a sign.
_HYPHENS = ("[\u2010-\u2012\u2212]|(?<=\\w)\u2013(?=\\w)", "-")
_STEPS = (
    ("[\t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u2581\ufffd]", " "),
    ("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]", ""),
    ("[\u00ad\u034f\u061c\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069]", ""),
    ("(?<=[\x00-\u058f])[\u180e\u200c\u200d]", ""),
    ("(?<=\\w)[\u200b\ufeff]+(?=\\w)", " "),
    ("[\u200b\ufeff]", ""),
    _HYPHENS,
)
#: Characters that one of these patterns can match, so that other text costs one search.
_CHANGED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00a0\u00ad\u034f\u061c\u1680\u180e\u2000-\u2013\u2028-\u202f\u205f-\u206f\u2212\u2581\u3000"
    "\ufeff\ufffd]"
)


def normalize(text: str) -> str:
    """Normalise text like SentencePiece's `nmt_nfkc`, and hyphens and invisible characters in addition.

    - NFKC: composed accents, full-width forms, ligatures, and all Unicode spaces as the space;
    - hyphens, the minus sign, and dashes between letters or digits are "-";
    - control characters, soft hyphens and invisible marks are removed. Joiners stay where a script needs them.
    """
    for pattern, replacement in _STEPS:
        text = re.sub(pattern, replacement, text)
    if not unicodedata.is_normalized("NFKC", text):
        pieces = _KEPT.split(text)
        pieces[::2] = [unicodedata.normalize("NFKC", piece) for piece in pieces[::2]]
        text = re.sub(*_HYPHENS, "".join(pieces))
    return text


#: Apostrophes, accents and primes that people type for "'".
_APOSTROPHES = re.compile("[\u2018\u2019\u201b\u02bc\u2032`\xb4]")


def spelling(text: str) -> str:
    """The spelling of a word for models of phonemes: `normalize`, "'" for other apostrophes, no surrounding space."""
    return _APOSTROPHES.sub("'", normalize(text)).strip()


def source_text(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text to tokenize: normalised if the tokenizer says so (`normalizes_source`)."""
    if text.isascii() and text.isprintable():
        return text
    if not _CHANGED.search(text) and unicodedata.is_normalized("NFKC", text):
        return text
    return normalize(text) if normalizes_source(tokenizer) else text


def normalizing(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The tokenizers of a model. If its source is normalised, the source's is a copy that does it itself.

    If both are the same object, they are the same copy.
    """
    if not normalizes_source(source):
        return source, target
    kept = [
        (letter, chr(0x100000 + ord(letter)))
        for letter in map(chr, range(2**16))
        if _KEPT.match(letter)
    ]
    there, back = (
        [normalizers.Replace(*pair) for pair in pairs] for pairs in (kept, map(reversed, kept))
    )
    *steps, hyphens = (
        normalizers.Replace(Regex(pattern.replace(r"\w", r"[\p{L}\p{N}_]")), replacement)
        for pattern, replacement in (*_STEPS, _HYPHENS)
    )
    duplicate = copy.deepcopy(source)
    backend = duplicate.backend_tokenizer
    parts = [*steps, *there, normalizers.NFKC(), *back, hyphens, backend.normalizer]
    backend.normalizer = normalizers.Sequence([part for part in parts if part is not None])
    duplicate.init_kwargs["normalize_source"] = False
    return duplicate, duplicate if target is source else target


def normalizes_source(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the source text of a tokenizer is normalised: `normalize_source` of tokenizer_config.json.

    Folders from before that field are recognised by the parts of their tokenizers.
    """
    stored = getattr(tokenizer, "init_kwargs", {}).get("normalize_source")
    if stored is not None:
        return bool(stored)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = repr(getattr(backend, "normalizer", None))
    pre_tokenizer = repr(getattr(backend, "pre_tokenizer", None))
    return 'Prepend(prepend=" ")' in normalizer and "ByteLevel" in pre_tokenizer
