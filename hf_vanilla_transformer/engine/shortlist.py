"""Vocabulary selection: the output layer computes only tokens a sentence may need (Jean et al. 2015, arXiv 1412.2007).

`inference.shortlist_files` reads and builds the files.

Shapes: B sentences, K beams, S source length, N candidates of a source token, V target vocabulary, n computed rows of
the output layer.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..search_vanilla_transformer import Advance, BeamState, Decoder
from .int8_model import Int8Decoder
from .linear import packed_linear
from .packed_decoder import OutputRows, PackedDecoder
from .shared_copy import shared_copy

_ROW_UNIT = 256  # rows are a multiple of it: oneDNN compiles a kernel for each shape
_LEAST_SELECTED = 2**23  # elements of the output layer. The rows of a smaller one take longer to pack than to compute
_DIGITS = (2**16, 2**8, 1)  # three digits of a token id are exact in every dtype


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The target tokens that are candidates for each source token."""

    always: Tensor  # ids of the candidates of every sentence
    table: Tensor  # (source tokens + 1, N), the candidates of each source token. The last row is for padding
    size: int  # V

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
