"""Files of shortlists, in the format of CTranslate2's vocabulary mapping, and how to build one.

Each line is a source token, a tab, and target tokens with spaces between them. The tokens of the line without a source
token are candidates of every sentence.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import Any

import torch

from ..data.side_tokens import tokens_of_sides
from ..data.source_text import source_text
from ..data.words import white_space_words, words
from ..engine.shortlist import Shortlist
from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError, check_at_least_one
from ..utils.untrusted import require_file
from .alignment import align, word_ranges
from .text_io import read_lines

_WINDOW = 4096  # pairs that are aligned together
_WRITABLE = re.compile(r"[^ \t\r\n]+")
_LINKS = re.compile(r"\s*(\d+-\d+\s*)*")


def read_shortlist(path: str | os.PathLike, translator: Any) -> Shortlist:
    """Read a shortlist for the model and the tokenizers of a translator.

    Raises:
        UserError: no such file, or a token that the model does not have.
    """
    source_tokens, target_tokens = tokens_of_sides(
        translator.model.config, translator.source_tokenizer, translator.target_tokenizer
    )
    source_ids = {token: index for index, token in enumerate(source_tokens)}
    target_ids = {token: index for index, token in enumerate(target_tokens)}
    always = _special_targets(translator)
    candidates: dict[int, list[int]] = {}
    for number, line in enumerate(read_lines(require_file(Path(path))), start=1):
        source, _, targets = line.partition("\t")
        try:
            ids = [target_ids[token] for token in targets.split(" ") if token]
            if source:
                candidates[source_ids[source]] = ids
            else:
                always.update(ids)
        except KeyError as error:
            problem = (
                f"{error} is no token of this model; build one with: vanilla-transformer shortlist"
            )
            raise UserError(f"shortlist: {path}, line {number}: {problem}") from None
    size = len(target_tokens)
    always_ids = torch.tensor(sorted(token for token in always if token < size))
    width = max(map(len, candidates.values()), default=1)
    # Rows are filled up with a candidate of every sentence.
    table = always_ids[0].repeat(len(source_tokens) + 1, width)
    for token, ids in candidates.items():
        table[token, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    return Shortlist(always_ids, table, size)


def _special_targets(translator: Any) -> set[int]:
    """The special tokens that every sentence may need, as in CTranslate2."""
    tokenizer = translator.target_tokenizer
    return {*translator.end_tokens, tokenizer.bos_token_id, tokenizer.unk_token_id} - {None}


def write_shortlist(
    translator: Any,
    pairs: Iterable[tuple[str, str]],
    path: str | os.PathLike,
    alignment: str | os.PathLike | None = None,
    best: int = 100,
    frequent: int = 1000,
) -> int:
    """Count which target tokens are aligned with each source token, write a shortlist, and return its source tokens.

    Args:
        translator: its tokenizers split the text, and its model aligns it if there is no file of alignments.
        pairs: sentences with their translations, such as the training data.
        path: the file. It appears when it is complete.
        alignment: a file with a line for each pair, as fast_align, eflomal and awesome-align write it: `0-0 1-2` links
            words between white space, counted from 0.
        best: candidates of each source token, at most.
        frequent: the most frequent target tokens, which are candidates of every sentence.

    Raises:
        UserError: a number below 1, or a file of alignments that does not fit the pairs.
    """
    check_at_least_one(best=best, frequent=frequent)
    counts: dict[int, Counter[int]] = {}
    totals: Counter[int] = Counter()
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    split = words if alignment is None else white_space_words
    for source, target, links in _aligned(translator, pairs, alignment):
        totals.update(target)
        sources = word_ranges(tokenizers[0], source, "source", split)
        targets = word_ranges(tokenizers[1], target, "target", split)
        for i, j in product(range(len(source)), range(len(target))):
            if not links.isdisjoint(product(sources[i], targets[j])):
                counts.setdefault(source[i], Counter())[target[j]] += 1
    names = tokens_of_sides(translator.model.config, *tokenizers)
    writable = [
        {i for i, name in enumerate(names[side]) if _WRITABLE.fullmatch(name)}
        - {*tokenizers[side].all_special_ids}
        for side in (0, 1)
    ]
    ranked = {"": totals.most_common(frequent)}
    ranked |= {
        names[0][token]: counts[token].most_common(best)
        for token in sorted(writable[0] & counts.keys())
    }
    with (
        atomic_file(Path(path)) as temporary,
        open(temporary, "w", encoding="utf-8", newline="\n") as stream,
    ):
        for name, candidates in ranked.items():
            stream.write(
                f"{name}\t{' '.join(names[1][token] for token, _ in candidates if token in writable[1])}\n"
            )
    return len(ranked) - 1


def _aligned(
    translator: Any, pairs: Iterable[tuple[str, str]], alignment: str | os.PathLike | None
) -> Iterator[tuple[list[int], list[int], set[Any]]]:
    """Token ids of each pair, and the links of its words."""
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    encoded = (
        (
            tokenizers[0](source_text(source, tokenizers[0]), truncation=True)["input_ids"],
            tokenizers[1](text_target=target, truncation=True)["input_ids"],
        )
        for source, target in pairs
    )
    if alignment is not None:
        for number, (pair, line) in enumerate(
            zip_longest(encoded, read_lines(require_file(Path(alignment)))), start=1
        ):
            if pair is None or line is None or not _LINKS.fullmatch(line):
                raise UserError(
                    f"alignment: {alignment}, line {number}: each pair needs a line such as 0-0 1-2"
                )
            yield *pair, {tuple(map(int, link.split("-"))) for link in line.split()}
        return
    while window := list(islice(encoded, _WINDOW)):
        sources, targets = zip(*window, strict=True)
        links = align(translator.model, *tokenizers, sources, targets, words=words)
        yield from zip(sources, targets, map(set, links), strict=True)
