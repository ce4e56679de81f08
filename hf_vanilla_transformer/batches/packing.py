"""Packed rows: several whole sentence pairs in a row, so that all batches have one shape and little padding.

A batch is R rows with S source places and T target places. Each pair of a row is a segment: it has a number, and its
positions start at 0. Attention sees the places of its own segment only, so that loss and gradients are those of
padded pairs. Decoder-only models are packed with `DataCollatorWithFlattening` of transformers, whose kernels have no
place for a cross-attention. Here the model makes three masks from the numbers of the segments, and the layers do not
change:

  ┌ source ──────────────┐   ┌ target ─────────────┐
  │ a a a a b b c c c · · │   │ a a a b b b c c · · │      segments 1 1 1 1 2 2 3 3 3 0 0
  └──────────────────────┘   └─────────────────────┘      positions 0 1 2 3 0 1 0 1 2 0 1

Free places are a segment of their own, 0, so that no row of a mask is empty.
`PackedBatchSampler` plans the rows of an epoch, and `PackedPairs` makes their tensors, the arguments of a
`VanillaTransformer` model. `PackedCollator` serves other trainers and encoder-decoders (scripts/docs/scale.md).

Shapes: N pairs, R rows, S and T places of a row.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..loss_vanilla_transformer import IGNORED
from .batching import (
    Batch,
    BatchNumbers,
    Collate,
    Example,
    TokenBatchSampler,
    ceil_div,
    id_chunks,
    read_examples,
    runs_of_equals,
    shuffled_runs,
    starts_of,
)
from .redrawing import RedrawnDataset

ROW = 128  # places of a row, if no pair is longer
UNIT = 8  # places are a multiple of it, for the kernels of products
#: Increase it when a seed would put the same pairs into other rows or updates: a run that resumes needs the same.
PLAN_VERSION = 2
WINDOW = 2_000_000  # pairs that are fitted into rows together
BALANCE = 2  # weight of the difference of the free shares of both sides of a row
FIRST_LOOK = 1024  # kinds of pairs that are compared for a place at first
_FITS_NOT = np.iinfo(np.int64).max  # unused places of a kind that is too long
BACKENDS = ("sdpa", "eager")  # of attention, which take such masks
# Columns of pairs that are the same in each epoch, so that they are read once
TABLE_COLUMNS = "input_ids", "attention_mask", "labels"
PAIR_COLUMNS = *TABLE_COLUMNS, "decoder_input_ids"  # for which packed rows have a place

#: The numbers of the pairs of each row.
PackedRows: TypeAlias = list[np.ndarray]


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Return whether the rows of a batch are packed."""
    return "segment_ids" in batch


def token_mask(batch: Mapping[str, Any]) -> Tensor | None:
    """The places (R, S) of a batch with a token of a source. None if the batch does not say which."""
    return batch["segment_ids"].ne(0) if is_packed(batch) else batch.get("attention_mask")


# Which pairs share a row


def row_lengths(source: np.ndarray, target: np.ndarray, max_tokens: int) -> tuple[int, int]:
    """S and T for pairs with these lengths, each (N,), and batches of at most `max_tokens` places on a side.

    Both are in proportion to the tokens of their sides. The longer one has 128 places, or the next multiple of 128
    that its longest sentence fits into, or as many as the other side needs for its own.
    """
    longest = np.array([source.max(), target.max()])
    totals = np.maximum([source.sum(), target.sum()], 1)
    shares = totals / totals.max()
    needed = (longest / shares).max()
    places = max(_rounded_up(longest.max(), ROW), _rounded_up(needed, UNIT))
    if max_tokens < places:
        places = max(int(longest.max()), max_tokens)
    rounded = _rounded_up(places * shares, UNIT)
    lengths = np.clip(rounded, longest, places)
    return int(lengths[0]), int(lengths[1])


def _rounded_up(numbers: Any, unit: int) -> Any:
    return np.ceil(numbers / unit).astype(np.int64) * unit


def fill_rows(source: np.ndarray, target: np.ndarray, places: tuple[int, int]) -> PackedRows:
    """Fit pairs with these lengths, each (N,), into rows with S and T places: the numbers of the pairs of each row.

    A row takes the pair that leaves the fewest places free, as a share of each side, and about as many on both sides,
    until none fits. A pair that is longer than a row is a row by itself.
    """
    pairs, counts = planned_rows(source, target, places)
    return np.split(pairs, np.cumsum(counts)[:-1])


def planned_rows(
    source: np.ndarray, target: np.ndarray, places: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `fill_rows` as two arrays: the pairs of all rows (N,), and their number in each row (rows,).

    Pairs of equal lengths are one kind. A row stays the best one until a kind of it is used up, so it is chosen once
    and repeated: a million pairs of natural text have some 7,000 different rows.
    """
    order = by_lengths(source, target)
    kinds = _Kinds.of(source[order], target[order], places)
    longer = np.maximum(kinds.source, kinds.target) > kinds.whole
    rows = [kinds.number[[kind]] for kind in np.flatnonzero(longer)]
    repeats = kinds.left[longer].tolist()
    kinds = kinds.select(~longer)
    while len(kinds.left):
        row, times = kinds.take_rows()
        rows.append(row)
        repeats.append(times)
        if np.count_nonzero(kinds.left) <= len(kinds.left) * 7 // 8:
            kinds = kinds.select(kinds.left > 0)
    tiled = [np.tile(*each) for each in zip(rows, repeats, strict=True)]
    kind_of_place = np.concatenate(tiled)
    pairs = np.empty_like(order)
    pairs[np.argsort(kind_of_place, kind="stable")] = order
    return pairs, np.repeat([len(row) for row in rows], repeats)


def by_lengths(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The numbers of the pairs (N,), by source length, then by target length."""
    # NumPy sorts numbers of 16 bits by their digits, in a fraction of the time.
    keys = [lengths.astype(_smallest_dtype(lengths)) for lengths in (target, source)]
    return np.lexsort(keys).astype(_index_dtype(len(source)))


def _index_dtype(size: int) -> type[np.signedinteger]:
    """The smaller dtype that numbers up to `size` have."""
    return np.int32 if size <= np.iinfo(np.int32).max else np.int64


@dataclass
class _Kinds:
    """Kinds of pairs, in the order of their lengths. All arrays are (kinds,)."""

    whole: int  #: S · T, so that the shares of a row are whole numbers
    number: np.ndarray
    source: np.ndarray  #: share of the places of a row
    target: np.ndarray
    left: np.ndarray  #: pairs that are in no row yet

    @classmethod
    def of(cls, source: np.ndarray, target: np.ndarray, places: tuple[int, int]) -> "_Kinds":
        """The kinds of pairs with these sorted lengths, each (N,)."""
        starts = np.flatnonzero(np.diff(runs_of_equals(source, target), prepend=-1))
        number = np.arange(len(starts))
        return cls(
            whole=places[0] * places[1],
            number=number.astype(_smallest_dtype(number)),
            source=source[starts].astype(np.int64) * places[1],
            target=target[starts].astype(np.int64) * places[0],
            left=np.diff(starts, append=len(source)),
        )

    def __post_init__(self) -> None:
        # What a kind takes from either side of the maximum in `_best`.
        self.of_source = (1 + BALANCE) * self.source + (1 - BALANCE) * self.target
        self.of_target = (1 - BALANCE) * self.source + (1 + BALANCE) * self.target

    def select(self, kept: np.ndarray) -> "_Kinds":
        """Some of the kinds."""
        arrays = (self.number, self.source, self.target, self.left)
        return _Kinds(self.whole, *(each[kept] for each in arrays))

    def take_rows(self) -> tuple[np.ndarray, int]:
        """Take the pairs of the next row and of all rows like it: the kinds of a row, and the number of rows."""
        row: list[int] = []
        free_source = free_target = self.whole
        while (kind := self._best(free_source, free_target)) is not None:
            row.append(kind)
            free_source -= int(self.source[kind])
            free_target -= int(self.target[kind])
            self._take(kind, 1)
        pairs = Counter(row)
        repeats = min(int(self.left[kind]) // count for kind, count in pairs.items())
        for kind, count in pairs.items():
            self._take(kind, repeats * count)
        return self.number[row], 1 + repeats

    def _take(self, kind: int, pairs: int) -> None:
        self.left[kind] -= pairs
        if self.left[kind] == 0:
            self.target[kind] = self.whole + 1  # fits into no row

    def _best(self, free_source: int, free_target: int) -> int | None:
        """The kind that leaves the fewest places of a row free, or None if none fits. The first of equal ones.

        A kind leaves at least twice its free share of the source unused. So the search goes from long to short
        sources, and ends where no kind can be better.
        """
        # x + y + BALANCE |x - y| is the larger one of (1 ± BALANCE) x + (1 ∓ BALANCE) y.
        of_source = (1 + BALANCE) * free_source + (1 - BALANCE) * free_target
        of_target = (1 - BALANCE) * free_source + (1 + BALANCE) * free_target
        fewest = int(_FITS_NOT)
        best = None
        end = int(self.source.searchsorted(free_source, side="right"))
        size = FIRST_LOOK
        while end and fewest >= 2 * (free_source - int(self.source[end - 1])):
            start = max(0, end - size)
            unused = np.maximum(
                of_source - self.of_source[start:end], of_target - self.of_target[start:end]
            )
            unused[self.target[start:end] > free_target] = _FITS_NOT
            kind = int(unused.argmin())
            if unused[kind] != _FITS_NOT and unused[kind] <= fewest:
                best = start + kind
                fewest = int(unused[kind])
            end = start
            size *= 2
        return best


class PackedBatchSampler(TokenBatchSampler):
    """Yields the updates of an epoch, each as this rank's batches of packed rows. Every pair occurs in one row.

    The rows are planned once. Each epoch, drawn from `seed` and its number, shuffles the rows, and pairs of equal
    lengths among them, so that all epochs have the same number of updates. An update consists of the same pairs for
    any number of ranks, and its batches have the same number of rows. Some rows of its last batch may be empty.

    Args: as in `TokenBatchSampler`. `max_tokens` limits the places of a batch on each side.

    Attributes:
        places: S and T.
        batches_of_update: of all ranks.
        rows_of_batch: R.
        whole: yield the batches of all ranks. `PackedPairs` asks for them where only the pairs of this epoch decide
            how they are dealt.
    """

    whole = False

    def _plan(self, source: np.ndarray, target: np.ndarray) -> int:
        """Fit all pairs into rows, in windows of random pairs, and choose the shape of an update."""
        self.places = row_lengths(source, target, self.limit)
        rng = np.random.default_rng([*np.atleast_1d(self.seed), len(source)])
        dtype = _index_dtype(len(source))
        pairs = rng.permutation(len(source)).astype(dtype)
        planned = []
        counts = []
        for start in range(0, len(pairs), WINDOW):
            window = pairs[start : start + WINDOW]
            order, counts_in_window = planned_rows(source[window], target[window], self.places)
            planned.append(window[order])
            counts.append(counts_in_window)
        self.row_starts = starts_of(counts)  # (rows + 1,)
        self.planned = np.concatenate(planned)  # (N,), the pairs of all rows
        rows = len(self.row_starts) - 1
        # the places in the plan, grouped by the lengths of their pairs
        self.by_length = by_lengths(source[self.planned], target[self.planned])
        grouped = self.planned[self.by_length]
        self.equal_lengths = runs_of_equals(source[grouped], target[grouped]).astype(dtype)

        most_rows = max(1, self.limit // max(self.places))  # of a batch
        if self.tokens_per_update:
            updates = even_updates(rows, self.requested, most_rows)
            batches = ceil_div(ceil_div(rows, updates), most_rows)
        else:
            updates = ceil_div(rows, most_rows * self.batches_per_update)
            batches = self.batches_per_update
        self.batches_of_update = ceil_div(batches, self.world_size) * self.world_size
        most = ceil_div(rows, updates)  # rows of an update
        self.rows_of_batch = ceil_div(most, self.batches_of_update)
        self.starts = np.arange(updates + 1) * rows // updates
        return updates

    def _draw(self, rng: np.random.Generator) -> None:
        """Shuffle the rows and the pairs of equal lengths."""
        shuffled = self.by_length[shuffled_runs(self.equal_lengths, rng)]
        # (N,), as `planned`, with other pairs of the same lengths.
        self.pairs = np.empty_like(self.planned)
        self.pairs[self.by_length] = self.planned[shuffled]
        self.order = rng.permutation(len(self.row_starts) - 1)

    def update(self, number: int) -> PackedRows:
        """The rows of an update, for all ranks together: the numbers of the pairs of each."""
        start, end = self.starts[number : number + 2]
        rows = self.order[start:end]
        starts = self.row_starts[rows]
        ends = self.row_starts[rows + 1]
        return [self.pairs[first:last] for first, last in zip(starts, ends, strict=True)]

    def batches(self, number: int) -> list[PackedRows]:  # type: ignore[override]
        """This rank's batches of an update, or the `whole`: rows of the numbers of pairs."""
        dealt = deal(self.update(number), self.rows_of_batch, self.batches_of_update)
        return dealt if self.whole else dealt[self.rank :: self.world_size]


def even_updates(rows: int, requested: int, most_rows: int) -> int:
    """The number of updates of an epoch, within a tenth of the requested one, that leaves the fewest rows empty.

    Args:
        rows: of the epoch.
        requested: number of updates.
        most_rows: of a batch.
    """
    requested = min(requested, rows)
    tenth = requested // 10
    near = range(requested - tenth, min(requested + tenth, rows) + 1)

    def planned_rows(updates: int) -> int:
        most = ceil_div(rows, updates)  # of an update
        batches = ceil_div(most, most_rows)
        return updates * batches * ceil_div(most, batches)

    return min(near, key=lambda updates: (planned_rows(updates), abs(updates - requested)))


def deal(rows: PackedRows, rows_of_batch: int, batches: int) -> list[PackedRows]:
    """Deal rows to batches in turn, and fill each with empty rows."""
    empty = np.zeros(0, dtype=np.int64)
    dealt = [rows[first::batches] for first in range(batches)]
    return [batch + [empty] * (rows_of_batch - len(batch)) for batch in dealt]


# The tensors of packed rows


@dataclass
class FlatIds:
    """The token ids of many sentences in one array, which is read faster than the rows of a table."""

    ids: np.ndarray  #: of all sentences, one after the other
    starts: np.ndarray  #: (N + 1,), where each sentence starts, and the end of the last

    @classmethod
    def of_parts(cls, ids: list[np.ndarray], lengths: list[np.ndarray]) -> "FlatIds":
        """Join arrays of ids. `lengths` are those of their sentences."""
        joined = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        return cls(joined, starts_of(lengths))

    @classmethod
    def of_column(cls, dataset: Dataset, name: str) -> "FlatIds":
        """The lists of ids in a column of a table. Those of a table in one piece, as a prepared one is, stay there."""
        if dataset.data.column(name).num_chunks == 1:
            column = dataset.select_columns([name]).with_format("arrow")[:]
            pieces = column[name].chunks  # no copy, unless rows were selected
            if len(pieces) == 1 and pieces[0].offsets[0].as_py() == 0:
                (piece,) = pieces
                return cls(piece.flatten().to_numpy(), piece.offsets.to_numpy())
        ids = []
        lengths = []
        for part, its_lengths in id_chunks(dataset, name):
            ids.append(part.astype(_smallest_dtype(part)))
            lengths.append(its_lengths)
        return cls.of_parts(ids, lengths)

    @classmethod
    def of_lists(cls, sentences: Sequence[Sequence[int]]) -> "FlatIds":
        """Lists of ids."""
        ids = [np.asarray(sentence, dtype=np.int64) for sentence in sentences]
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        return cls.of_parts(ids, [lengths])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sentence, (N,)."""
        return np.diff(self.starts)

    def visible(self, mask: "FlatIds") -> "FlatIds":
        """The tokens whose `mask` is not 0. Nothing attends to the others, and they have no position."""
        if not np.array_equal(mask.starts, self.starts):
            raise ValueError("attention_mask has other lengths than input_ids")
        chosen = mask.ids != 0
        before = starts_of([chosen])
        return FlatIds(self.ids[chosen], before[self.starts])


def _smallest_dtype(ids: np.ndarray) -> np.dtype:
    """The smallest dtype that holds ids, of which -100 is one."""
    ends = (ids.min(initial=0), ids.max(initial=0))
    return np.result_type(*map(np.min_scalar_type, ends))


@dataclass
class FlatPairs:
    """The token ids of pairs."""

    source: FlatIds
    target: FlatIds
    inputs: np.ndarray | None = (
        None  #: of the decoder, as `target.ids`. None: the labels shifted right
    )

    def __post_init__(self) -> None:
        # Attention without a key would take those of the whole row, its neighbours' (`segment_mask`).
        if not self.source.lengths.all():
            raise ValueError(
                "a pair has no source token, and would read those of its neighbours in a packed row: leave it out, or "
                "train without packing"
            )

    @classmethod
    def of_rows(cls, rows: Sequence[Example]) -> "FlatPairs":
        """The pairs of rows with `PAIR_COLUMNS`, the two masks and inputs left out or not.

        Raises:
            ValueError: the rows have another column, or one is missing, or a source is empty.
        """
        names: set[str] = set().union(*rows)
        if rows:
            _check_columns(names)
        columns = {
            name: FlatIds.of_lists([row[name] for row in rows])
            for name in PAIR_COLUMNS
            if name in names or not rows
        }
        source = columns["input_ids"]
        if "attention_mask" in columns:
            source = source.visible(columns["attention_mask"])
        inputs = columns.get("decoder_input_ids")
        return cls(source, columns["labels"], None if inputs is None else inputs.ids)

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], pad_token_id: int) -> "FlatPairs":
        """The pairs of a padded batch of a data collator, without the padding."""
        tensors = {name: np.asarray(each) for name, each in batch.items() if each is not None}
        _check_columns(set(tensors))
        for name, each in tensors.items():
            if each.ndim != 2:
                raise ValueError(f"packed rows have no place for {name} of shape {each.shape}")
        source = tensors["input_ids"]
        mask = tensors.pop("attention_mask", source != pad_token_id) != 0
        counted = tensors["labels"] != IGNORED
        place = np.arange(counted.shape[1])
        lengths = (counted * (place + 1)).max(axis=1, initial=0)  # up to the last label
        rows = [
            {name: each[number, : lengths[number]] for name, each in tensors.items()}
            | {"input_ids": source[number, mask[number]]}
            for number in range(len(source))
        ]
        return cls.of_rows(rows)

    @classmethod
    def of_table(cls, dataset: Dataset) -> "FlatPairs":
        """The pairs of a dataset with the columns `input_ids` and `labels`, and perhaps `attention_mask`."""
        source = FlatIds.of_column(dataset, "input_ids")
        if "attention_mask" in dataset.format["columns"]:
            source = source.visible(FlatIds.of_column(dataset, "attention_mask"))
        return cls(source, FlatIds.of_column(dataset, "labels"))

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target lengths, each (N,)."""
        return self.source.lengths, self.target.lengths


def _check_columns(names: set[str]) -> None:
    """Raise a ValueError for a column without a place in packed rows, and for a missing one."""
    if unknown := sorted(names.difference(PAIR_COLUMNS)):
        raise ValueError(
            f"packed rows have no place for {', '.join(unknown)}, only for {', '.join(PAIR_COLUMNS)}"
        )
    if not {"input_ids", "labels"} <= names:
        raise ValueError(f"packed rows need input_ids and labels, not {', '.join(sorted(names))}")


def is_fixed(dataset: Any) -> bool:
    """True if the rows of a dataset are the same in each epoch, because no code of the caller makes them."""
    if type(dataset) is Dataset:
        return dataset.format["type"] != "custom"  # of `set_transform`
    if type(dataset) is Subset:
        return is_fixed(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_fixed, dataset.datasets))
    return type(dataset) in (list, tuple) and all(type(row) is dict for row in dataset)


@dataclass(frozen=True)
class PackedLayout:
    """The shape of packed rows and the tokens of free places."""

    places: tuple[int, int]  #: S and T
    pad_token_id: int
    decoder_pad_token_id: int
    decoder_start_token_id: int

    @classmethod
    def of(cls, config: PreTrainedConfig, places: tuple[int, int]) -> "PackedLayout":
        """The layout for a model's configuration."""
        pad = getattr(config, "target_pad_token_id", config.pad_token_id)
        return cls(places, config.pad_token_id, pad, config.decoder_start_token_id)

    def pack(self, pairs: FlatPairs, rows: PackedRows) -> Batch:
        """The tensors of a batch, from the numbers of the pairs of each row.

        Returns:
            `input_ids`, `segment_ids` and `position_ids` (R, S), `decoder_input_ids`, `decoder_segment_ids`,
            `decoder_position_ids` and `labels` (R, T).
        """
        source = _RowsOfSide.of(pairs.source, rows, self.places[0])
        target = _RowsOfSide.of(pairs.target, rows, self.places[1])
        if pairs.inputs is None:  # shifted right within each pair (§3.1), as in `shift_right`
            previous = np.roll(target.ids, 1)
            inputs = np.where(target.position == 0, self.decoder_start_token_id, previous)
            inputs[inputs == IGNORED] = self.decoder_pad_token_id
        else:
            inputs = pairs.inputs[target.index]
        return {
            "input_ids": source.laid_out(source.ids, free=self.pad_token_id),
            "segment_ids": source.laid_out(source.segment, free=0),
            "position_ids": source.laid_out(source.position, free=0),
            "decoder_input_ids": target.laid_out(inputs, free=self.decoder_pad_token_id),
            "decoder_segment_ids": target.laid_out(target.segment, free=0),
            "decoder_position_ids": target.laid_out(target.position, free=0),
            "labels": target.laid_out(target.ids, free=IGNORED),
        }


@dataclass
class _RowsOfSide:
    """The tokens of one side of packed rows. All arrays are (tokens,)."""

    shape: tuple[int, int]  #: rows, and places of a row
    index: np.ndarray  #: among the tokens of all sentences
    ids: np.ndarray
    position: np.ndarray  #: in its sentence
    segment: np.ndarray  #: 1 for the first pair of a row
    place: np.ndarray  #: among those of all rows

    @classmethod
    def of(cls, side: FlatIds, rows: PackedRows, places: int) -> "_RowsOfSide":
        """Lay the sentences with these numbers in rows of `places`."""
        pairs = np.concatenate([*rows, []]).astype(np.int64)  # (n,), of all rows
        counts = np.array([len(row) for row in rows])
        row = np.repeat(np.arange(len(rows)), counts)  # (n,)
        number_in_row = np.arange(len(pairs)) - _before(counts)[row]
        first_tokens = side.starts[pairs]
        lengths = side.starts[pairs + 1] - first_tokens
        used = np.bincount(row, weights=lengths, minlength=len(rows)).astype(np.int64)
        if used.max(initial=0) > places:
            raise ValueError(f"{used.max()} tokens in a row of {places} places")

        pair = np.repeat(np.arange(len(pairs)), lengths)  # (tokens,), below n
        token = np.arange(len(pair))
        position = token - _before(lengths)[pair]
        index = first_tokens[pair] + position
        first_places = np.arange(len(rows)) * places
        free_before = first_places - _before(used)  # (rows,)
        return cls(
            shape=(len(rows), places),
            index=index,
            ids=side.ids[index].astype(np.int64),
            position=position,
            segment=number_in_row[pair] + 1,
            place=token + free_before[row[pair]],
        )

    def laid_out(self, values: np.ndarray, free: int) -> Tensor:
        """Values of the tokens as a tensor of `shape`, with `free` in the other places."""
        tensor = np.full(self.shape, free, dtype=np.int64)
        tensor.reshape(-1)[self.place] = values
        return torch.from_numpy(tensor)


def _before(counts: np.ndarray) -> np.ndarray:
    """How many items of all groups come before each group with these `counts`."""
    return np.cumsum(counts) - counts


class PackedPairs(torch.utils.data.Dataset):
    """Makes the packed batches of an update, given the rows of `PackedBatchSampler`.

    If the pairs of a dataset change in each epoch (augmentation), their new lengths are packed again, for
    all ranks alike. The rows keep their places, and a pair that has become longer than a row gets a row of several
    times their number.

    Args:
        dataset: of pairs.
        layout: of the rows.
        sampler: the plan of the rows.
        collator: of the caller. In each epoch it makes a padded batch of the pairs of each planned batch, and that is
            packed. None: the dataset has the ids themselves.
    """

    def __init__(
        self,
        dataset: Dataset,
        layout: PackedLayout,
        sampler: PackedBatchSampler,
        collator: Collate | None = None,
    ):
        self.dataset = dataset
        self.layout = layout
        self.sampler = sampler
        self.collator = collator
        self.flat: FlatPairs | None = None  # the pairs, if they are the same in each epoch
        if collator is None and isinstance(dataset, Dataset):
            self.flat = FlatPairs.of_table(dataset)
        elif collator is None and not isinstance(dataset, RedrawnDataset):
            self.flat = FlatPairs.of_rows(self._rows(range(len(dataset))))
        sampler.whole = self.flat is None and collator is None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batches: list[PackedRows]) -> list[Batch]:
        if self.flat is not None:
            return [self.layout.pack(self.flat, rows) for rows in batches]
        if self.collator is not None:
            return [self.collated(rows, self.collator) for rows in batches]
        _, pairs = self._read(batches)
        return [layout.pack(pairs, rows) for layout, rows in self._packed_again(pairs)]

    def numbers(self, batches: list[PackedRows]) -> BatchNumbers:
        """The numbers of the pairs of each of this rank's batches."""
        if not self.sampler.whole:
            return [np.concatenate(rows).tolist() for rows in batches]
        numbers, pairs = self._read(batches)
        return [
            [numbers[place] for row in rows for place in row]
            for _, rows in self._packed_again(pairs)
        ]

    def collated(self, rows: PackedRows, collator: Collate) -> Batch:
        """A planned batch, with the pairs as a collator makes them now. Rows that do not fit any more are filled anew.

        The number of batches stays as it is, because other processes wait for each.
        """
        numbers = np.concatenate(rows)
        if not len(numbers):
            return self.layout.pack(FlatPairs.of_rows([]), rows)
        examples = read_examples(self.dataset, numbers.tolist())
        pairs = FlatPairs.of_batch(collator(examples), self.layout.pad_token_id)
        source, target = pairs.lengths
        source_places, target_places = self.layout.places
        ends = np.cumsum([len(row) for row in rows])
        planned = np.split(np.arange(len(numbers)), ends[:-1])

        def fits(row: np.ndarray) -> bool:
            return source[row].sum() <= source_places and target[row].sum() <= target_places

        if len(source) == len(numbers) and all(map(fits, planned)):
            return self.layout.pack(pairs, planned)
        longest = (
            max(source_places, int(source.max(initial=0))),
            max(target_places, int(target.max(initial=0))),
        )
        filled = fill_rows(source, target, longest)
        (dealt,) = deal(filled, max(len(filled), len(rows)), 1)
        return replace(self.layout, places=longest).pack(pairs, dealt)

    def _rows(self, numbers: Sequence[int]) -> list[Example]:
        rows = read_examples(self.dataset, numbers)
        return [{name: row[name] for name in TABLE_COLUMNS if name in row} for row in rows]

    def _read(self, batches: list[PackedRows]) -> tuple[list[int], FlatPairs]:
        """The numbers of the pairs of some batches, and the pairs."""
        numbers = [int(number) for rows in batches for row in rows for number in row]
        return numbers, FlatPairs.of_rows(self._rows(numbers))

    def _packed_again(self, pairs: FlatPairs) -> list[tuple[PackedLayout, PackedRows]]:
        """This rank's batches: layout and rows of places in `pairs`."""
        sampler = self.sampler
        places = self.layout.places
        source, target = pairs.lengths
        # Rows that a pair would need.
        times = np.maximum(ceil_div(source, places[0]), ceil_div(target, places[1])).clip(1)
        batches = []
        for time in np.unique(times):
            chosen = np.flatnonzero(times == time)
            longer = (places[0] * int(time), places[1] * int(time))
            rows = [chosen[row] for row in fill_rows(source[chosen], target[chosen], longer)]
            layout = replace(self.layout, places=longer)
            rows_of_batch = max(1, sampler.rows_of_batch // int(time))
            count = ceil_div(len(rows), rows_of_batch)
            count = ceil_div(count, sampler.world_size) * sampler.world_size
            dealt = deal(rows, rows_of_batch, count)
            batches += [(layout, each) for each in dealt[sampler.rank :: sampler.world_size]]
        return batches


# Other trainers


class PackedCollator:
    """A data collator that packs pairs into rows, for `Trainer` and loops of your own.

    Args:
        config: of the model: its pad token and decoder start token.
        source_places, target_places: S and T.
        rows: R. None makes as many as the pairs of a batch need. With a number all batches have one shape, and pairs
            that do not fit raise a ValueError.
    """

    def __init__(
        self,
        config: VanillaTransformerConfig,
        source_places: int = ROW,
        target_places: int = ROW,
        rows: int | None = None,
    ):
        self.layout = PackedLayout.of(config, (source_places, target_places))
        self.rows = rows

    def __call__(self, features: Sequence[Example]) -> Batch:
        """Pack features with `input_ids` and `labels`. Returns: as `PackedLayout.pack`."""
        pairs = FlatPairs.of_rows(features)
        places = self.layout.places
        rows = fill_rows(*pairs.lengths, places)
        if self.rows is not None:
            if len(rows) > self.rows:
                raise ValueError(
                    f"{len(features)} pairs need {len(rows)} rows of {places} places, not {self.rows}"
                )
            rows = deal(rows, self.rows, 1)[0]
        return self.layout.pack(pairs, rows)
