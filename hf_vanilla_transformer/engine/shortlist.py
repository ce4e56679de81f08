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

from ..decoding_vanilla_transformer import EncodedSource
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..search_vanilla_transformer import BeamState, Decoder, SearchConfig
from .int8_model import Int8Decoder
from .linear import packed_linear
from .packed_decoder import OutputRows, PackedDecoder
from .shared_copy import shared_copy

_ROW_UNIT = 256  # rows are a multiple of it: oneDNN compiles a kernel for each shape
# Elements of the output layer. The rows of a smaller one take longer to pack than to compute.
_LEAST_SELECTED = 2**23


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The target tokens that are candidates for each source token."""

    always: Tensor  # ids of the candidates of every sentence
    table: Tensor  # (source tokens + 1, N), the candidates of each source token. The last row is for padding
    size: int  # V

    def allowed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The candidates (B, V) of sources (B, S), True for those that the output layer computes."""
        # (B, S · N)
        rows = self.table[ids.masked_fill(mask == 0, len(self.table) - 1).cpu()].flatten(1)
        allowed = torch.zeros(len(ids), self.size, dtype=torch.bool)
        allowed[:, self.always] = True
        return allowed.scatter_(1, rows, True).to(ids.device)


def with_shortlist(model: VanillaTransformerForConditionalGeneration, shortlist: Shortlist) -> Any:
    """Return a copy of a model that shares its weights and searches with the shortlist."""
    copied = shared_copy(model)
    copied.inference_engine = ShortlistEngine(model, shortlist)
    return copied


class ShortlistEngine:
    """A wrapper of an inference engine. Its decoders need the ids of the source."""

    search_only = "shortlist"  # transformers' loops would compute all tokens

    def __init__(self, model: VanillaTransformerForConditionalGeneration, shortlist: Shortlist):
        self.model = model
        self.shortlist = shortlist
        self.quantization = getattr(model.inference_engine, "quantization", None)

    def encode(
        self, model: VanillaTransformerForConditionalGeneration, ids: Tensor, mask: Tensor
    ) -> EncodedSource:
        return self.model.encode(ids, mask)

    def decoder(
        self,
        model: VanillaTransformerForConditionalGeneration,
        source: EncodedSource,
        beams: int,
    ) -> Decoder:
        if source.ids is None:
            raise ValueError("shortlist: it depends on the tokens of the source; give input_ids")
        allowed = self.shortlist.allowed(source.ids, source.mask)
        return ShortlistDecoder(self, self.model.make_decoder(source, beams), allowed)


class ShortlistDecoder(Decoder):
    """A `Decoder` whose logits are -inf for all but the candidates of each sentence, `allowed` (B, V).

    With packed weights only the rows of the output layer that the batch needs are computed.
    """

    def __init__(self, engine: ShortlistEngine, decoder: Any, allowed: Tensor):
        self.engine = engine
        self.decoder = decoder
        self.initial_beams = decoder.initial_beams
        is_large = engine.model.lm_head.weight.numel() >= _LEAST_SELECTED
        self.selects = is_large and isinstance(decoder, PackedDecoder)
        self._allow(allowed)

    def _allow(self, allowed: Tensor) -> None:
        self.allowed = allowed
        self.decoder.output = None

    def _select_rows(self) -> None:
        """Let the decoder compute the output layer for the candidates of all sentences of the batch."""
        if self.decoder.output is not None:
            return
        allowed = self.allowed
        lm_head = self.engine.model.lm_head
        ids = allowed.any(dim=0).nonzero()[:, 0]
        padded = torch.cat([ids, ids.new_zeros(-len(ids) % _ROW_UNIT)])  # (n,)
        hidden = ~allowed[:, None, padded]  # (B, 1, n)
        hidden[..., len(ids) :] = True
        bias = None if lm_head.bias is None else lm_head.bias[padded]
        rows: Any = SimpleNamespace(weight=lm_head.weight[padded], bias=bias)
        dtype = (
            torch.float32 if isinstance(self.decoder, Int8Decoder) else self.decoder.weights.dtype
        )
        head = packed_linear([rows], dtype, self.engine.quantization)
        self.decoder.output = OutputRows(head, padded, hidden, allowed.shape[1])

    def prefill(self, tokens: Tensor) -> None:
        self.decoder.prefill(tokens)

    def logits(self, state: BeamState) -> Tensor:
        if self.selects:
            self._select_rows()
            return self.decoder.logits(state)
        return self.decoder.logits(state).masked_fill(~self.allowed[:, None], -torch.inf)

    def step(self, state: BeamState, config: SearchConfig, penalties: Tensor) -> BeamState:
        if not self.selects:
            return super().step(state, config, penalties)
        self._select_rows()
        return self.decoder.step(state, config, penalties)

    def select(self, rows: Tensor) -> None:
        self.decoder.select(rows)
        self._allow(self.allowed[rows])

    def replace(self, rows: Tensor, other: "ShortlistDecoder") -> None:
        self.decoder.replace(rows, other.decoder)
        self._allow(self.allowed.index_copy(0, rows, other.allowed))
