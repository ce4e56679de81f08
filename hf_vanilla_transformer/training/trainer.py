"""`Seq2SeqTrainer` for sentence pairs: batches of tokens, exact updates, whole checkpoints."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.utils import CONFIG_NAME

from ..data.batching import LengthGroupedSampler, TokenBatchSampler, pair_lengths
from ..data.token_batches import StreamingTokenBatches, TokenBatchDataset, collate_batches
from ..data.tokenizer_training import save_tokenizers
from ..errors import UserError
from ..modeling_vanilla_transformer import VanillaTransformerPreTrainedModel
from .callbacks import StopWithCheckpoint
from .checkpoints import POSITION, STATE, WAITING_ROOM, move_in, remove_old_checkpoints, whole_checkpoints
from .progress import Meter, perplexities


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with batches of tokens (§5.1), and checkpoints that are whole as soon as they are there.

    With `max_tokens_per_batch` (see `VanillaTransformerTrainingArguments`) each item of the training loader is a whole
    update, cut into batches, so that one step of `Trainer` is one update however many batches it has. Loss and
    gradients are means over all target tokens of the update, in however many batches and processes; the model must
    take `num_items_in_batch` for that. Without, this is `Seq2SeqTrainer`, but that `group_by_length` looks at both
    sides of a pair and shuffles the batches.

    In both cases a loss that is not finite ends the training, and evaluation keeps the caller's order; the base class
    would group there too, and return predictions permuted.

    Args:
        target_tokenizer: goes into each checkpoint beside `processing_class`, for a target with its own vocabulary.
        others: as for `Seq2SeqTrainer`.

    Raises:
        UserError: settings that do not go with `max_tokens_per_batch`.
    """

    def __init__(self, *args: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.target_tokenizer = target_tokenizer
        self.meter = Meter()
        # How many batches an update has, where no number of tokens says so; a resumed run goes on with its own.
        self.batches_per_update = self.args.world_size
        self._updates: TokenBatchSampler | StreamingTokenBatches | None = None
        self._start: dict[str, Any] | None = None  # the position of the checkpoint to go on from
        self._epoch = 0
        self._warned = False
        self._saving_beside: Path | None = None
        if self.by_tokens:
            self._refuse_what_cannot_be()

    @property
    def by_tokens(self) -> bool:
        """Whether batches are made of tokens."""
        return getattr(self.args, "max_tokens_per_batch", None) is not None

    def _refuse_what_cannot_be(self) -> None:
        args, why = self.args, None
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(model, VanillaTransformerPreTrainedModel) and self.compute_loss_func is None:
            # Marian, BART and T5 take num_items_in_batch, and then do not look at it.
            why = (
                f"needs a loss that is divided by num_items_in_batch: give {type(model).__name__} a compute_loss_func"
            )
        elif not args.average_tokens_across_devices:
            why = "needs average_tokens_across_devices=True"
        elif args.n_gpu > 1:
            why = f"does not go with {args.n_gpu} GPUs in one process; start the script with accelerate launch"
        elif self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1:
            why = "shares sentences among processes; it does not go with tensor, context or sequence parallelism"
        if why:
            raise UserError(f"max_tokens_per_batch={args.max_tokens_per_batch} {why}")

    # The order of the data

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(_table(dataset), Dataset):
            return super()._get_train_sampler(train_dataset)
        # All that one update sees, in however many processes and parts, should be alike.
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGroupedSampler(*pair_lengths(dataset), batch_size, self.args.seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(eval_dataset, Dataset):
            return super()._get_eval_sampler(eval_dataset)
        # Several processes get their shares from accelerate.
        return torch.utils.data.SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def get_train_dataloader(self) -> DataLoader:
        """The loader of `Seq2SeqTrainer`, or with `max_tokens_per_batch` one whose items are lists of batches."""
        if not self.by_tokens:
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        plan = {
            "max_tokens": self.args.max_tokens_per_batch,
            "tokens_per_update": self.args.tokens_per_update,
            "batches_per_update": self.batches_per_update,
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            "world_size": self.args.world_size,
            "rank": self.args.process_index,
        }
        streaming = isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        return self._stream_loader(plan) if streaming else self._table_loader(plan)

    def _table_loader(self, plan: dict[str, Any]) -> DataLoader:
        if len(self.train_dataset) == 0:
            raise UserError("there is no pair to train on")
        dataset, collator = self._without_unused_columns()
        self._updates = sampler = TokenBatchSampler(*pair_lengths(self.train_dataset), **plan)
        too_long = int((sampler.lengths > self.args.max_tokens_per_batch).sum())
        self._warn_of_long_pairs(int(sampler.lengths.max()), f"{too_long:,}")
        return DataLoader(
            TokenBatchDataset(dataset),
            batch_sampler=sampler,
            collate_fn=partial(collate_batches, collator=collator),
            generator=self._loader_generator(),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _stream_loader(self, plan: dict[str, Any]) -> DataLoader:
        if self.args.dataloader_num_workers:
            raise UserError("a stream is read in this process: set dataloader_num_workers to 0")
        collator = self._get_collator_with_removed_columns(self.data_collator)
        self._updates = StreamingTokenBatches(self.train_dataset, self.args.stream_window, **plan)
        return DataLoader(
            self._updates,
            batch_size=None,
            collate_fn=partial(collate_batches, collator=collator),
            generator=self._loader_generator(),
            pin_memory=self.args.dataloader_pin_memory,
        )

    def _loader_generator(self) -> torch.Generator:
        # A loader draws a number when an epoch begins, and again when a run goes on: not from what dropout draws from.
        return torch.Generator().manual_seed(self.args.seed)

    def _without_unused_columns(self) -> tuple[Any, Any]:
        if isinstance(self.train_dataset, Dataset):
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _warn_of_long_pairs(self, longest: int, count: str = "some") -> None:
        if longest <= self.args.max_tokens_per_batch or self._warned or not self.is_world_process_zero():
            return
        self._warned = True
        print(
            f"warning: {count} pairs are longer than max_tokens_per_batch={self.args.max_tokens_per_batch} "
            f"(the longest: {longest:,} tokens); each is a batch of its own",
            flush=True,
        )

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        # Everything that draws random numbers by the epoch is told which one begins.
        anew: list[Any] = [each for each in (self._updates, self.train_dataset) if hasattr(each, "set_epoch")]
        for each in anew:
            each.set_epoch(epoch)
        self._epoch = epoch
        super()._run_epoch(epoch=epoch, **kwargs)

    # One update

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """The batches of the next update, and its number of target tokens over all processes."""
        if not self.by_tokens:
            updates, words = super().get_batch_samples(epoch_iterator, num_batches, device)
            self.meter.count(updates, words)
            return updates, words
        updates = list(islice(epoch_iterator, num_batches))
        if isinstance(self._updates, StreamingTokenBatches):
            self._warn_of_long_pairs(self._updates.longest)
        batches = [batch for update in updates for batch in update]
        words = self._get_num_items_in_batch(batches, device)
        self.meter.count(batches, words)
        return updates, words

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one batch, or of all batches of an update; gradients are exchanged with the last.

        Raises:
            UserError: the loss is not a finite number.
        """
        batches = inputs if self.by_tokens else [inputs]
        total = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(batches, start=1):
            if number < len(batches):
                with self.accelerator.no_sync(model):
                    loss = super().training_step(model, batch, num_items_in_batch)
            else:
                loss = super().training_step(model, batch, num_items_in_batch)
            if not torch.isfinite(loss):
                raise UserError(self._blame(loss.item(), number - 1))
            total += loss
        return total

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As of `Seq2SeqTrainer`; what the model says of the loss without smoothing goes to the log."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        nll = outputs.get("nll_loss") if isinstance(outputs, dict) else None
        if nll is not None and num_items_in_batch is not None:
            # A part of the mean over all target tokens; where these are all processes', their mean becomes a sum.
            share = self.accelerator.num_processes // self.get_tp_size()
            self.meter.add_nll(nll.detach().sum() * (share if self.args.average_tokens_across_devices else 1))
        return (loss, outputs) if return_outputs else loss

    def _blame(self, loss: float, batch: int) -> str:
        """What to say of a loss that is not finite: the update, and the lines of the batch."""
        said = f"the loss of update {self.state.global_step + 1} is {loss}"
        rows = self._rows_at_hand(batch)
        if rows is None:
            return said
        data = _table(self.train_dataset)
        if "line" in getattr(data, "column_names", ()):
            rows = [int(line) for line in data.with_format(None).select_columns(["line"])[rows]["line"]]
        else:
            rows = [row + 1 for row in rows]
        return f"{said}; its batch is made of the lines {', '.join(map(str, sorted(rows)))}"

    def _rows_at_hand(self, batch: int) -> list[int] | None:
        """The rows of a batch of the update that is being done, or of all of it; None where nobody can tell."""
        if isinstance(self._updates, TokenBatchSampler):
            rows = self._updates.batches(self.state.global_step % len(self._updates))[batch]
            return [max(row, ~row) for row in rows]
        sampler = None if self.by_tokens else self._get_train_sampler()
        if not isinstance(sampler, LengthGroupedSampler):
            return None
        sampler.set_epoch(self._epoch)
        start = self.state.global_step % -(-len(sampler) // sampler.batch_size) * sampler.batch_size
        return list(islice(sampler, start, start + sampler.batch_size))

    def create_optimizer(self, model: Any = None) -> Any:
        """As of `Seq2SeqTrainer`; with FSDP2, embeddings and output matrix that are one are sharded as one before.

        accelerate thinks of one embedding beside the output, and torch refuses a matrix that the decoder's embedding,
        too, has a part in (§3.4).
        """
        if self.accelerator.is_fsdp2:
            plugin, mesh = self.accelerator.state.fsdp_plugin, self.accelerator.torch_device_mesh
            share_as_one(
                self.model if model is None else model,
                mesh=mesh and mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)],
                mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=plugin.cpu_offload,
            )
        return super().create_optimizer(model)

    # What `Trainer` would do with the one batch of a step

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(map(super().floating_point_ops, inputs)) if self.by_tokens else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs if self.by_tokens else [inputs]:
            super()._track_num_input_tokens(batch)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Pairs of an update; about, where they are made of tokens."""
        if isinstance(self._updates, TokenBatchSampler):
            return max(1, round(len(self._updates.lengths) / len(self._updates)))
        return super().get_total_train_batch_size(args)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """`Seq2SeqTrainer`'s log, with speed, padding and the loss without smoothing (`nll_loss`) beside the training
        loss, and a perplexity to each loss that is without smoothing."""
        if "loss" in logs:
            stops = [each for each in self.callback_handler.callbacks if isinstance(each, StopWithCheckpoint)]
            most = min((stop.minutes_left() for stop in stops), default=math.inf)
            logs.update(self.meter.read(self.state, lambda number: self.accelerator.reduce(number, "mean"), most))
        if not self.args.label_smoothing_factor:  # which smoothes evaluations, too
            smoothed = getattr(self.model.config, "label_smoothing", 0) > 0
            logs.update(perplexities(logs, but="loss" if smoothed else None))
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Seq2SeqTrainer`, but that pairs which fill up the processes' last batches are not counted twice."""
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    # Going on from a checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As of `Seq2SeqTrainer`; `resume_from_checkpoint=True` takes the last checkpoint that is whole."""
        if resume_from_checkpoint is True and (whole := whole_checkpoints(Path(self.args.output_dir))):
            resume_from_checkpoint = str(whole[-1])
        if self.is_world_process_zero():
            shutil.rmtree(Path(self.args.output_dir) / WAITING_ROOM, ignore_errors=True)
        self._start = None
        if self.by_tokens and not self.args.ignore_data_skip and isinstance(resume_from_checkpoint, str):
            self._start = self._read_position(Path(resume_from_checkpoint))
        self.meter.begin()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _read_position(self, checkpoint: Path) -> dict[str, Any] | None:
        file = checkpoint / POSITION
        if not file.is_file():
            return None
        position = json.loads(file.read_text(encoding="utf-8"))
        self.batches_per_update = position["batches_per_update"]
        for name in _PLAN:
            if position[name] != getattr(self.args, name):
                raise UserError(
                    f"{checkpoint} was trained with {name}={position[name]}, and with {getattr(self.args, name)} "
                    f"the data would come in another order: go on with {position[name]}, or begin the epoch anew with "
                    "ignore_data_skip=True"
                )
        return position

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs, updates = super()._init_training_state(*args, **kwargs)
        if isinstance(self._updates, StreamingTokenBatches) and self._start is not None:
            self._updates.load_state_dict(self._start["stream"])
            return self._start["stream"]["epoch"], 0
        return epochs, updates

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving_beside or super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with as_itself(self.model):
            super()._save(output_dir, state_dict)
        if self.args.should_save and self.target_tokenizer is not None:
            save_tokenizers(output_dir or self.args.output_dir, self.processing_class, self.target_tokenizer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside the others, and let it appear when it is whole: a run that is killed, or whose
        disk is full, has the ones before."""
        run = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        self._saving_beside = run / WAITING_ROOM
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            shutil.rmtree(self._saving_beside, ignore_errors=True)  # a full disk is not to stay full
            raise
        finally:
            beside, self._saving_beside = self._saving_beside / name, None
        if self.state.best_model_checkpoint == str(beside):
            self.state.best_model_checkpoint = str(run / name)
        wait_for_everyone()  # each process writes its own random state
        if self.args.should_save:
            if not (beside / CONFIG_NAME).is_file():  # sharded weights come without anything else
                self.model.config.save_pretrained(beside)
                if self.processing_class is not None:
                    save_tokenizers(beside, self.processing_class, self.target_tokenizer)
            self._write_position(beside)
            self.state.save_to_json(str(beside / STATE))
            move_in(beside, run / name)
            if self.args.save_total_limit:
                remove_old_checkpoints(run, self.args.save_total_limit, run / name, self.state.best_model_checkpoint)
        wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / name))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving_beside is None:  # not from where it is about to leave
            super()._push_from_checkpoint(checkpoint_folder)

    def _write_position(self, checkpoint: Path) -> None:
        """Say where in the data this is, for as much as the number of updates does not tell it."""
        if not self.by_tokens:
            return
        position = {
            "batches_per_update": self.batches_per_update,
            **{name: getattr(self.args, name) for name in _PLAN},
        }
        if isinstance(self._updates, StreamingTokenBatches):
            position["stream"] = self._updates.state_dict()
        (checkpoint / POSITION).write_text(json.dumps(position), encoding="utf-8")


# What decides which pairs are in an update.
_PLAN = "max_tokens_per_batch", "tokens_per_update", "seed", "data_seed"


def share_as_one(model: torch.nn.Module, **settings: Any) -> None:
    """Make an FSDP2 unit of each set of modules that hold one and the same matrix.

    Args:
        model: not sharded yet. settings: of `fully_shard`.
    """
    holders: dict[torch.Tensor, list[torch.nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.Linear) and not isinstance(module, FSDPModule):
            holders.setdefault(module.weight, []).append(module)
    for tied in holders.values():
        if len(tied) > 1:
            fully_shard(tied, reshard_after_forward=False, **settings)


@contextmanager
def as_itself(model: torch.nn.Module) -> Iterator[None]:
    """Undo, for a while, that FSDP2 gives a model another class: its name and its code would go into checkpoints."""
    sharded = type(model)
    if issubclass(sharded, FSDPModule):
        model.__class__ = sharded.__bases__[1]
    try:
        yield
    finally:
        model.__class__ = sharded


def _table(dataset: Any) -> Any:
    """The data set itself, under what segments it anew at each access."""
    return getattr(dataset, "encoded", dataset)
