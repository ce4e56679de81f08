"""The Levenshtein distance of two sequences, with bits of an integer for a column of its matrix."""

from collections.abc import Hashable, Sequence


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the least number of insertions, deletions and substitutions that turn `first` into `second`.

    Source: Hyyrö 2003, "A Bit-Vector Algorithm for Computing Levenshtein and Damerau Edit Distances", Fig. 3.
    """
    if not first:
        return len(second)
    positions: dict[Hashable, int] = {}  # of each symbol in `first`, as bits
    for index, symbol in enumerate(first):
        positions[symbol] = positions.get(symbol, 0) | 1 << index
    every = (1 << len(first)) - 1
    last = 1 << (len(first) - 1)
    larger = every
    smaller = 0  # rows that are by 1 larger or smaller than the row above
    distance = len(first)
    for symbol in second:
        equal = positions.get(symbol, 0)
        diagonal = ((((equal & larger) + larger) ^ larger) | equal | smaller) & every
        grown = (smaller | ~(diagonal | larger)) & every
        shrunk = larger & diagonal
        distance += bool(grown & last) - bool(shrunk & last)
        grown = (grown << 1) | 1
        shrunk <<= 1
        larger = (shrunk | ~(diagonal | grown)) & every
        smaller = grown & diagonal & every
    return distance
