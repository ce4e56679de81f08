"""Vocabulary selection: the output layer computes only tokens a sentence may need (Jean et al. 2015, arXiv 1412.2007).

A shortlist is a file in the format of CTranslate2's vocabulary mapping. Each line is a source token, a tab, and target
tokens with spaces between them. The tokens of the line without a source token are candidates of every sentence.

Shapes: B sentences, K beams, S source length, V target vocabulary, n computed rows of the output layer.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..data.side_tokens import tokens_of_sides
from ..data.source_text import source_text
from ..data.words import white_space_words, words
from ..inference.alignment import align, word_ranges
from ..inference.text_io import read_lines
from ..search_vanilla_transformer import Advance, BeamState, Decoder
from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError, check_at_least_one
from ..utils.untrusted import require_file
from .int8_model import Int8Decoder
from .linear import packed_linear
from .packed_decoder import OutputRows, PackedDecoder
from .shared_copy import shared_copy

_ROW_UNIT = 256  # rows are a multiple of it: oneDNN compiles a kernel for each shape
_LEAST_SELECTED = 2**23  # elements of the output layer. The rows of a smaller one take longer to pack than to compute
_WINDOW = 4096  # pairs that are aligned together
_WRITABLE, _LINKS = re.compile(r"[^ \t\r\n]+"), re.compile(r"\s*(\d+-\d+\s*)*")
_DIGITS = (2**16, 2**8, 1)  # three digits of a token id are exact in every dtype


class Shortlist:
    """The target tokens that are candidates for each source token, from a file for the model of a translator."""

    def __init__(self, path: str | os.PathLike, translator: Any):
        tokenizers = translator.source_tokenizer, translator.target_tokenizer
        sides = tokens_of_sides(translator.model.config, *tokenizers)
        known = [{token: i for i, token in enumerate(tokens)} for tokens in sides]
        self.size, tokenizer = len(sides[1]), tokenizers[1]
        always = {*translator.end_tokens, tokenizer.bos_token_id, tokenizer.unk_token_id} - {None}  # as CTranslate2
        candidates: dict[int, list[int]] = {}
        for number, line in enumerate(read_lines(require_file(Path(path))), start=1):
            source, _, targets = line.partition("\t")
            try:
                ids = [known[1][token] for token in targets.split(" ") if token]
                candidates[known[0][source] if source else -1] = ids
            except KeyError as error:
                problem = f"{error} is no token of this model; build one with: vanilla-transformer shortlist"
                raise UserError(f"shortlist: {path}, line {number}: {problem}") from None
        always |= {*candidates.pop(-1, ())}
        self.always = torch.tensor(sorted(token for token in always if token < self.size))
        # a row for each source token, and an empty one for padding
        self.table = self.always[0].repeat(len(known[0]) + 1, max(map(len, candidates.values()), default=1))
        for token, ids in candidates.items():
            self.table[token, : len(ids)] = torch.tensor(ids, dtype=torch.long)

    def allowed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The candidates (B, V) of sources (B, S), True for those that the output layer computes."""
        rows = self.table[ids.masked_fill(mask == 0, len(self.table) - 1).cpu()].flatten(1)  # (B, S · N)
        allowed = torch.zeros(len(ids), self.size, dtype=torch.bool)
        allowed[:, self.always] = True
        return allowed.scatter_(1, rows, True).to(ids.device)


def with_shortlist(model: Any, shortlist: Shortlist) -> Any:
    """Return a copy of a model that shares its weights and searches with the shortlist."""
    copied = shared_copy(model)
    copied.inference_engine = ShortlistEngine(model, shortlist)
    return copied


class ShortlistEngine:
    """A wrapper of an inference engine. The ids of the source travel with its states, as three features."""

    search_only = True  # transformers' loops would compute all tokens

    def __init__(self, model: Any, shortlist: Shortlist):
        self.model, self.shortlist = model, shortlist
        self.quantization = getattr(model.inference_engine, "quantization", None)
        self.compile = getattr(model.inference_engine, "compile", False)

    def encode(self, model: Any, ids: Tensor, mask: Tensor) -> BaseModelOutput:
        states = self.model.encode(ids, mask).last_hidden_state
        digits = torch.stack([ids // digit % 256 for digit in _DIGITS], dim=-1)  # (B, S, 3)
        return BaseModelOutput(last_hidden_state=torch.cat([states, digits.to(states.dtype)], dim=-1))

    def decoder(self, model: Any, states: Tensor, mask: Tensor, beams: int, rows: int) -> Decoder:
        states, digits = states.tensor_split([-3], dim=-1)
        ids = (digits.long() * torch.tensor(_DIGITS, device=digits.device)).sum(dim=-1)  # (B, S)
        decoder = self.model.make_decoder(states.contiguous(), mask, beams, rows)
        return ShortlistDecoder(self, decoder, self.shortlist.allowed(ids, mask))


class ShortlistDecoder:
    """A `Decoder` whose logits are -inf for all but the candidates of each sentence, `allowed` (B, V).

    With packed weights only the rows of the output layer that the batch needs are computed.
    """

    def __init__(self, engine: ShortlistEngine, decoder: Any, allowed: Tensor):
        self.engine, self.decoder, self.initial_beams = engine, decoder, decoder.initial_beams
        self._allow(allowed)

    def _allow(self, allowed: Tensor) -> None:
        self.allowed, self.decoder.output = allowed, None

    def _rows(self) -> OutputRows:
        allowed = self.allowed
        if self.engine.model.lm_head.weight.numel() < _LEAST_SELECTED:
            whole = torch.arange(allowed.shape[1], device=allowed.device)
            return OutputRows(self.decoder.weights.lm_head, whole, ~allowed[:, None], len(whole))
        ids = allowed.any(dim=0).nonzero()[:, 0]
        padded = torch.cat([ids, ids.new_zeros(-len(ids) % _ROW_UNIT)])  # (n,)
        hidden = ~allowed[:, None, padded]  # (B, 1, n)
        hidden[..., len(ids) :] = True
        head, quantization = self.engine.model.lm_head, self.engine.quantization
        rows: Any = SimpleNamespace(weight=head.weight[padded], bias=None if head.bias is None else head.bias[padded])
        dtype = torch.float32 if isinstance(self.decoder, Int8Decoder) else self.decoder.weights.dtype
        return OutputRows(packed_linear([rows], dtype, quantization), padded, hidden, allowed.shape[1])

    def prefill(self, tokens: Tensor) -> None:
        self.decoder.prefill(tokens)

    def step(self, state: BeamState, advance: Advance) -> BeamState:
        def masked(state: BeamState, logits: Tensor) -> BeamState:
            return advance(state, logits.masked_fill(~self.allowed[:, None], -torch.inf))

        if not isinstance(self.decoder, PackedDecoder):
            return self.decoder.step(state, masked)
        if self.decoder.output is None:
            self.decoder.output = self._rows()
        return self.decoder.step(state, advance)

    def select(self, rows: Tensor) -> None:
        self.decoder.select(rows)
        self._allow(self.allowed[rows])

    def replace(self, rows: Tensor, other: "ShortlistDecoder") -> None:
        self.decoder.replace(rows, other.decoder)
        self._allow(self.allowed.index_copy(0, rows, other.allowed))


# Building one


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
        {i for i, name in enumerate(names[side]) if _WRITABLE.fullmatch(name)} - {*tokenizers[side].all_special_ids}
        for side in (0, 1)
    ]
    ranked = {"": totals.most_common(frequent)}
    ranked |= {names[0][token]: counts[token].most_common(best) for token in sorted(writable[0] & counts.keys())}
    with atomic_file(Path(path)) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as stream:
        for name, candidates in ranked.items():
            stream.write(f"{name}\t{' '.join(names[1][token] for token, _ in candidates if token in writable[1])}\n")
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
                raise UserError(f"alignment: {alignment}, line {number}: each pair needs a line such as 0-0 1-2")
            yield *pair, {tuple(map(int, link.split("-"))) for link in line.split()}
        return
    while window := list(islice(encoded, _WINDOW)):
        sources, targets = zip(*window, strict=True)
        links = align(translator.model, *tokenizers, sources, targets, words=words)
        yield from zip(sources, targets, map(set, links), strict=True)
