"""Files of shortlists, in the format of CTranslate2's vocabulary mapping, and how to build one.

Each line is a source token, a tab, and target tokens with spaces between them. The tokens of the line without a source
token are candidates of every sentence.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from ..engine.shortlist import Shortlist
from ..text.side_tokens import tokens_of_sides
from ..text.words import words
from ..utils.errors import UserError
from ..utils.untrusted import require_file
from .alignment import Link, align, word_ranges
from .text_io import input_lines, line_writer

_WINDOW = 4096  # pairs that are aligned together
BEST = 100  # candidates of each source token, at most
FREQUENT = 1000  # target tokens that are candidates of every sentence
_WRITABLE = re.compile(r"[^ \t\r\n]+")


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
    for number, line in enumerate(input_lines(require_file(Path(path))), start=1):
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
) -> int:
    """Count which target tokens are aligned with each source token, write a shortlist, and return its source tokens.

    Args:
        translator: its tokenizers split the text, and its model aligns it.
        pairs: sentences with their translations, such as the training data.
        path: the file. It appears when it is complete.

    Raises:
        UserError: no token of the text is aligned.
    """
    counts: dict[int, Counter[int]] = {}
    totals: Counter[int] = Counter()
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    for source, target, links in _aligned(translator, pairs):
        totals.update(target)
        source_words = word_ranges(tokenizers[0], source, "source", words)
        target_words = word_ranges(tokenizers[1], target, "target", words)
        for i, j in product(range(len(source)), range(len(target))):
            if not links.isdisjoint(product(source_words[i], target_words[j])):
                counts.setdefault(source[i], Counter())[target[j]] += 1
    names = tokens_of_sides(translator.model.config, *tokenizers)
    writable = [
        {i for i, name in enumerate(names[side]) if _WRITABLE.fullmatch(name)}
        - {*tokenizers[side].all_special_ids}
        for side in (0, 1)
    ]
    ranked = {"": totals.most_common(FREQUENT)}
    ranked |= {
        names[0][token]: counts[token].most_common(BEST)
        for token in sorted(writable[0] & counts.keys())
    }
    if len(ranked) == 1:
        raise UserError(
            "shortlist: no token of the text is aligned: give pairs like the training data"
        )
    with line_writer(Path(path)) as write:
        for name, candidates in ranked.items():
            targets = [names[1][token] for token, _ in candidates if token in writable[1]]
            write(f"{name}\t{' '.join(targets)}")
    return len(ranked) - 1


def _aligned(
    translator: Any, pairs: Iterable[tuple[str, str]]
) -> Iterator[tuple[list[int], list[int], set[Link]]]:
    """Token ids of each pair, and the links of its words."""
    of_source = translator.source_tokenizer
    of_target = translator.target_tokenizer
    pairs = iter(pairs)
    while window := list(islice(pairs, _WINDOW)):
        sources = [
            of_source(translator.source_line(source), truncation=True)["input_ids"]
            for source, _ in window
        ]
        targets = [
            of_target(text_target=target, truncation=True)["input_ids"] for _, target in window
        ]
        links = align(translator.model, of_source, of_target, sources, targets, words=words)
        yield from zip(sources, targets, map(set, links), strict=True)
