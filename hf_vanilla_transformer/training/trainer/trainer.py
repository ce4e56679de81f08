"""`Seq2SeqTrainer` for sentence pairs: token batches, exact updates, atomic checkpoints."""

import inspect
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DynamoBackend, gather_object
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import ModelOutput

from ...batches.batching import Batch, LengthGroupedSampler, TokenBatchSampler
from ...batches.packing import PLAN_VERSION, PackedBatchSampler, is_packed, token_mask
from ...batches.redrawing import RedrawnDataset
from ...loss_vanilla_transformer import IGNORED
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...utils.errors import UserError
from ...utils.finite import first_not_finite
from ..state.callbacks import WeightAverage
from ..state.checkpoints import resume_hint
from ..state.distributed import (
    Agreement,
    leave_signals_to_main_process,
    print_main,
    shard_tied_modules,
)
from ..state.fingerprint import PACKING, Facts
from .fast_paths import (
    CAST_WEIGHTS,
    COMPILED_UPDATES,
    FUSED_LOSS,
    PACKED_ROWS,
    ROUNDED_SHAPES,
    has_shards,
)
from .forward import ForwardChoice, forward_pass_of
from .forward_choice import choose_forward
from .loaders import (
    grouped_sampler,
    packed_row_loader,
    padded_batches,
    plain_dataset,
    token_batch_loader,
)
from .log_metrics import ThroughputMeter, perplexities
from .loss_check import (
    LossCheck,
    gradient_error,
    leave_out_on_device,
    require_finite_on_all_ranks,
    require_loss_scale,
)
from .model_state import ModelState
from .muon import MuonAdamW, muon_groups
from .objectives.consistency import ConsistencyObjective, consistency_objective, halves
from .objectives.distillation import Teacher
from .ownership import foreign_data, foreign_loss
from .trainer_checks import (
    check_arguments,
    check_collator,
    check_objective,
    check_optimizer_is_made,
    check_token_batches,
    check_unsharded,
)
from .translating_trainer import TranslatingTrainer

_CONSISTENCY = ("simcut_alpha", "r_drop_alpha", "crossconst_alpha")


class VanillaTransformerTrainer(TranslatingTrainer):
    """`Seq2SeqTrainer` with token batches (§5.1) and atomically written checkpoints.

    With `max_tokens_per_batch` (see `VanillaTransformerTrainingArguments`) each item of the training loader is the
    list of batches of one update, so that one step of `Trainer` is one update. Loss and gradients are means over all
    target tokens of the update, for any number of batches and processes. The model must accept `num_items_in_batch`
    for this. Without `max_tokens_per_batch` this is `Seq2SeqTrainer`, except that `group_by_length` considers both
    sides of a pair and shuffles the batches.

    A loss or a gradient that is not finite stops training before it reaches a checkpoint. On a CPU, and on a GPU with
    one of torch's fused optimizers, the default, the gradient does not reach the weights either. Evaluation keeps the
    order of the dataset.

    Args:
        args, kwargs: the arguments of `ResumableTrainer`.

    Raises:
        UserError: settings that do not go with the model, with each other or with the way it is distributed.
    """

    optimizer: torch.optim.Optimizer | None  # made by `create_optimizer`

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        check_collator(self)
        check_optimizer_is_made(self)
        if self.by_tokens:
            check_token_batches(self, self._base_model())
        self.packs = False  # rows, by `_decide_packing`
        self._decide_packing()
        if self.args.device.type != "cpu":
            # It reads each loss, and a loss that is not finite is an error.
            self.args.logging_nan_inf_filter = False
        self.meter = ThroughputMeter()
        self.losses = LossCheck()
        # Of the update: its number, and for each pass the number of the batch, the batch, and the number of tokens.
        self._passes: list[tuple[int, int, Batch, torch.Tensor | int | None]] = []
        self.forwards = ForwardChoice()  # chosen when training starts
        # The model when the fast paths were found to be right, or None where none is on.
        self._checked_model: ModelState | None = None
        self.consistency: ConsistencyObjective | None = None
        self.teacher: Teacher | None = None
        self._student: PreTrainedModel | None = None  # of the teacher
        self.ema: WeightAverage | None = None
        self._make_objectives()

    @property
    def packing_asked(self) -> bool | None:
        """`pack` as the caller gave it. None: where `PACKED_ROWS` says so."""
        return getattr(self.args, "pack", False)

    def _decide_packing(self) -> None:
        """Refuse packed rows where they cannot be, and choose them on a GPU where all that they pass by is known."""
        is_asked = bool(self.packing_asked)
        if is_asked and (why_not := PACKED_ROWS.why_not(self, asked=True)):
            raise UserError(f"pack=True {why_not}")
        self.packs = is_asked or PACKED_ROWS.is_on(self)
        if self.packs and self.args.torch_compile:
            # accelerate would compile the model for every shape of an evaluation, too
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO

    def _make_objectives(self) -> None:
        """Make the objectives and the average of the weights that the arguments ask for now.

        A hyperparameter search and the caller may change them between two runs.
        """
        check_arguments(self)
        check_unsharded(self)
        self.consistency = self._make_consistency()
        self.teacher = self._load_teacher()
        if self.ema is not None:
            self.pop_callback(self.ema)
            self.ema = None
        if decay := getattr(self.args, "ema_decay", 0):
            self.ema = WeightAverage(decay)
            self.add_callback(self.ema)

    def _make_consistency(self) -> ConsistencyObjective | None:
        """Make the objective with two passes over a batch, if the arguments have one."""
        mark = "target" if self.starts_with_language else "source"
        objective = consistency_objective(self.args, mark)
        if objective is None:
            return None
        name = next(name for name in _CONSISTENCY if getattr(self.args, name))
        setting = f"{name}={objective.alpha}"
        check_objective(self, self._base_model(), setting)
        is_joint = self.target_tokenizer in (None, self.processing_class)
        has_mark = self.languages is not None and self.languages.source_mark != "source"
        if name == "crossconst_alpha" and not (is_joint and has_mark):
            raise UserError(
                f"{setting} needs directions with a joint vocabulary and the token of the target language alone"
            )
        return objective

    def _load_teacher(self) -> Teacher | None:
        """Load the models of word-level distillation, if the arguments name some."""
        folders = getattr(self.args, "teacher", None)
        if not folders:
            return None
        student = self._base_model()
        check_objective(self, student, f"teacher={' '.join(folders)}")
        changing = isinstance(self.train_dataset, torch.utils.data.IterableDataset | RedrawnDataset)
        if self.args.teacher_top and changing:
            raise UserError(
                f"teacher_top={self.args.teacher_top} needs the same pairs in each epoch: leave out augment and "
                "rewrite"
            )
        source = self.processing_class
        tokenizers = None if source is None else (source, self.target_tokenizer or source)
        loaded = self.teacher
        if loaded is None or loaded.folders != folders or self._student is not student:
            loaded = Teacher(folders, self.args.teacher_weight, student, tokenizers)
            self._student = student
        loaded.weight = self.args.teacher_weight
        loaded.top = None
        return loaded

    # Data

    def _data(self) -> Facts:
        plan = PLAN_VERSION if self.packs else None
        return {**super()._data(), "pack": self.packs, PACKING: plan}

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns of the translator's `forward` also for a subclass whose `forward` takes `**kwargs`."""
        super()._set_signature_columns_if_needed()
        if not isinstance(self._base_model(), VanillaTransformerForConditionalGeneration):
            return
        names = inspect.signature(VanillaTransformerForConditionalGeneration.forward).parameters
        known = set(self._signature_columns)
        self._signature_columns += [name for name in names if name != "self" and name not in known]

    def _get_train_sampler(
        self, train_dataset: Dataset | None = None
    ) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        sampler = grouped_sampler(self.args, dataset)
        return super()._get_train_sampler(train_dataset) if sampler is None else sampler

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """Apply `dataloader_drop_last` to training only, because evaluations count every sentence, and leave signals
        to the main process."""
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            return leave_signals_to_main_process(
                super()._get_dataloader(*args, is_training=is_training, **kwargs)
            )
        finally:
            self.args.dataloader_drop_last = drop_last

    def get_train_dataloader(self) -> DataLoader:
        """Make the training loader. With `max_tokens_per_batch` each item is the list of batches of an update."""
        dataset = self.train_dataset
        if not self.by_tokens or dataset is None:
            return super().get_train_dataloader()
        collator = self.data_collator
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        count = self.batches_per_update
        config = self._base_model().config
        self._decide_packing()  # again, for what was changed since the trainer was made
        if self.packs:
            read_anew = collator if foreign_data(self) else None
            return packed_row_loader(self.args, dataset, config, count, read_anew)
        collate = padded_batches(config, collator, ROUNDED_SHAPES.is_on(self))
        return token_batch_loader(self.args, dataset, count, collate)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> tuple:
        """Remember the plan of the loader that trains, and choose the forward pass.

        Callbacks may make other loaders.
        """
        if self.by_tokens:
            self._pairs = dataloader.dataset
            self._updates = cast(Any, dataloader.batch_sampler)
            if not isinstance(self._updates, TokenBatchSampler):
                raise UserError(
                    f"max_tokens_per_batch={args.max_tokens_per_batch} does not go with a get_train_dataloader that "
                    "makes batches of its own: set per_device_train_batch_size instead"
                )
        plan = self._updates if isinstance(self._updates, PackedBatchSampler) else None
        self.forwards = choose_forward(
            self,
            self._base_model(),
            plan,
            casts=CAST_WEIGHTS.why_not(self) is None,
            compiles=COMPILED_UPDATES.is_on(self),
        )
        self._print_fast_paths(plan)
        return super().set_initial_training_values(args, dataloader)

    def _print_fast_paths(self, plan: PackedBatchSampler | None) -> None:
        """Print a line for each fast path that is on, and the reason for each that is not."""
        shape = ""
        if plan is not None:
            source, target = plan.places
            shape = (
                f", {len(plan):,} updates an epoch, batches of {plan.rows_of_batch} rows of {source} source and "
                f"{target} target places"
            )
            if carried := PACKED_ROWS.why_not(self):
                shape += f"; pack=True, although packing {carried}"
            if self.args.include_num_input_tokens_seen == "all":
                shape += "; num_input_tokens_seen counts free places, of tokens alone non_padding"
        print_main(PACKED_ROWS.line(self, plan is not None, shape))
        if self.forwards.compiled is None:  # `compile` says when it has been compiled
            print_main(COMPILED_UPDATES.line(self, False))
        print_main(CAST_WEIGHTS.line(self, self.forwards.cast is not None))
        for path in (FUSED_LOSS, ROUNDED_SHAPES):
            print_main(path.line(self, path.is_on(self)))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple:
        """Remember the model as accelerate has prepared it. What changes from now on, callbacks have changed."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        passes_by = self.packs or self.forwards != ForwardChoice()
        # The libraries that shard weights change modules in the first update.
        is_checked = passes_by and not has_shards(self)
        self._checked_model = ModelState.of(self.model) if is_checked else None
        return prepared

    def _leave_wrong_paths(self) -> None:
        """Leave the fast paths that do not compute what the model does, if it was changed since the last update.

        Raises:
            UserError: it mixes the pairs of packed rows now.
        """
        if self._checked_model is None:
            return
        before, now = self._checked_model, ModelState.of(self.model)
        has_layers = now.has_layers_of(before)
        is_changed = not (has_layers and now.has_code_of(before))
        choice = self.forwards
        reason = None if has_layers else "has other layers than before"
        if choice.compiled is not None and choice.compiled.is_due:  # all ranks compile, or none
            (on_any,) = Agreement(is_changed, device=self.args.device).read()
            if on_any and not is_changed:
                is_changed = True
                reason = "has a changed model on another rank"
        if not is_changed:
            return
        self._checked_model = now
        update = f"update {self.state.global_step + 1}"
        if self.packs and (why_not := PACKED_ROWS.why_not(self, asked=True)):
            raise UserError(
                f"{update}: the model was changed, and packing {why_not}: train with pack=False"
            )
        if choice.compiled is not None and (why_not := COMPILED_UPDATES.why_not(self) or reason):
            choice.compiled = None
            print_main(f"{update}: {COMPILED_UPDATES.line_of(why_not)}")
        if choice.cast is not None and (why_not := CAST_WEIGHTS.why_not(self)):
            choice.cast = None
            print_main(f"{update}: {CAST_WEIGHTS.line_of(why_not)}")
        if choice.cast is not None and not has_layers:
            others = choose_forward(self, self._base_model(), None, casts=True, compiles=False)
            choice.cast = others.cast

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Batch]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], torch.Tensor | int | None]:
        """The batches of the next update, and its number of target tokens over all ranks."""
        if self.by_tokens:
            updates = list(islice(epoch_iterator, num_batches))
            batches = [batch for update in updates for batch in update]
            target_tokens = self._count_target_tokens(batches, device) if batches else None
        else:
            updates, target_tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
            batches = updates
        self.meter.count(batches, target_tokens)
        return updates, target_tokens

    def _count_target_tokens(self, batches: list[Batch], device: torch.device) -> torch.Tensor:
        """The number of target tokens of an update over all ranks. The host does not wait for the device."""
        if not all("labels" in batch for batch in batches):
            raise UserError(
                f"max_tokens_per_batch={self.args.max_tokens_per_batch} counts labels, which the batches of "
                "data_collator lack: name them so, or set per_device_train_batch_size instead"
            )
        on_rank = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
        return self.accelerator.gather(on_rank.to(device, non_blocking=True)).sum()

    # The update

    def _prepare_input(self, data: Any) -> Any:
        """Copy token ids to the device while it works. The copy of the base class waits until it has finished."""
        if isinstance(data, torch.Tensor) and not data.is_floating_point():
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def training_step(
        self,
        model: PreTrainedModel,
        inputs: Batch | list[Batch],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward pass of one batch, or of all batches of an update with one gradient all-reduce.

        With SimCut or R-Drop each batch in two halves: see `halves`.
        """
        batches = list(enumerate(_batches(inputs)))
        if self._due_consistency() and num_items_in_batch is not None:
            batches = [(index, half) for index, batch in batches for half in halves(batch)]
        self._leave_wrong_paths()
        self._compile_if_due(batches[0][1], num_items_in_batch)
        step = self.state.global_step
        self._passes = [each for each in self._passes if each[0] == step]
        self._passes += [(step, index, batch, num_items_in_batch) for index, batch in batches]
        if self.by_tokens:
            # `Trainer` divides by it the loss of a trainer that sets `loss_is_scaled_for_ga` to False.
            self.current_gradient_accumulation_steps = len(batches)
        total = torch.zeros((), device=self.args.device)
        for part, (index, batch) in enumerate(batches):
            last = part == len(batches) - 1
            with (
                self._attention_kernels(),
                nullcontext() if last else self.accelerator.no_sync(model),
            ):
                loss = super().training_step(model, batch, num_items_in_batch)
            self.losses.add(step, index, loss)
            if loss.device.type == "cpu" or self.losses.is_full:
                self._require_finite_losses()
            total += loss
        return total

    def _compile_if_due(self, batch: Batch, num_items_in_batch: torch.Tensor | int | None) -> None:
        """Compile the passes of a batch, unless that is done."""
        compiled = self.forwards.compiled
        if compiled is None or not compiled.is_due or not compiled.fits(batch):
            return
        self._base_model().train()
        inputs = self._prepare_inputs(batch)
        with self._attention_kernels():
            compiled.compile({**inputs, "num_items_in_batch": num_items_in_batch})

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Compute the loss of the objective, and log the loss without label smoothing if the model returns it."""
        base = self._base_model()
        forward = self.forwards.of(inputs) if model.training else None
        if model.training and (consistency := self._due_consistency()):
            inputs = consistency.inputs(base, inputs)
        elif model.training and self.teacher is not None:
            inputs = self.teacher.inputs(inputs)
        with nullcontext() if forward is None else forward_pass_of(base, forward):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        nll = outputs.get("nll_loss") if isinstance(outputs, dict) else None
        if nll is not None and num_items_in_batch is not None:
            # The log averages over ranks. If num_items_in_batch counts the tokens of all ranks, the sum is needed.
            data_parallel = self.accelerator.num_processes // self.get_tp_size()
            self.meter.add_nll(
                nll.detach().sum()
                * (data_parallel if self.args.average_tokens_across_devices else 1)
            )
        return (loss, outputs) if return_outputs else loss

    def _due_consistency(self) -> ConsistencyObjective | None:
        """The objective with two passes, after the updates with the plain loss."""
        if self.state.global_step < getattr(self.args, "consistency_start", 0):
            return None
        return self.consistency

    def _require_finite_losses(self) -> None:
        """Stop a run whose loss is not finite.

        A GPU is waited for. This is called when a loss is logged or saved, at the end of training, and after many
        batches.
        """
        self.losses.require_finite(self._lines_of_batch, self._skips_gradients)

    def _get_grad_norm(
        self, model: PreTrainedModel, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        """The norm of the gradient, which `Trainer` asks for before the optimizer's step, after a check."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.mixed_precision != "fp16":
            self._check_gradient(model, norm)
        return norm

    def _check_gradient(self, model: PreTrainedModel, norm: torch.Tensor | float) -> None:
        """Stop the run if the gradient of the update is not finite, or leave the update out if the user asks for that.

        A GPU is not waited for if a fused optimizer can leave it out by itself, or if the run stops before the weights
        are used or saved. The norm is then read together with the losses.
        """
        step = self.state.global_step
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # of the shards of all ranks
        if (
            isinstance(norm, torch.Tensor)
            and norm.device.type != "cpu"
            and (self._leaves_out_on_device(norm) or not self._skips_gradients)
        ):
            self.losses.add(step, None, norm)
            return
        if math.isfinite(norm):
            return
        if not self._skips_gradients:
            raise gradient_error(step, float(norm), self._lines_of_gradient(model))
        self.losses.skipped += 1
        model.zero_grad()  # a parameter without a gradient is not updated

    def _leaves_out_on_device(self, norm: torch.Tensor) -> bool:
        return not self.is_fsdp_enabled and leave_out_on_device(self.optimizer, norm)

    @property
    def _skips_gradients(self) -> bool:
        return getattr(self.args, "skip_nonfinite_gradients", False)

    def _lines_of_gradient(self, model: PreTrainedModel) -> list[int] | None:
        """The lines of the batches of this update, of all ranks, whose own gradients are not finite.

        Their passes are repeated one by one. If each gradient alone is finite, these are the lines of the update.
        """
        update = self.state.global_step
        lines: list[int] = []
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        for _, index, batch, target_tokens in [] if is_sharded else self._passes:
            model.zero_grad()
            with self._attention_kernels(), self.accelerator.no_sync(model):
                super().training_step(model, batch, target_tokens)
            gradients = ((name, each.grad) for name, each in model.named_parameters())
            if first_not_finite((name, each) for name, each in gradients if each is not None):
                lines += self._lines_of_batch(update, index) or []
        return gather_object(lines) or gather_object(self._lines_of_batch(update, None) or [])

    def _lines_of_batch(self, update: int, batch: int | None) -> list[int] | None:
        """The lines of the training data in a batch of an update of this epoch, or without `batch` in all of them.

        They are None if they are unknown.
        """
        number = update - self._epoch_start
        rows = self._rows_of_batch(number, batch) if number >= 0 else None
        data = plain_dataset(self.train_dataset)
        if rows is None:
            return None
        if "line" not in getattr(data, "column_names", ()):
            return [row + 1 for row in rows]
        lines = data.with_format(None).select_columns(["line"])[rows]["line"]
        return [int(line) for line in lines]

    def _rows_of_batch(self, update: int, batch: int | None) -> list[int] | None:
        """The rows of a batch of an update of this epoch. Without token batches, those of the whole update."""
        if isinstance(self._updates, TokenBatchSampler):
            batches = self._pairs.numbers(self._updates.batches(update))
            return [row for rows in batches for row in rows] if batch is None else batches[batch]
        sampler = None if self.by_tokens else self._get_train_sampler()
        if not isinstance(sampler, LengthGroupedSampler):
            return None
        sampler.set_epoch(self._epoch)
        start = update * sampler.batch_size
        return list(islice(sampler, start, start + sampler.batch_size))

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Make Muon or the optimizer of `optim`. With FSDP2, first shard modules with tied weights (§3.4) as one unit.

        accelerate handles one embedding tied to the output layer. Here the decoder's embedding may be tied, too, and
        torch refuses tied weights in separate units.
        """
        trained = self.model if model is None else model
        if self.accelerator.is_fsdp2:
            plugin = self.accelerator.state.fsdp_plugin
            mesh = self.accelerator.torch_device_mesh
            shard_tied_modules(
                trained,
                mesh=mesh and mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)],
                mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=plugin.cpu_offload,
            )
        if getattr(self.args, "muon", False) and self.optimizer is None:
            _, settings = self.get_optimizer_cls_and_kwargs(self.args, trained)  # AdamW's
            groups = muon_groups(
                trained, self.args.weight_decay, self.get_decay_parameter_names(trained)
            )
            # On a CPU bfloat16 is fast only where the run has it, too.
            in_float32 = self.args.device.type == "cpu" and not self.args.bf16
            dtype = torch.float32 if in_float32 else torch.bfloat16
            self.optimizer = MuonAdamW(groups, dtype=dtype, **settings)
        return super().create_optimizer(model)

    # `Trainer` expects one batch per step

    def floating_point_ops(self, inputs: Batch | list[Batch]) -> int:
        return sum(map(super().floating_point_ops, _batches(inputs)))

    def _track_num_input_tokens(self, inputs: Batch | list[Batch]) -> None:
        """Count the tokens of pairs, without free places of packed rows and without the dummy pairs of a batch."""
        for batch in _batches(inputs):
            mask = token_mask(batch)
            if mask is not None and (self.by_tokens or is_packed(batch)):
                is_pair = batch["labels"].ne(IGNORED).any(dim=1, keepdim=True)  # (B, 1)
                is_pair = is_pair.view(-1, *[1] * (mask.ndim - 1))  # as a mask (B, 1, Q, S)
                batch = {**batch, "attention_mask": mask * is_pair}
            super()._track_num_input_tokens(batch)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Pairs per update, averaged with token batches."""
        if isinstance(self._updates, TokenBatchSampler):
            return max(1, round(len(self._updates.lengths) / len(self._updates)))
        return super().get_total_train_batch_size(args)

    # Start, log, save

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train with the objectives of the arguments, which a trial of a search has only now."""
        self._make_objectives()
        if kwargs.get("trial") is not None:
            self._read_teachers()
        if self.ema is not None and self._resumed_from is not None:
            self.ema.load(self._resumed_from)
        if self.teacher is not None and self.args.teacher_top:
            start = time.monotonic()
            with self.accelerator.autocast():
                self.teacher.keep_top(self.args.teacher_top, self.train_dataset, self.data_collator)
            seconds = time.monotonic() - start
            print_main(f"teacher: distributions of the training pairs computed in {seconds:.0f} s")
        self.meter.reset()
        return super()._inner_training_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add throughput, padding and the loss without label smoothing (`nll_loss`) to the training loss, and a
        perplexity to each loss that is the cross-entropy without smoothing."""
        if "loss" in logs:
            self._require_finite_losses()
            require_loss_scale(self.accelerator.scaler)
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                del logs["grad_norm"]  # of an update that was left out. JSON has no such number
            if self.losses.skipped:
                logs["skipped_updates"] = self.losses.skipped
                self.losses.skipped = 0
            limit = self._minutes_left()
            logs.update(
                self.meter.read(
                    self.state, lambda number: self.accelerator.reduce(number, "mean"), limit
                )
            )
        smooths = self.args.label_smoothing_factor  # the evaluation loss, too
        if not smooths and foreign_loss(self) is None:
            smoothed = getattr(self.model.config, "label_smoothing", 0) > 0
            logs.update(perplexities(logs, exclude="loss" if smoothed else None))
        super().log(logs, *args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._require_finite_losses()
        return super()._evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._require_finite_losses()
        averages = {} if self.ema is None else self.ema.average
        require_finite_on_all_ranks(
            [*self.model.named_parameters(), *averages.items()],
            f"update {self.state.global_step}",
            f"it was not saved, and {resume_hint(Path(self.args.output_dir))}",
        )
        super()._save_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._require_finite_losses()
        return super()._finalize_training(*args, **kwargs)

    def _write_run_state(self, checkpoint: Path) -> None:
        super()._write_run_state(checkpoint)
        if self.ema is not None:
            self.ema.save(checkpoint)


def _batches(inputs: Batch | list[Batch]) -> list[Batch]:
    """The batches of an update with token batches, or the one batch of a step."""
    return inputs if isinstance(inputs, list) else [inputs]
