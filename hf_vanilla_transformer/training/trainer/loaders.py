"""The loaders and samplers of training: an update of token batches or of packed rows is one item.

`Trainer` makes the loaders of evaluations, and of training without `max_tokens_per_batch`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, TrainingArguments

from ...batches.batching import (
    Batch,
    Collate,
    Examples,
    LengthGroupedSampler,
    TokenBatchDataset,
    TokenBatchSampler,
    collate_batches,
    pair_lengths,
)
from ...batches.packing import PackedBatchSampler, PackedLayout, PackedPairs
from ...loss_vanilla_transformer import ROW_UNIT
from ...utils.errors import UserError
from ...utils.random_state import kept_random_state
from ..state.distributed import leave_signals_to_main_process, print_main

_END = object()
# Errors of `pair_lengths` for rows without two lists of ids. The last two are Arrow's.
_NO_PAIRS = (KeyError, TypeError, ValueError, NotImplementedError)


class ReadAheadLoader(DataLoader):
    """Makes the next item in a thread while the caller works with the current one.

    Each iteration has a thread of its own, which ends with it, also if it is left early. An error in the thread is
    raised where its item would be returned. The caller must not ask the dataset for its position, which is one item
    ahead.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        items = super().__iter__()
        with ThreadPoolExecutor(1, "read_ahead") as thread:
            following = thread.submit(next, items, _END)
            while (item := following.result()) is not _END:
                following = thread.submit(next, items, _END)
                yield item


# The loaders of training with `max_tokens_per_batch`


def packed_row_loader(
    args: TrainingArguments,
    dataset: Dataset,
    config: PreTrainedConfig,
    batches_per_update: int,
    collator: Collate | None = None,
) -> DataLoader:
    """The loader of packed rows, of a `collator` that makes padded batches or of the ids themselves.

    Pairs that never change are packed in a microsecond each. Sending them from a worker process would cost the
    main process more than that. On a GPU a thread packs them while the main thread launches kernels. The caller's code
    does not run in that thread, where it would draw random numbers at any time.
    """
    sampler = PackedBatchSampler(*_lengths(dataset), **_plan(args, batches_per_update))
    _warn_of_long_pairs(args, max(sampler.places))
    pairs = PackedPairs(dataset, PackedLayout.of(config, sampler.places), sampler, collator)
    if collator is not None:
        _check_collator(pairs, collator)
    if pairs.flat is None and args.dataloader_num_workers:
        return _with_workers(args, pairs, sampler, list)
    ahead = args.device.type == "cuda" and collator is None
    kind = ReadAheadLoader if ahead else DataLoader
    return kind(pairs, batch_sampler=sampler, collate_fn=list, **_options(args))


def _check_collator(pairs: PackedPairs, collator: Collate) -> None:
    """Refuse a collator whose batches cannot be packed, at the start."""
    with kept_random_state(torch.device("cpu")):
        try:
            pairs.collated([np.zeros(1, dtype=np.int64)], collator)
        except ValueError as error:
            raise UserError(f"pack=True: data_collator: {error}: set pack=False") from None


def token_batch_loader(
    args: TrainingArguments,
    dataset: Dataset,
    batches_per_update: int,
    collate: Callable[[list[Examples]], list[Batch]],
) -> DataLoader:
    """The loader of padded batches of similar lengths."""
    plan = _plan(args, batches_per_update)
    if getattr(dataset, "grows", False):
        plan |= {"world_size": 1, "rank": 0}  # the dataset shards the batches
    sampler = TokenBatchSampler(*_lengths(dataset), **plan)
    too_long = int((sampler.lengths > args.max_tokens_per_batch).sum())
    _warn_of_long_pairs(args, int(sampler.lengths.max()), f"{too_long:,}")
    updates = TokenBatchDataset(dataset, sampler.limit, args.world_size, args.process_index)
    return _with_workers(args, updates, sampler, collate)


def _with_workers(
    args: TrainingArguments,
    updates: torch.utils.data.Dataset,
    sampler: TokenBatchSampler,
    collate: Callable[[list[Any]], list[Batch]],
) -> DataLoader:
    """The loader of a dataset of updates, with the worker processes that the arguments ask for."""
    loader = DataLoader(
        updates,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        **_options(args),
    )
    return leave_signals_to_main_process(loader)


def _plan(args: TrainingArguments, batches_per_update: int) -> dict[str, Any]:
    """The arguments of a sampler of updates."""
    return {
        "max_tokens": args.max_tokens_per_batch,
        "tokens_per_update": args.tokens_per_update,
        "batches_per_update": batches_per_update,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "world_size": args.world_size,
        "rank": args.process_index,
    }


def _options(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that all loaders share.

    A loader draws a seed in each epoch. From the global generator this would change dropout after a resume.
    """
    return {
        "generator": torch.Generator().manual_seed(args.seed),
        "pin_memory": args.dataloader_pin_memory,
    }


def _warn_of_long_pairs(args: TrainingArguments, longest: int, count: str = "some") -> None:
    """Say that pairs are longer than a batch. `longest` is their largest number of tokens."""
    limit = args.max_tokens_per_batch
    if longest > limit:
        print_main(
            f"warning: {count} pairs are longer than max_tokens_per_batch={limit} "
            f"(the longest: {longest:,} tokens); each is a batch by itself"
        )


def padded_batches(
    config: PreTrainedConfig, collator: Collate, rounds: bool
) -> Callable[[list[Examples]], list[Batch]]:
    """The collator of an update, from the collator of a batch.

    If it `rounds`, in bfloat16 on a CPU, the shapes of batches are rounded, see `ReleaseFreeMemory`.
    """
    if not rounds:
        return partial(collate_batches, collator=collator)
    pads = config.pad_token_id, getattr(config, "target_pad_token_id", config.pad_token_id)
    return partial(collate_batches, collator=collator, row_unit=ROW_UNIT, pad_token_ids=pads)


def grouped_sampler(args: TrainingArguments, dataset: object) -> LengthGroupedSampler | None:
    """The sampler of `group_by_length` for a table of pairs, or None.

    It groups all pairs of an update, over ranks and accumulation steps.
    """
    if args.train_sampling_strategy != "group_by_length":
        return None
    if not isinstance(plain_dataset(dataset), Dataset):
        return None
    try:
        lengths = pair_lengths(dataset)
    except _NO_PAIRS:
        return None
    pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return LengthGroupedSampler(*lengths, pairs, args.seed)


def plain_dataset(dataset: Any) -> Any:
    """The dataset without the changes of an epoch, such as augmentation."""
    return getattr(dataset, "encoded", dataset)


def _lengths(dataset: Dataset) -> tuple[Any, Any]:
    if len(dataset) == 0:
        raise UserError("there is no pair to train on")
    try:
        return pair_lengths(dataset)
    except _NO_PAIRS:
        raise UserError(
            "train_dataset: max_tokens_per_batch needs rows with lists of ids, input_ids and labels"
        ) from None
