"""`Seq2SeqTrainer` for sentence pairs: token batches, exact updates, atomic checkpoints."""

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import DynamoBackend, convert_outputs_to_fp32
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import ModelOutput

from ..data.batching import (
    Batch,
    LengthGroupedSampler,
    StreamingTokenBatches,
    TokenBatchDataset,
    TokenBatchSampler,
    collate_batches,
    pair_lengths,
)
from ..data.language_tokens import language_tokens
from ..data.packing import BACKENDS, PackedBatchSampler, PackedLayout, PackedPairs, packed_inputs
from ..data.redrawing import RedrawnDataset
from ..layers_vanilla_transformer import attention_kernels
from ..loss_vanilla_transformer import ROW_UNIT
from ..modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerPreTrainedModel,
)
from ..utils.errors import UserError
from .callbacks import WeightAverage
from .distributed import leave_signals_to_main_process, print_main, shard_tied_modules
from .evaluation_budget import EvaluationBudget, longest_cut
from .forward import (
    CastForward,
    CompiledForward,
    PlainForward,
    forward_pass_of,
    keeps_few_activations,
)
from .muon import MuonAdamW, muon_groups
from .objectives.consistency import ConsistencyObjective, consistency_objective, halves
from .objectives.distillation import Teacher
from .report import ThroughputMeter, perplexities
from .resumable_trainer import NOTHING_TRAINED, ResumableTrainer

T = TypeVar("T")


class VanillaTransformerTrainer(ResumableTrainer):
    """`Seq2SeqTrainer` with token batches (§5.1) and atomically written checkpoints.

    With `max_tokens_per_batch` (see `VanillaTransformerTrainingArguments`) each item of the training loader is the
    list of batches of one update, so that one step of `Trainer` is one update. Loss and gradients are means over all
    target tokens of the update, for any number of batches and processes. The model must accept `num_items_in_batch`
    for this. Without `max_tokens_per_batch` this is `Seq2SeqTrainer`, except that `group_by_length` considers both
    sides of a pair and shuffles the batches.

    A loss that is not finite stops training. Evaluation keeps the order of the dataset. The base class would group it
    by length and return permuted predictions.

    Args:
        args, kwargs: the arguments of `ResumableTrainer`.

    Raises:
        UserError: settings that do not go with `max_tokens_per_batch`.
    """

    optimizer: torch.optim.Optimizer | None  # made by `create_optimizer`

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.meter = ThroughputMeter()
        # Of the whole evaluations while training, by update.
        self.scores: dict[int, dict[str, float]] = {}
        self.budget: EvaluationBudget | None = None  # of a run with `max_minutes`
        # Share of the translations of the last evaluation that end before their limit.
        self.ended = 1.0
        collating = getattr(self.data_collator, "tokenizer", None)
        if getattr(collating, "padding_side", "right") == "left":
            raise UserError(
                "data_collator: its tokenizer pads on the left, but labels are shifted right from their first token: "
                "set tokenizer.padding_side = 'right'"
            )
        self._warned = False
        tokenizer = self.target_tokenizer or self.processing_class
        languages = (
            language_tokens(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        )
        # That of each sentence's reference.
        self.starts_with_language = bool(languages and languages.target_mark)
        mark = "target" if self.starts_with_language else "source"
        self.consistency: ConsistencyObjective | None = consistency_objective(self.args, mark)
        if self.by_tokens:
            self._check_token_batches()
        self._decide_packing()
        if self.packs and self.args.torch_compile:
            # accelerate would compile the model for every shape of an evaluation, too
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        # (update, batch, loss) of losses on a GPU that the host has not read yet
        self._unread_losses: list[tuple[int, int, torch.Tensor]] = []
        self._cast_forward: CastForward | None = None
        self._compiled_forward: CompiledForward | None = None
        if self.args.device.type != "cpu":
            # It reads each loss, and a loss that is not finite is an error.
            self.args.logging_nan_inf_filter = False
        if self.consistency is not None:
            names = ("simcut_alpha", "r_drop_alpha", "crossconst_alpha")
            name = next(name for name in names if getattr(self.args, name))
            self._check_objective(f"{name}={self.consistency.alpha}")
            joint = self.target_tokenizer in (None, self.processing_class)
            if name == "crossconst_alpha" and not (
                joint and languages and languages.source_mark != "source"
            ):
                raise UserError(
                    f"{name}={self.consistency.alpha} needs directions with a joint vocabulary and the token of the "
                    "target language alone"
                )
        self.teacher: Teacher | None = None
        if folders := getattr(self.args, "teacher", None):
            self._check_objective(f"teacher={' '.join(folders)}")
            source = self.processing_class
            tokenizers = None if source is None else (source, self.target_tokenizer or source)
            self.teacher = Teacher(
                folders, self.args.teacher_weight, self._base_model(), tokenizers
            )
            changing = isinstance(
                self.train_dataset, torch.utils.data.IterableDataset | RedrawnDataset
            )
            if self.args.teacher_top and changing:
                raise UserError(
                    f"teacher_top={self.args.teacher_top} needs the same pairs in each epoch: leave out streaming, "
                    "bpe_dropout and augment"
                )
        self.ema = (
            WeightAverage(self.args.ema_decay) if getattr(self.args, "ema_decay", 0) else None
        )
        if self.ema is not None:
            if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
                raise UserError(
                    f"ema_decay={self.args.ema_decay} needs unsharded weights, but FSDP and ZeRO-3 shard them: train "
                    "with DDP or ZeRO-2"
                )
            self.add_callback(self.ema)
        if getattr(self.args, "muon", False) and (
            self.is_fsdp_enabled or self.is_deepspeed_enabled
        ):
            raise UserError(
                "muon=True needs whole matrices, but FSDP and DeepSpeed shard them: train with DDP"
            )

    def _check_token_batches(self) -> None:
        args = self.args
        why = None
        model = self._base_model()
        if (
            not isinstance(model, VanillaTransformerPreTrainedModel)
            and self.compute_loss_func is None
        ):
            # Marian, BART and T5 accept num_items_in_batch and ignore it.
            name = type(model).__name__
            why = f"needs a loss that is divided by num_items_in_batch: give {name} a compute_loss_func"
        elif not args.average_tokens_across_devices:
            why = "needs average_tokens_across_devices=True"
        elif args.n_gpu > 1:
            why = f"does not go with {args.n_gpu} GPUs in one process; start the script with accelerate launch"
        elif self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1:
            why = (
                "shards sentences over ranks and excludes tensor, context and sequence parallelism"
            )
        if why:
            raise UserError(f"max_tokens_per_batch={args.max_tokens_per_batch} {why}")

    def _decide_packing(self) -> None:
        """Refuse packed rows where they cannot be, and choose them on a GPU where they can."""
        if not hasattr(self.args, "pack"):
            return
        why_not = self._why_not_packed()
        if self.args.pack and why_not:
            raise UserError(f"pack=True {why_not}")
        if self.args.pack is None:
            self.args.pack = self.args.device.type == "cuda" and why_not is None

    def _why_not_packed(self) -> str | None:
        args = self.args
        model = self._base_model()
        if not self.by_tokens:
            return "needs max_tokens_per_batch"
        if not isinstance(model, VanillaTransformerForConditionalGeneration):
            return f"needs a VanillaTransformerForConditionalGeneration, not {type(model).__name__}"
        if model.config._attn_implementation not in BACKENDS:
            name = model.config._attn_implementation
            return f"does not go with attn_implementation={name!r}: choose one of {', '.join(BACKENDS)}"
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            return "does not go with a stream, whose pairs are not known beforehand"
        for name in ("crossconst_alpha", "teacher_top"):
            if getattr(args, name):
                return (
                    f"does not go with {name}={getattr(args, name)}, which reads pairs one by one"
                )
        return None

    @property
    def packs(self) -> bool:
        """True if batches are packed rows."""
        return bool(getattr(self.args, "pack", False))

    def _check_objective(self, setting: str) -> None:
        model = self._base_model()
        if not isinstance(model, VanillaTransformerForConditionalGeneration):
            raise UserError(
                f"{setting} needs a VanillaTransformerForConditionalGeneration, not {type(model).__name__}"
            )
        if self.is_fsdp_enabled:
            raise UserError(
                f"{setting} needs unsharded weights, but FSDP shards them: train with DDP"
            )

    # Data loading

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
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(
            _plain_dataset(dataset), Dataset
        ):
            return super()._get_train_sampler(train_dataset)
        # Group all pairs of an update, over ranks and accumulation steps.
        batch_size = (
            self.args.train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size
        )
        return LengthGroupedSampler(*pair_lengths(dataset), batch_size, self.args.seed)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> torch.utils.data.Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(
            eval_dataset, Dataset
        ):
            return super()._get_eval_sampler(eval_dataset)
        # With several processes accelerate shards the dataset.
        return (
            torch.utils.data.SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None
        )

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
        if not self.by_tokens:
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        args = self.args
        dataset = self.train_dataset
        collator = self.data_collator
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        plan: dict[str, Any] = {
            "max_tokens": args.max_tokens_per_batch,
            "tokens_per_update": args.tokens_per_update,
            "batches_per_update": self.batches_per_update,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "world_size": args.world_size,
            "rank": args.process_index,
        }
        options: dict[str, Any] = {
            "collate_fn": partial(collate_batches, collator=collator, **self._rounding()),
            # The loader draws a seed per epoch. From the global generator this would change dropout after a resume.
            "generator": torch.Generator().manual_seed(args.seed),
            "pin_memory": args.dataloader_pin_memory,
        }
        if isinstance(dataset, torch.utils.data.IterableDataset):
            if args.dataloader_num_workers:
                raise UserError(
                    "a stream is read in the main process: set dataloader_num_workers to 0"
                )
            updates = StreamingTokenBatches(dataset, self.stream_window, **plan)
            return DataLoader(updates, batch_size=None, **options)
        if len(dataset) == 0:
            raise UserError("there is no pair to train on")
        if getattr(dataset, "grows", False) and not self.packs:
            plan |= {"world_size": 1, "rank": 0}  # the dataset shards the batches
        if self.packs:
            return self._packed_loader(dataset, plan, options)
        sampler = TokenBatchSampler(*pair_lengths(self.train_dataset), **plan)
        too_long = int((sampler.lengths > args.max_tokens_per_batch).sum())
        self._warn_of_long_pairs(int(sampler.lengths.max()), f"{too_long:,}")
        for name in ("num_workers", "persistent_workers", "prefetch_factor"):
            options[name] = getattr(args, f"dataloader_{name}")
        loader = DataLoader(self._token_batches(dataset, sampler), batch_sampler=sampler, **options)
        return leave_signals_to_main_process(loader)

    def _packed_loader(
        self, dataset: Dataset, plan: dict[str, Any], options: dict[str, Any]
    ) -> DataLoader:
        """Make the loader of packed rows. It packs in the main process, in a microsecond a pair."""
        sampler = PackedBatchSampler(*pair_lengths(self.train_dataset), **plan)
        longest = max(sampler.places)
        if longest > self.args.max_tokens_per_batch:
            self._warn_of_long_pairs(longest)
        pairs = self._packed_pairs(dataset, sampler)
        options["collate_fn"] = _unchanged
        return DataLoader(pairs, batch_sampler=sampler, **options)

    def _packed_pairs(self, dataset: Dataset, sampler: PackedBatchSampler) -> PackedPairs:
        layout = PackedLayout.of(self._base_model().config, sampler.places)
        return PackedPairs(dataset, layout, sampler)

    def _token_batches(self, dataset: Dataset, sampler: TokenBatchSampler) -> TokenBatchDataset:
        return TokenBatchDataset(
            dataset, sampler.limit, self.args.world_size, self.args.process_index
        )

    def _rounding(self) -> dict[str, Any]:
        """The arguments of `collate_batches` that round the shapes of batches. See `ReleaseFreeMemory`."""
        config = self.model.config
        args = self.args
        # Padding must not pass max_position_embeddings.
        has_limit = config.position_encoding_type == "learned"
        rounds = args.bf16 and args.device.type == "cpu" and not has_limit
        pads = config.pad_token_id, getattr(config, "target_pad_token_id", config.pad_token_id)
        return {"row_unit": ROW_UNIT, "pad_token_ids": pads} if rounds else {}

    def _warn_of_long_pairs(self, longest: int, count: str = "some") -> None:
        limit = self.args.max_tokens_per_batch
        if longest > limit and not self._warned:
            self._warned = True
            print_main(
                f"warning: {count} pairs are longer than max_tokens_per_batch={limit} "
                f"(the longest: {longest:,} tokens); each is a batch by itself"
            )

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> tuple:
        """Remember the plan of the loader that trains. Callbacks may make other loaders."""
        if self.by_tokens:
            stream = dataloader.dataset
            sampler = cast(TokenBatchSampler, dataloader.batch_sampler)
            self._updates = stream if isinstance(stream, StreamingTokenBatches) else sampler
            self._decide_compiling()
        return super().set_initial_training_values(args, dataloader)

    # The update

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Batch]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], torch.Tensor | int | None]:
        """The batches of the next update, and its number of target tokens over all ranks."""
        if self.by_tokens:
            updates = list(islice(epoch_iterator, num_batches))
            if isinstance(self._updates, StreamingTokenBatches):
                self._warn_of_long_pairs(self._updates.longest)
            batches = [batch for update in updates for batch in update]
            target_tokens = self._get_num_items_in_batch(batches, device)
        else:
            try:
                updates, target_tokens = super().get_batch_samples(
                    epoch_iterator, num_batches, device
                )
            except ValueError as error:  # of accelerate, for a stream without a batch
                if "does not contain any data" not in str(error):
                    raise
                raise UserError(NOTHING_TRAINED) from None
            batches = updates
        self.meter.count(batches, target_tokens)
        return updates, target_tokens

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
        total = torch.zeros((), device=self.args.device)
        for part, (index, batch) in enumerate(batches):
            last = part == len(batches) - 1
            with (
                self._attention_kernels(),
                nullcontext() if last else self.accelerator.no_sync(model),
            ):
                loss = super().training_step(model, batch, num_items_in_batch)
            if self._compiled_forward is not None:
                self._compiled_forward.report()
            self._unread_losses.append((self.state.global_step, index, loss.detach().clone()))
            if loss.device.type == "cpu":
                self._require_finite_losses()
            total += loss
        return total

    def _attention_kernels(self) -> AbstractContextManager[None]:
        """Leave cuDNN out of the attention of any model, see `attention_kernels`."""
        choice = getattr(self._base_model().config, "attention_kernels", "auto")
        return attention_kernels(choice, self.args.device)

    def _due_consistency(self) -> ConsistencyObjective | None:
        return (
            self.consistency
            if self.state.global_step >= getattr(self.args, "consistency_start", 0)
            else None
        )

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Compute the loss of the objective, and log the loss without label smoothing if the model returns it."""
        forward = self._forward_pass(inputs) if model.training else None
        if "segment_ids" in inputs and not isinstance(forward, CompiledForward):
            inputs = packed_inputs(inputs, self._base_model().config, self.model.dtype)
        if model.training and (consistency := self._due_consistency()):
            inputs = consistency.inputs(self._base_model(), inputs)
        elif model.training and self.teacher is not None:
            inputs = self.teacher.inputs(inputs)
        base = self._base_model()
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

    def _forward_pass(self, batch: dict[str, Any]) -> Callable[..., Any] | None:
        """What computes the losses of a batch in training in place of the model's own forward pass, if that pays."""
        base = self._base_model()
        if self._compiled_forward is not None and self._compiled_forward.fits(batch):
            return self._compiled_forward
        if not self.casts_together:
            return None
        return convert_outputs_to_fp32(self._casting(base))

    def _casting(self, base: Any) -> CastForward:
        if self._cast_forward is None or self._cast_forward.plain.model is not base:
            several = self.accelerator.num_processes > 1
            self._cast_forward = CastForward(base, self.args.device, torch.bfloat16, several)
        return self._cast_forward

    def _decide_compiling(self) -> None:
        """Compile the update on a GPU, and where it is asked for."""
        args = self.args
        self._compiled_forward = None
        requested = args.torch_compile
        if not self.packs or requested is False or not (requested or args.device.type == "cuda"):
            return
        if why_not := self._why_not_compiled():
            print_main(f"torch_compile: the update is not compiled, which {why_not}")
            return
        base = self._base_model()
        forward: Callable[..., Any] = PlainForward(base).forward
        if self.accelerator.mixed_precision == "bf16":
            forward = self._casting(base).forward
        plan = cast(PackedBatchSampler, self._updates)
        source, target = plan.places
        self._compiled_forward = CompiledForward(
            forward,
            base,
            ((plan.rows_of_batch, source), (plan.rows_of_batch, target)),
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode,
        )

    def _why_not_compiled(self) -> str | None:
        args = self.args
        base = self._base_model()
        reasons = {
            "reads two passes over a batch": self.consistency is not None,
            "asks a teacher": self.teacher is not None,
            "has a loss of its own": self.label_smoother is not None
            or self.compute_loss_func is not None
            or type(self).compute_loss is not VanillaTransformerTrainer.compute_loss,
            "computes activations again": args.gradient_checkpointing
            or keeps_few_activations(base),
            "has adapters": self.model is not base,
            "shards weights": self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or self.get_tp_size() > 1,
            "scales its loss for fp16": self.accelerator.mixed_precision == "fp16",
            "adds noise to embeddings": bool(args.neftune_noise_alpha),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    @property
    def casts_together(self) -> bool:
        """True if an update of this run casts its weights by one kernel: in bf16 on a GPU, where launches count."""
        base = self._base_model()
        return (
            self.args.device.type != "cpu"
            and self.accelerator.mixed_precision == "bf16"
            and isinstance(base, VanillaTransformerForConditionalGeneration)
            and self.model is base  # without an adapter
            and not keeps_few_activations(base)  # computes layers again outside of the context
            and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
            and self.get_tp_size() == 1
        )

    def prediction_step(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Skip logits (B, T, V) that the base class would drop, and translate with packed weights."""
        if isinstance(self._base_model(), VanillaTransformerForConditionalGeneration):
            if prediction_loss_only:
                inputs = {**inputs, "skip_logits": True}
            elif self.args.predict_with_generate and self.label_smoother is None:
                # It reads the logits.
                model = partial(model, skip_logits=True)  # `generate` gets the inputs, too
        translates = self.args.predict_with_generate and not prediction_loss_only
        if (
            translates
            and "labels" in inputs
            and self.is_in_train
            and self.budget is not None
            and self.budget.cuts
        ):
            kwargs = self._cut(inputs) | kwargs
        with self._attention_kernels(), self._autocast_around_the_step():
            if translates:
                from ..engine.optimize import optimize_if_possible

                optimize_if_possible(self.model)  # until the model trains again
                if self.starts_with_language and "labels" in inputs:
                    inputs = self._with_first_token(inputs)
                    model = _WithoutPrefix(model)
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **kwargs
            )

    def _with_first_token(self, inputs: Batch) -> Batch:
        """Let `generate` start with the token of the language, the first one of each reference."""
        first = inputs["labels"][:, :1]  # (B, 1)
        start = torch.full_like(first, self._base_model().config.decoder_start_token_id)
        return {**inputs, "decoder_input_ids": torch.cat([start, first], dim=1)}

    def _cut(self, inputs: Batch) -> dict[str, object]:
        """The settings of `generate` that cut the translations of a batch soon after the end of its references."""
        settings = dict(self._gen_kwargs)
        most = longest_cut(inputs["labels"].shape[1])
        if settings.get("max_length") is not None:
            most = min(most, settings.pop("max_length") - 1)
        return {**settings, "max_new_tokens": max(1, most)}

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Pad translations with the target's pad token. The base class takes the source's."""
        pad = getattr(self._base_model().config, "decoder_pad_token_id", None)
        if pad is None:
            return super()._pad_tensors_to_max_len(tensor, max_length)
        return torch.nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad)

    @contextmanager
    def _autocast_around_the_step(self) -> Iterator[None]:
        """Autocast for `generate` as a whole. accelerate puts it into the model's `forward`, but a search with packed
        weights does not call that."""
        forward = self.model.__dict__.pop("forward", None) if self.accelerator.native_amp else None
        try:
            with self.accelerator.autocast():
                yield
        finally:
            if forward is not None:
                self.model.forward = forward

    def _require_finite_losses(self) -> None:
        """Read the losses since the last call. A GPU is waited for: this is called when a loss is logged or saved."""
        losses = self._unread_losses
        self._unread_losses = []
        if not losses:
            return
        values = torch.stack([loss for _, _, loss in losses]).tolist()
        for (update, batch, _), value in zip(losses, values, strict=True):
            if not math.isfinite(value):
                raise UserError(self._non_finite_loss(value, batch, update))

    def _non_finite_loss(self, loss: float, batch: int, update: int) -> str:
        """The error message for a loss that is not finite: the update, and the lines of the batch if known."""
        message = f"the loss of update {update + 1} is {loss}"
        rows = self._rows_of_batch(batch, update) if update >= self._epoch_start else None
        if rows is None:
            return message
        data = _plain_dataset(self.train_dataset)
        if "line" in getattr(data, "column_names", ()):
            rows = [
                int(line) for line in data.with_format(None).select_columns(["line"])[rows]["line"]
            ]
        else:
            rows = [row + 1 for row in rows]
        return f"{message}; its batch contains the lines {', '.join(map(str, sorted(rows)))}"

    def _rows_of_batch(self, batch: int, update: int) -> list[int] | None:
        """The dataset rows of a batch of an update of this epoch, or None. Without token batches of the update."""
        if isinstance(self._updates, TokenBatchSampler):
            planned: Any = self._updates.batches(update - self._epoch_start)
            if isinstance(self._updates, PackedBatchSampler):
                return self._packed_pairs(self.train_dataset, self._updates).numbers(planned)[batch]
            _, batches = self._token_batches(self.train_dataset, self._updates).read(planned)
            return [max(row, ~row) for row in batches[batch]]
        sampler = None if self.by_tokens else self._get_train_sampler()
        if not isinstance(sampler, LengthGroupedSampler):
            return None
        sampler.set_epoch(self._epoch)
        start = (update - self._epoch_start) * sampler.batch_size
        return list(islice(sampler, start, start + sampler.batch_size))

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Make Muon or the optimizer of `optim`. With FSDP2, first shard modules with tied weights (§3.4) as one unit.

        accelerate handles one embedding tied to the output layer. Here the decoder's embedding may be tied, too, and
        torch refuses tied weights in separate units.
        """
        if self.accelerator.is_fsdp2:
            plugin = self.accelerator.state.fsdp_plugin
            mesh = self.accelerator.torch_device_mesh
            shard_tied_modules(
                self.model if model is None else model,
                mesh=mesh and mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)],
                mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=plugin.cpu_offload,
            )
        if getattr(self.args, "muon", False) and self.optimizer is None:
            model = self.model if model is None else model
            _, settings = self.get_optimizer_cls_and_kwargs(self.args, model)  # AdamW's
            groups = muon_groups(
                model, self.args.weight_decay, self.get_decay_parameter_names(model)
            )
            self.optimizer = MuonAdamW(groups, **settings)
        return super().create_optimizer(model)

    # `Trainer` expects one batch per step

    def floating_point_ops(self, inputs: Batch | list[Batch]) -> int:
        return sum(map(super().floating_point_ops, _batches(inputs)))

    def _track_num_input_tokens(self, inputs: Batch | list[Batch]) -> None:
        for batch in _batches(inputs):
            super()._track_num_input_tokens(batch)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Pairs per update, averaged with token batches."""
        if isinstance(self._updates, TokenBatchSampler):
            return max(1, round(len(self._updates.lengths) / len(self._updates)))
        return super().get_total_train_batch_size(args)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add throughput, padding and the loss without label smoothing (`nll_loss`) to the training loss, and a
        perplexity to each unsmoothed loss."""
        if "loss" in logs:
            self._require_finite_losses()
            limit = self._minutes_left()
            logs.update(
                self.meter.read(
                    self.state, lambda number: self.accelerator.reduce(number, "mean"), limit
                )
            )
        if not self.args.label_smoothing_factor:  # it smooths the evaluation loss, too
            smoothed = getattr(self.model.config, "label_smoothing", 0) > 0
            logs.update(perplexities(logs, exclude="loss" if smoothed else None))
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Dataset | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        """Evaluate. In a run with `max_minutes`, evaluations in training keep to their budget."""
        if not self.is_in_train or eval_dataset is not None:
            return super().evaluate(eval_dataset, *args, **kwargs)
        if self.budget is None:
            metrics = super().evaluate(None, *args, **kwargs)
            self.scores[self.state.global_step] = metrics
            return metrics
        with self.budget.evaluation(self):
            rows = self.budget.rows
            metrics = super().evaluate(
                None if rows is None else self.eval_dataset.select(rows), *args, **kwargs
            )
            if self.budget.is_whole:
                self.scores[self.state.global_step] = metrics
        return metrics

    def translate_rows(self, rows: np.ndarray) -> None:
        """Translate some evaluation sentences, to measure the time."""
        compute_metrics = self.compute_metrics  # type: ignore[has-type]
        self.compute_metrics = None
        try:
            self.predict(self.eval_dataset.select(rows))
        finally:
            self.compute_metrics = compute_metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Count once the pairs that accelerate repeats to fill the last batch."""
        self.gather_function = self.accelerator.gather_for_metrics
        output = super().evaluation_loop(*args, **kwargs)
        if self.args.predict_with_generate and isinstance(output.predictions, np.ndarray):
            self.ended = self._share_that_ends(output.predictions)
        if self.budget is not None and self.budget.rows is not None:
            output.metrics["eval_sentences"] = len(self.budget.rows)
        return output

    def _share_that_ends(self, predictions: np.ndarray) -> float:
        """The share of translations (N, T) with an end token after the first token, which may be one."""
        config = self._base_model().config
        ends = getattr(config, "target_eos_token_id", config.eos_token_id)
        if not len(predictions) or ends is None:
            return 1.0
        return float(np.isin(predictions[:, 1:], np.atleast_1d(ends)).any(axis=1).mean())

    # Start, resume, save

    def _start_or_resume(self, checkpoint: Path | None) -> None:
        super()._start_or_resume(checkpoint)
        if self.ema is not None and checkpoint is not None:
            self.ema.load(checkpoint)
        if self.teacher is not None and self.args.teacher_top:
            start = time.monotonic()
            with self.accelerator.autocast():
                self.teacher.keep_top(self.args.teacher_top, self.train_dataset, self.data_collator)
            print_main(
                f"teacher: distributions of the training pairs computed in {time.monotonic() - start:.0f} s"
            )
        self.meter.reset()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._require_finite_losses()
        super()._save_checkpoint(*args, **kwargs)

    def _write_run_state(self, checkpoint: Path) -> None:
        super()._write_run_state(checkpoint)
        if self.ema is not None:
            self.ema.save(checkpoint)


class _WithoutPrefix:
    """The loss of a batch whose `decoder_input_ids` are a prefix for `generate` alone."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, decoder_input_ids: object = None, **batch: object) -> ModelOutput:
        return self.model(**batch)


def _batches(inputs: Batch | list[Batch]) -> list[Batch]:
    """The batches of an update with token batches, or the one batch of a step."""
    return inputs if isinstance(inputs, list) else [inputs]


def _unchanged(batches: T) -> T:
    return batches


def _plain_dataset(dataset: Dataset) -> Dataset:
    """The dataset without BPE-dropout."""
    return getattr(dataset, "encoded", dataset)
