"""A corpus that needs no download: numbers spelled out in two languages by `num2words`."""

import random

from datasets import Dataset, DatasetDict
from num2words import CONVERTER_CLASSES, num2words

from ..utils.errors import UserError


def number_pairs(
    size: int,
    seed: int,
    source_lang: str = "en",
    target_lang: str = "de",
    held_out: int = 1000,
    maximum: int = 999_999,
) -> DatasetDict:
    """Spell numbers in two languages: "two hundred and thirty-four", "zweihundertvierunddreißig".

    Each number occurs once in the corpus. Every number of digits gets the same share if it has enough numbers: a
    uniform sample of a million numbers would have 900,000 with six digits and hardly any with two. The splits are
    random, so that short numbers are held out as often as long ones.

    Args:
        size: number of training pairs.
        seed: determines the corpus.
        source_lang, target_lang: languages of `num2words`, "en", "de", "fr", "pt_BR", ….
        held_out: number of pairs in each of `validation` and `test`, with numbers that `train` does not contain.
        maximum: the largest number. The smallest is 0.

    Returns:
        Splits `train`, `validation`, `test` with the columns `source` and `target`.

    Raises:
        UserError: a language that `num2words` does not support, or more pairs than there are numbers.
    """
    for language in (source_lang, target_lang):
        try:
            num2words(1, lang=language)
        except NotImplementedError:
            known = ", ".join(sorted(CONVERTER_CLASSES))
            raise UserError(
                f"num2words cannot spell numbers in {language!r}; it knows {known}"
            ) from None
    if size < 1 or held_out < 1:
        raise UserError(f"size is {size} and held_out is {held_out}; each must be at least 1")
    numbers = _draw(size + 2 * held_out, maximum, random.Random(seed))
    spelled = [
        (num2words(number, lang=source_lang), num2words(number, lang=target_lang))
        for number in numbers
    ]
    parts = {
        "train": spelled[2 * held_out :],
        "validation": spelled[held_out : 2 * held_out],
        "test": spelled[:held_out],
    }
    splits = {}
    for split, part in parts.items():
        sources, targets = map(list, zip(*part, strict=True))
        splits[split] = Dataset.from_dict({"source": sources, "target": targets})
    return DatasetDict(splits)


def _draw(count: int, maximum: int, rng: random.Random) -> list[int]:
    """Sample distinct numbers from 0 to `maximum`, the same share for each number of digits, in random order."""
    if count > maximum + 1:
        raise UserError(
            f"numbers_size: with held-out pairs {count:,} numbers, but 0 to {maximum:,} are {maximum + 1:,}"
        )
    digits = range(1, len(str(maximum)) + 1)
    ranges = [range(10 ** (n - 1) if n > 1 else 0, min(10**n, maximum + 1)) for n in digits]
    numbers: list[int] = []
    # the smallest range first: larger ones compensate for its missing numbers
    ranges.sort(key=len)
    for position, values in enumerate(ranges):
        share = -(-(count - len(numbers)) // (len(ranges) - position))
        numbers += rng.sample(values, min(share, len(values)))
    rng.shuffle(numbers)
    return numbers
