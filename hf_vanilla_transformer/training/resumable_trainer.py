"""`Seq2SeqTrainer` whose resumed runs are the same run: its settings, its position in the data, its counters."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from ..data.batching import TokenBatchSampler
from ..data.token_batches import StreamingTokenBatches
from ..inference.loading import check_weights
from ..modeling_vanilla_transformer import VanillaTransformerPreTrainedModel
from ..untrusted import read_json_object, reading_weights
from .checkpoints import DATA_POSITION
from .resuming import require_training_state
from .run_folder import record_files
from .run_state import RUN_STATE, RunState, plain_values, require_same, state_to_resume
from .stoppable_trainer import StoppableTrainer

# The arguments that decide which pairs an update contains.
_PLAN = "max_tokens_per_batch", "tokens_per_update", "seed", "data_seed"
# The arguments of optimizer and schedule, whose states in a checkpoint would win over other values.
_OPTIMIZATION = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "muon"),
)


class ResumableTrainer(StoppableTrainer):
    """`Seq2SeqTrainer` with what a checkpoint keeps of a run beyond weights, optimizer and counters.

    Args:
        data_facts, fixed_facts: what determines the run, apart from `args` (name → JSON value), such as a digest of
            the data: kept in each checkpoint, compared on resume. `data_facts` may change with `ignore_data_skip`.
        others: as for `Seq2SeqTrainer`.
    """

    def __init__(
        self,
        *args: Any,
        data_facts: Mapping[str, Any] | None = None,
        fixed_facts: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.data_facts, self.fixed_facts = dict(data_facts or {}), dict(fixed_facts or {})
        # Batches per update without `tokens_per_update`; a resumed run takes it from the checkpoint.
        self.batches_per_update = self.args.world_size
        # The plan of the loader that trains; None without token batches.
        self._updates: TokenBatchSampler | StreamingTokenBatches | None = None
        self._resume_position: dict[str, Any] | None = None  # `DATA_POSITION` of the checkpoint to resume from
        self._epoch_start = 0  # the number of updates before this epoch
        self._run_state = RunState()  # of the last checkpoint
        # Called before the first checkpoint appears in `output_dir`; a run deletes the old run there.
        self.before_first_save: Callable[[], None] | None = None

    @property
    def by_tokens(self) -> bool:
        """Whether batches are limited by tokens (`max_tokens_per_batch`)."""
        return getattr(self.args, "max_tokens_per_batch", None) is not None

    def _check_checkpoint(self, checkpoint: Path) -> None:
        """Refuse a checkpoint that is incomplete or of another run; read its state and its position in the data."""
        if not self.is_deepspeed_enabled:
            require_training_state(checkpoint, self.args.world_size)
        self._run_state = state_to_resume(checkpoint)
        remedy = "optimizer and model continue with that; give it again, or start a new run in another output_dir"
        require_same(checkpoint, self._run_state.fixed, self._fixed(), remedy)
        if self.args.ignore_data_skip:
            return
        file = checkpoint / DATA_POSITION
        self._resume_position = read_json_object(file) if file.is_file() else None
        saved = {**(self._resume_position or {}), **self._run_state.data}
        remedy = "resume with that, or restart the epoch with ignore_data_skip=True"
        require_same(checkpoint, saved, self._data(), remedy)
        self.batches_per_update = saved.get("batches_per_update", self.batches_per_update)

    def _fixed(self) -> dict[str, Any]:
        """What cannot change within a run."""
        precision = {"no": "float32"}.get(self.accelerator.mixed_precision, self.accelerator.mixed_precision)
        return {**plain_values(self.args, _OPTIMIZATION), "precision": precision, **self.fixed_facts}

    def _data(self) -> dict[str, Any]:
        """What determines the batches."""
        args, streaming = self.args, isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {
            **plain_values(args, _PLAN),
            "stream_window": args.stream_window if self.by_tokens and streaming else None,
            "pairs per update": None if self.by_tokens else pairs,
            "train_sampling_strategy": None if self.by_tokens or streaming else args.train_sampling_strategy,
            **self.data_facts,
        }

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs, updates = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # those of the arguments, not of the checkpoint
        if self._resumed_from is not None and self.state.best_global_step:
            # The state has its path, which another working directory or a moved run makes invalid.
            best = self._resumed_from.parent / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        position = self._resume_position or {}
        if isinstance(self._updates, StreamingTokenBatches) and "stream" in position:
            self._updates.load_state_dict(position["stream"])
            return position["stream"]["epoch"], 0
        if "stream_pass" in position:
            return position["stream_pass"], position["updates"] * self.args.gradient_accumulation_steps
        return epochs, updates

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # Everything is loaded: a new branch begins here, also if the run ends before its first checkpoint.
        self._run_state = self._run_state.next(self._data(), self._fixed())
        if self.args.should_save and self.before_first_save is None:
            self._write_run_state(Path(self.args.output_dir))
        return prepared

    def _write_run_state(self, run: Path) -> None:
        self._run_state.write(run)
        record_files(run, [RUN_STATE])

    def _load_callback_state(self) -> None:
        """Restore the callbacks' counters in place.

        The base class does so only if asked, and replaces the callbacks by new ones with the arguments of the
        checkpoint: Ctrl-C and the time limit would reach objects that take no part in training.
        """
        saved = self.state.stateful_callbacks
        kept: dict[str, Any] = {}
        for each in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(each, ExportableState):
                continue
            name, count = type(each).__name__, len(kept.get(type(each).__name__, ()))
            states = saved.get(name, [])
            states = states if isinstance(states, list) else [states]
            if each is not self.control and count < len(states):
                for attribute, value in states[count].get("attributes", {}).items():
                    setattr(each, attribute, value)
            kept.setdefault(name, []).append(each.state())
        # `Trainer` needs an entry for each callback, also for those that the checkpoint does not know.
        self.state.stateful_callbacks = {name: all_[0] if len(all_) == 1 else all_ for name, all_ in kept.items()}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with reading_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with reading_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading_weights(f"optimizer and schedule of {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As `Trainer`; tied weights, saved once, are not missing; missing or unexpected weights are an error."""
        tied = set(getattr(self.model, "all_tied_weights_keys", ()))
        missing = [name for name in load_result.missing_keys if name not in tied]
        if isinstance(self.model, VanillaTransformerPreTrainedModel):
            info = {"missing_keys": missing, "unexpected_keys": load_result.unexpected_keys, "mismatched_keys": ()}
            check_weights(Path(self._resumed_from or self.args.output_dir), info)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _write_position(self, checkpoint: Path) -> None:
        """Save what locates the next batch in the data, apart from the number of updates."""
        position: dict[str, Any] = {}
        if self.by_tokens:
            position["batches_per_update"] = self.batches_per_update
            if isinstance(self._updates, StreamingTokenBatches):
                position["stream"] = self._updates.state_dict()
        elif not hasattr(self.train_dataset, "__len__"):
            position = {"stream_pass": self._epoch, "updates": self.state.global_step - self._epoch_start}
        if position:
            (checkpoint / DATA_POSITION).write_text(json.dumps(position), encoding="utf-8")
