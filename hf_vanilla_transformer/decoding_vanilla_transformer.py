"""The decoder word by word: what a beam search asks of a model, and where the pasts of its beams stand.

Two readers give the same logits. `ModuleReader` calls the model as everybody does. `StepReader` computes what the
layers compute, from weights that are laid out once for reading one word of many beams; so it serves a decoder that
is nothing but our modules. The formulas are in layers_vanilla_transformer.py.

Shapes: B sentences, K beams, R = B · K rows, M places in the cache of a sentence, S source length, D d_model, H heads,
d_k and d_v the widths of a head, V target vocabulary.
"""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from .layers_vanilla_transformer import VanillaTransformerDecoderLayer
from .products_vanilla_transformer import Product

# Where the pasts stand


class BeamPlaces:
    """Which places of a sentence's cache each of its beams sees.

    Keys and values are written once and never moved: when a beam dies and another takes its place, only what they
    see changes. A place that no beam sees any more is written again. Beams differ in their last few words, so a
    sentence needs little more than the places of one past, where K separate caches need K times as many.
    """

    def __init__(self, batch: int, prefix_length: int, beams: int, device: torch.device):
        self.seen = torch.ones(batch, beams, prefix_length, dtype=torch.bool, device=device)  # (B, K, M)

    def append(self, parents: Tensor) -> Tensor:
        """Go on from `parents` (B, K); the places (B, K) of the next words.

        Each beam then sees what its parent saw, and its own new word.
        """
        size, beams = self.seen.shape[2], parents.shape[1]
        seen = self.seen.gather(1, parents[..., None].expand(-1, -1, size))  # (B, K, M)
        seen = F.pad(seen, (0, beams))
        free = (~seen.any(dim=1)).cumsum(dim=1)  # (B, M + K), how many up to here
        nth = torch.arange(1, beams + 1, device=parents.device).expand(len(parents), -1)
        places = torch.searchsorted(free, nth.contiguous())  # the first K that are free
        seen.scatter_(2, places[..., None], True)
        self.seen = seen[..., : _end_of(seen)]
        return places

    def select(self, rows: Tensor) -> None:
        """Keep these sentences."""
        self.seen = self.seen[rows]

    def put(self, rows: Tensor, prefix_length: int) -> None:
        """Other sentences take the room of these."""
        begun = torch.arange(self.seen.shape[2], device=rows.device) < prefix_length  # (M,)
        self.seen[rows] = begun


def _end_of(shown: Tensor) -> int:
    """How many places there are from the first to the last that anybody is shown."""
    places = shown.flatten(0, -2).any(dim=0).nonzero()
    return int(places.max()) + 1 if len(places) else shown.shape[-1]


def _added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of an attention: 0 for what it is shown, else the lowest number."""
    return torch.zeros_like(shown, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)


def _source_mask(shown: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(B, S) as an attention wants it, (B, 1, 1, S); None where all of the source is shown to all."""
    return None if bool(shown.all()) else _added(shown, dtype)[:, None, None]


# Through the modules


class PlacedLayer(DynamicLayer):
    """Keys and values (B, H, M, ·) of one layer, at the places that `BeamPlaces` gives them."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.buffers: list[Tensor] = []
        self.places: Tensor | None = None  # (B, K), of the next words; None: all that there is
        self.size = 0  # M

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, H, K, ·) keys and values; all of them, (B, H, M, ·), come back."""
        new = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [states[:, :, :0] for states in new]
        if self.places is None:
            self.places = torch.arange(key_states.shape[2], device=key_states.device).expand(len(key_states), -1)
            self.size = key_states.shape[2]
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]  # (B, 1)
        for i, states in enumerate(new):
            self.buffers[i] = _with_room(self.buffers[i], self.size)
            self.buffers[i].transpose(1, 2)[rows, self.places] = states.transpose(1, 2)
        self._show()
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Keep these sentences."""
        self.buffers = [buffer[rows] for buffer in self.buffers]
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.size] for buffer in self.buffers)


def _with_room(buffer: Tensor, size: int) -> Tensor:
    """The buffer (…, room, width), copied into one half as large again where it has fewer than `size` places."""
    room = buffer.shape[-2]
    return buffer if size <= room else F.pad(buffer, (0, 0, 0, max(size - room, room // 2, 16)))


class ModuleReader:
    """A model, what its encoder made of the open sentences (B, S, D), and its cache."""

    def __init__(self, model: PreTrainedModel, source: Tensor, shown: Tensor):
        self.model, self.source = model, source
        self.source_mask = _source_mask(shown, source.dtype)  # (B, 1, 1, S)
        self.cache = EncoderDecoderCache(Cache(layer_class_to_replicate=PlacedLayer), DynamicCache())

    def read_prefix(self, words: Tensor, beams: int) -> Tensor:
        """Logits (B, 1, V) after the words (B, P) that each of so many beams begins with."""
        return self._forward(words)[:, -1:]

    def read(self, words: Tensor, places: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, K, V) after the next word (B, K) of each beam.

        Args:
            places: (B, K), where to keep these words.
            seen: (B, K, M), which places belong to each beam, those of these words included.
            positions: (B,), of these words in their sentences.
        """
        for layer in self.cache.self_attention_cache.layers:
            layer.places, layer.size = places, seen.shape[2]
        return self._forward(
            words,
            decoder_attention_mask=_added(seen, self.source.dtype)[:, None],
            decoder_position_ids=positions[:, None],
        )

    def _forward(self, words: Tensor, **kwargs: Any) -> Tensor:
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.source),
            attention_mask=self.source_mask,
            decoder_input_ids=words,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **kwargs,
        ).logits

    def select(self, rows: Tensor) -> None:
        """Go on with these sentences only."""
        self.source = self.source[rows]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[rows]
        for layer in self.cache.self_attention_cache.layers:
            layer.select(rows)
        for layer in self.cache.cross_attention_cache.layers:
            layer.batch_select_indices(rows)


# Without the modules


class StepLayer(nn.Module):
    """A decoder layer for the next words of all beams: `VanillaTransformerDecoderLayer.forward`, on rows (R, D)."""

    compiled = False  # see `Product`

    def __init__(self, layer: VanillaTransformerDecoderLayer, dtype: torch.dtype, kind: str | None):
        super().__init__()

        def product(*linears: nn.Linear) -> Product:
            return Product(linears, dtype, kind, self.compiled)

        own, cross = layer.self_attn, layer.cross_attn
        self.heads = own.q_proj.out_features // own.head_dim
        self.query_width, self.key_width, self.scaling = own.q_proj.out_features, own.k_proj.out_features, own.scaling
        self.own_projections = product(own.q_proj, own.k_proj, own.v_proj)
        self.own_output = product(own.out_proj)
        self.own_norm = _layer_norm(layer.self_attn_layer_norm, dtype)
        self.cross_query = product(cross.q_proj)
        self.cross_entries = product(cross.k_proj, cross.v_proj)
        self.cross_output = product(cross.out_proj)
        self.cross_norm = _layer_norm(layer.cross_attn_layer_norm, dtype)
        self.fc1, self.fc2 = product(layer.fc1), product(layer.fc2)
        self.activation: Callable[[Tensor], Tensor] | None = layer.activation
        if isinstance(layer.activation, nn.ReLU):
            self.activation = None  # the product has it
        self.final_norm = _layer_norm(layer.final_layer_norm, dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (R, H · d_k), and what later words will see of these: keys and values, (R, H · (d_k + d_v))."""
        projected = self.own_projections(x)
        return projected[:, : self.query_width], projected[:, self.query_width :]

    def __call__(
        self, x: Tensor, query: Tensor, own: Tensor, mask: Tensor | None, source: Tensor, source_mask: Tensor | None
    ) -> Tensor:
        """Read words (R, D).

        Args:
            query: (R, H · d_k). own: (B, M, H · (d_k + d_v)), keys and values, those of these words included.
            mask: added to the scores, see `attend`. source, source_mask: (B, S, H · (d_k + d_v)), and its mask.
        """
        x = self.own_norm(self.own_output.added_to(x, self.attend(query, own, mask)))
        x = self.cross_norm(self.cross_output.added_to(x, self.attend(self.cross_query(x), source, source_mask)))
        inner = self.fc1.with_relu(x) if self.activation is None else self.activation(self.fc1(x))
        return self.final_norm(self.fc2.added_to(x, inner))

    def attend(self, query: Tensor, entries: Tensor, mask: Tensor | None) -> Tensor:
        """Eq. 1 for the rows (R, H · d_k) of all beams at once, over the entries (B, N, ·) that they share.

        Args:
            mask: (B / G, 1, G · K, G · N), where G neighbours are taken together; all ones are broadcast. None: G = 1.
        """
        groups = entries.shape[0] if mask is None else mask.shape[0]
        entries = entries.reshape(groups, -1, entries.shape[2])  # (B, N, ·) -> (B / G, G · N, ·)
        output = F.scaled_dot_product_attention(
            self._split_heads(query, groups),  # (R, H · d_k) -> (B / G, H, G · K, d_k)
            self._split_heads(entries[..., : self.key_width], groups),  # (B / G, H, G · N, d_k)
            self._split_heads(entries[..., self.key_width :], groups),  # (B / G, H, G · N, d_v)
            attn_mask=mask,
            scale=self.scaling,
        )
        # (B / G, H, G · K, d_v) -> (B / G, G · K, H · d_v) -> (R, H · d_v)
        return output.transpose(1, 2).flatten(2).flatten(0, 1)

    def _split_heads(self, states: Tensor, groups: int) -> Tensor:
        width = states.shape[-1] // self.heads
        return states.view(groups, -1, self.heads, width).transpose(1, 2)  # (B / G, H, ·, width)


def _layer_norm(norm: nn.LayerNorm, dtype: torch.dtype) -> nn.LayerNorm:
    return copy.deepcopy(norm).requires_grad_(False).to(dtype)


class StepDecoder(nn.Module):
    """The weights of a decoder and its output layer, laid out for reading word by word.

    Args:
        model: whose weights. dtype: what it computes in. kind: of products, see `Product`.
        layer: how it computes.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, kind: str | None, layer: type[StepLayer] = StepLayer
    ):
        super().__init__()
        self.decoder: Any = model.get_decoder()
        self.dtype = dtype
        self.layers: Any = nn.ModuleList(layer(each, dtype, kind) for each in self.decoder.layers)
        self.norm = _layer_norm(self.decoder.layer_norm, dtype) if self.decoder.config.final_layer_norm else None
        self.output = Product([model.lm_head], dtype, kind, layer.compiled)
        self.positions = model.lm_head.weight.new_empty(0, self.decoder.config.d_model)  # encodings so far, (n, D)

    def forward(
        self,
        x: Tensor,
        rows: Tensor,
        own: list[Tensor],
        size: int | None,
        mask: Tensor | None,
        source: list[Tensor],
        source_mask: Tensor | None,
    ) -> Tensor:
        """Logits (R, V) after the next words (R, D), whose keys and values are kept.

        Args:
            rows: (R,), where to keep them among all places of all sentences.
            own: for each layer keys and values (B, room, ·).
            size: how many of the places are looked at; None: all.
            mask, source, source_mask: see `StepLayer`.
        """
        for layer, entries, source_entries in zip(self.layers, own, source, strict=True):
            query, new = layer.project(x)
            entries.view(-1, entries.shape[2]).index_copy_(0, rows, new)  # (B, room, ·) -> (B · room, ·)
            x = layer(x, query, entries[:, :size], mask, source_entries, source_mask)
        return self.output(x if self.norm is None else self.norm(x))

    def embed(self, words: Tensor, encodings: Tensor) -> Tensor:
        """Words (…) at positions that are encoded as (…, D), to (…, D)."""
        return (self.decoder.embed_tokens(words) * self.decoder.embed_scale + encodings).to(self.dtype)

    def encodings(self, count: int) -> Tensor:
        """Of so many positions, or more, (n, D); several threads may ask."""
        encodings, dtype = self.positions, self.decoder.embed_tokens.weight.dtype
        if count <= len(encodings) and encodings.dtype == dtype:
            return encodings
        known = self.decoder.config.max_position_embeddings
        learned = self.decoder.config.position_encoding_type == "learned"
        count = count if learned and count > known else min(2 * count, known) if learned else max(64, 2 * count)
        ids = torch.arange(count, device=encodings.device)[None]  # (1, n)
        nothing = encodings.new_zeros(1, count, encodings.shape[1], dtype=dtype)
        self.positions = encodings = self.decoder.embed(nothing, ids)[0]
        return encodings


class StepReader:
    """A `StepDecoder`, what it needs of the open sentences, and the keys and values of their beams."""

    def __init__(self, decoder: StepDecoder, source: Tensor, shown: Tensor):
        self.decoder = decoder
        self.tile = _tile(decoder.dtype, source.device) if len(source) > 1 else 1
        source = source.to(decoder.dtype)
        entries = [
            layer.cross_entries(source.flatten(0, 1)).unflatten(0, source.shape[:2])  # (B · S, ·) -> (B, S, ·)
            for layer in decoder.layers
        ]
        self.own = [each[:, :0] for each in entries]  # (B, room, H · (d_k + d_v))
        self._hold(shown, entries)

    def read_prefix(self, words: Tensor, beams: int) -> Tensor:
        """Logits (B, 1, V) after the words (B, P) that each of so many beams begins with."""
        for position in range(words.shape[1]):
            word = words[:, position, None]  # (B, 1)
            places = torch.full_like(word, position)
            seen = torch.ones_like(words[:, None, : position + 1], dtype=torch.bool)  # (B, 1, M)
            logits = self.read(word, places, seen, places[:, 0])
        return logits

    def read(self, words: Tensor, places: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, K, V) after the next word (B, K) of each beam; as `ModuleReader.read`."""
        size, beams = self._make_room(seen.shape[2]), words.shape[1]
        mask = self._mask(F.pad(seen, (0, size - seen.shape[2])))
        if beams not in self.source_masks:
            self.source_masks[beams] = self._mask(self.shown[:, None].expand(-1, beams, -1))
        room = self.own[0].shape[1]
        starts = room * torch.arange(len(places), device=places.device)[:, None]  # (B, 1)
        rows = (places + starts).flatten()  # (B, K) -> (R,), among all places of all sentences
        encodings = self.decoder.encodings(int(positions.max()) + 1)[positions][:, None]  # (B, 1, D)
        x = self.decoder.embed(words, encodings).flatten(0, 1)  # (B, K, D) -> (R, D)
        logits = self.decoder(x, rows, self.own, size, mask, self.source, self.source_masks[beams])
        return logits.unflatten(0, words.shape)  # (R, V) -> (B, K, V)

    def _make_room(self, places: int) -> int:
        """Make room for so many places, and say how many are looked at."""
        if self.tile == 1:
            self.own = [_with_room(entries, places) for entries in self.own]
            return places
        room, wanted = self.own[0].shape[1], rounded_up(places, self.tile)
        # what is copied to be smaller should not have to grow at the next word
        if room < wanted or room - places >= 1.5 * self.tile:
            self.own = [_resized(entries, wanted) for entries in self.own]
        return self.own[0].shape[1]

    def _mask(self, shown: Tensor) -> Tensor | None:
        """What the beams are shown of their sentences, (B, K, N), as `StepLayer.attend` wants it."""
        together = _neighbours(shown, self.tile)  # G
        if together == 1:
            return None if bool(shown.all()) else _added(shown, self.decoder.dtype)[:, None]
        groups = _added(shown, self.decoder.dtype).unflatten(0, (-1, together))  # (B / G, G, K, N)
        count, _, beams, places = groups.shape
        # What stands beside a sentence is nothing to it: also one that is shown nothing of its own has no part of it.
        mask = groups.new_full((count, together, beams, together, places), -torch.inf)
        mask.diagonal(dim1=1, dim2=3).copy_(groups.permute(0, 2, 3, 1))  # (B / G, K, N, G)
        return mask.flatten(3).flatten(1, 2)[:, None]  # (B / G, 1, G · K, G · N)

    def select(self, rows: Tensor) -> None:
        """Go on with these sentences only."""
        self.own = [each[rows] for each in self.own]
        self._hold(self.shown[rows], [each[rows] for each in self.source])

    def put(self, rows: Tensor, other: "StepReader") -> None:
        """The sentences of another reader take the room of these."""
        size, begun = max(self.shown.shape[1], other.shown.shape[1]), other.own[0].shape[1]

        def replaced(mine: Tensor, theirs: Tensor) -> Tensor:
            mine, theirs = (_resized(each, size) for each in (mine, theirs))
            return mine.index_copy_(0, rows, theirs)

        if begun:
            self.own = [_with_room(entries, begun) for entries in self.own]
            for mine, theirs in zip(self.own, other.own, strict=True):
                mine[rows, :begun] = theirs
        self._hold(
            replaced(self.shown, other.shown),
            [replaced(mine, theirs) for mine, theirs in zip(self.source, other.source, strict=True)],
        )

    def _hold(self, shown: Tensor, source: list[Tensor]) -> None:
        size = rounded_up(_end_of(shown), self.tile)
        self.shown = _resized(shown, size)  # (B, S)
        self.source = [_resized(each, size) for each in source]  # (B, S, H · (d_k + d_v))
        self.source_masks: dict[int, Tensor | None] = {}  # for so many beams


# AMX multiplies tiles of 16 rows.
_TILE = 16


def _tile(dtype: torch.dtype, device: torch.device) -> int:
    """Numbers of places of which attention likes multiples, and of how many rows."""
    return _TILE if dtype == torch.bfloat16 and device.type == "cpu" else 1


def _neighbours(shown: Tensor, tile: int) -> int:
    """How many sentences' beams, shown (B, K, N), are best attended to in one call, each to its own.

    A call for every sentence and head takes about as long for K rows as for a tile of them. Many places make the
    products that are masked cost more than the calls that are saved; one row at a time has a quicker way of its own.
    """
    batch, beams, places = shown.shape
    best = 1 if beams == 1 or tile == 1 else min(tile // beams, 4 * tile // places)
    return next(count for count in (4, 2, 1) if count <= max(best, 1) and batch % count == 0)


def rounded_up(count: int, tile: int) -> int:
    """The next multiple of `tile`."""
    return -(-count // tile) * tile


def _resized(states: Tensor, places: int) -> Tensor:
    """(B, N) or (B, N, ·) with so many places, in one piece."""
    if states.shape[1] == places:
        return states.contiguous()
    return F.pad(states, (0, 0) * (states.dim() - 2) + (0, places - states.shape[1])).contiguous()


# Which of them

Reader = ModuleReader | StepReader


def reader_for(
    model: PreTrainedModel,
    source: Tensor,
    source_mask: Tensor,
    decoder_weights: str | None = None,
) -> Reader:
    """A reader of `source` (B, S, D), what the model's encoder made of the sentences.

    Args:
        source_mask: (B, S), 0 for padding.
        decoder_weights: see `Product`; for `StepReader`s only.
    """
    shown = source_mask.to(source.device).ne(0)
    decoder = model.get_decoder()
    modules = [*decoder.modules(), model.lm_head]
    if not is_ours(model, modules):
        return ModuleReader(model, source, shown)
    copied = [module for module in modules if module is not decoder.embed_tokens]
    return StepReader(laid_out(model, StepDecoder, decoder_weights, copied), source, shown)


def is_ours(model: PreTrainedModel, modules: Iterable[nn.Module]) -> bool:
    """Whether these modules of the model are nothing but ours, and do nothing but translate.

    An adapter, a hook (of offloading, sharding or a user), a quantised layer or a subclass does something more.
    With eager attention the modules are asked too: who chooses it wants to see the formula at work.
    """
    if model.training or model.config._attn_implementation != "sdpa":
        return False
    return all(_is_plain(module) for module in (model, model.model, *modules))


def _is_plain(module: nn.Module) -> bool:
    known = _is_known(type(module).__module__)
    hooks = module._forward_hooks or module._forward_pre_hooks
    weights = module._parameters.values()
    ours = all(weight is None or (type(weight) is nn.Parameter and not weight.is_meta) for weight in weights)
    return known and not hooks and "forward" not in vars(module) and ours


@cache
def _is_known(home: str) -> bool:
    """Whether it is the home of modules of torch or transformers, or of ours."""
    package, _, _ = __name__.rpartition(".")
    return home.startswith(("torch.nn.modules.", "transformers.activations")) or home.rpartition(".")[0] == package


# What was made of weights

Laid = TypeVar("Laid")

# For each model and each use, what was made of its weights, with what `_looked_at` said of them at the time.
_MADE: WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[Any, Tensor, Any]]] = WeakKeyDictionary()


def laid_out(
    model: PreTrainedModel,
    kind: Callable[[PreTrainedModel, torch.dtype, str | None], Laid],
    weights: str | None,
    modules: Iterable[nn.Module],
    compiled: bool = False,
) -> Laid:
    """The weights of these modules as they are now, in what is made of them for the dtype that they compute in.

    Args:
        kind: makes it, once for the same weights. weights: see `Product`.
        compiled: whether they become constants of a `Program`.
    """
    weight = model.lm_head.weight
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    held = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    stamp, numbers = _looked_at(held, compiled)
    made, look = _MADE.setdefault(model, {}), (dtype, weights, stamp)
    if kind not in made or made[kind][0] != look or not made[kind][1].equal(numbers):
        made[kind] = look, numbers, kind(model, dtype, weights)
    return made[kind][2]


@torch.no_grad()
def _looked_at(weights: list[nn.Parameter], compiled: bool) -> tuple[list[Any], Tensor]:
    """What tells whether weights have changed: where they stand, and sums of all their numbers.

    To read all numbers takes as long as a few words of a program. That has to rely on the changes that torch counts
    (not those through `.data`), and on the first rows of matrices, as fused optimizers change all and count nothing.
    """
    stamp = [
        (weight.data_ptr(), weight.dtype, weight._version if compiled and not weight.is_inference() else 0)
        for weight in weights
    ]
    if compiled:
        return stamp, torch.cat([weight[0] for weight in weights if weight.dim() > 1])
    return stamp, torch.cat([_sums(weight) for weight in weights])


def _sums(weight: Tensor) -> Tensor:
    """A number for each row that changes with any of its numbers: all have to be read, which takes milliseconds."""
    per_number = 8 // weight.element_size()
    rows = weight.view(torch.int64) if per_number and weight.shape[-1] % per_number == 0 else weight.double()
    return rows.sum(dim=-1).double().flatten()
