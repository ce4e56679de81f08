"""Choose sacreBLEU's tokenizer by the script of the references."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from sacrebleu.metrics import BLEU

from ..utils.errors import UserError
from ..utils.untrusted import one_line

#: sacreBLEU's tokenizers for scripts in which its default, 13a, finds no words. Thai, Lao, Tibetan, Burmese and Khmer
#: have none that works without a download.
_SCRIPTS = {
    "ja-mecab": re.compile("[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f]"),  # kana
    "ko-mecab": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "zh": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "char": re.compile("[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff]"),
}
_LETTER = re.compile(r"[^\W\d_]")
_LINES = 20_000  # that choose the tokenizer
_PRESENT = 0.05  # of the lines: a script that the text has
# Share of lines without the script of the tokenizer. Each tokenizer splits a few Latin words as 13a does.
_MIXED = 0.3


def fitting_tokenizer(references: Sequence[str]) -> str:
    """Return sacreBLEU's tokenizer for the script of the references: 13a, zh, ja-mecab, ko-mecab or char.

    It is char, with a warning, for references of several scripts that have no tokenizer in common, and if the package
    of a tokenizer is missing.
    """
    name, mixed = _of_script(references)
    if mixed:
        warn_once(
            "the references have several scripts: BLEU is of characters; score each language apart"
        )
    try:
        check_tokenizer(name)
    except UserError as error:
        warn_once(f"{error}; BLEU is of characters until then")
        return "char"
    return name


def _of_script(references: Sequence[str]) -> tuple[str, bool]:
    """The tokenizer, and whether no other than char fits all lines."""
    lines = references[:: -(-len(references) // _LINES) or 1]
    counts = Counter(_of_line(line) for line in lines if _LETTER.search(line))
    present = {name for name, count in counts.items() if count >= _PRESENT * counts.total()}
    special = present - {"13a"}
    if not special:
        return "13a", False
    if special == {"ja-mecab", "zh"} and counts["zh"] <= 0.5 * counts["ja-mecab"]:
        special = {"ja-mecab"}  # short Japanese lines have no kana, but no other text has kana
    if len(special) > 1:
        return "char", True
    (name,) = special
    # zh separates Chinese characters, and splits the rest as 13a does.
    mixed = name != "zh" and counts["13a"] >= _MIXED * counts.total()
    return ("char", True) if mixed else (name, False)


def _of_line(text: str) -> str:
    counts = {name: len(script.findall(text)) for name, script in _SCRIPTS.items()}
    # A fifth is enough: one such letter stands for several Latin ones, and 13a is right for the rest in each of them.
    if 5 * sum(counts.values()) <= len(_LETTER.findall(text)):
        return "13a"
    # Japanese text has Chinese characters too, but no other text has kana.
    return (
        "ja-mecab"
        if counts["ja-mecab"] > 0.1 * counts["zh"]
        else max(counts, key=lambda each: counts[each])
    )


@lru_cache
def check_tokenizer(name: str) -> None:
    """Check that sacreBLEU can load a tokenizer, before hours of decoding."""
    if name not in BLEU.TOKENIZERS:
        raise UserError(
            f"tokenize: sacreBLEU has no tokenizer {name!r}; choose one of {', '.join(BLEU.TOKENIZERS)}"
        )
    try:
        BLEU(tokenize=name)
    # if a tokenizer needs a package or a download, sacreBLEU raises exceptions of many types
    except Exception as error:
        reason = one_line(error)
        raise UserError(
            f"tokenize: sacreBLEU cannot use {name!r} here ({reason}); install it or take 'char'"
        ) from error


@lru_cache  # not at every evaluation of a training run
def warn_once(message: str) -> None:
    """Log a warning that was not logged before."""
    logging.getLogger(__name__).warning("%s", message)
