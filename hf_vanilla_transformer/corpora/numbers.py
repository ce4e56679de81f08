"""A corpus that needs no download: numbers spelled out in two languages by `num2words`."""

import random

from datasets import Dataset, DatasetDict
from num2words import CONVERTER_CLASSES, num2words

from ..utils.errors import UserError

_SMALL = (range(10), range(10, 100))  # of one digit, of two


def number_pairs(
    size: int,
    seed: int,
    source_lang: str = "en",
    target_lang: str = "de",
    held_out: int = 1000,
    maximum: int = 999_999,
) -> DatasetDict:
    """Spell numbers in two languages: "two hundred and thirty-four", "zweihundertvierunddreißig".

    Each number of three digits or more occurs once. Every number of digits gets the same share if it has enough
    numbers: a uniform sample of a million numbers would have 900,000 with six digits and hardly any with two.

    The words of the numbers below 100 make up all others. Where there are enough longer numbers, they are not held
    out. In a large `train` those of one digit are a twentieth, and those of two as well, so that each occurs many
    times: what an epoch shows once among 20,000 is not learnt.

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
    rng = random.Random(seed)
    repeated: list[int] = []
    for values in _SMALL:
        times = max(1, size // (20 * len(values)))
        repeated += [number for number in values if number <= maximum] * (times - 1)
    numbers = _draw(size - len(repeated) + 2 * held_out, maximum, rng)
    first_long = _SMALL[-1].stop
    # Sorting is stable: the longer numbers stay in random order.
    numbers.sort(key=lambda number: number < first_long)
    train = numbers[2 * held_out :] + repeated
    rng.shuffle(train)
    parts = {
        "train": train,
        "validation": numbers[held_out : 2 * held_out],
        "test": numbers[:held_out],
    }
    splits = {}
    for split, part in parts.items():
        sources = [num2words(number, lang=source_lang) for number in part]
        targets = [num2words(number, lang=target_lang) for number in part]
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
