"""`Seq2SeqTrainer` that can be stopped at any time and resumed as the same run, bit for bit.

A run stops by a signal or a time limit (`StopWithCheckpoint`) and loses neither an evaluation nor a checkpoint. A
checkpoint keeps the settings, the position in the data and the counters of its run.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import wait_for_everyone
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, rotate_checkpoints
from transformers.utils import CONFIG_NAME

from ...batches.batching import TokenBatchSampler
from ...inference.loading import check_weights, own_weights
from ...modeling_vanilla_transformer import VanillaTransformerPreTrainedModel
from ...text.tokenizer_files import save_tokenizers, unrecognised_tokens
from ...utils.errors import Interrupted, UserError
from ...utils.random_state import kept_random_state
from ...utils.system_info import versions
from ...utils.untrusted import read_json_object, reading_weights
from ..state.callbacks import StopWithCheckpoint
from ..state.checkpoints import (
    STAGING_FOLDER,
    TRAINER_STATE,
    last_checkpoint,
    move_into_place,
    remove_staging_folder,
    require_last,
    require_training_state,
)
from ..state.distributed import Agreement, original_class, print_main
from ..state.fingerprint import (
    ARCHITECTURE,
    OBJECTIVE,
    OPTIMIZATION,
    PLAN,
    REGULARISATION,
    SELECTION,
    Facts,
    RunState,
    adapter_facts,
    class_name,
    code_digest,
    compare,
    content_of,
    other_settings,
    plain_values,
    read_run_state,
)
from .loss_check import require_finite_on_all_ranks


class ResumableTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with atomic, complete checkpoints: a resumed run continues as if it had not stopped.

    Args:
        target_tokenizer: saved in each checkpoint next to `processing_class`, for separate vocabularies.
        data_facts, fixed_facts, other_facts: facts that determine the run, apart from `args` (name → JSON value), such
            as a digest of the data. They are kept in each checkpoint and compared on resume (see `fingerprint`). A
            change of a fixed fact is refused, of a data fact refused without `ignore_data_skip`, of others printed.
        args, kwargs: the arguments of `Seq2SeqTrainer`.
    """

    _unwrapped: tuple[Any, Any] = (None, None)  # the model, and what `_base_model` returns for it

    def __init__(
        self,
        *args: Any,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        data_facts: Mapping[str, object] | None = None,
        fixed_facts: Mapping[str, object] | None = None,
        other_facts: Mapping[str, object] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        own_weights(self.model)
        self.target_tokenizer = target_tokenizer
        if target_tokenizer is not None and target_tokenizer is not self.processing_class:
            self._set_target_tokens(target_tokenizer)
        for tokenizer in {self.processing_class, target_tokenizer}:
            if isinstance(tokenizer, PreTrainedTokenizerBase) and (
                tokens := unrecognised_tokens(tokenizer)
            ):
                print_main(
                    f"warning: a call of the tokenizer reads its tokens {', '.join(tokens[:3])} as ordinary text, as "
                    "all special tokens: use encode_pairs, or tokenizer.add_tokens in place of add_special_tokens"
                )
        self.data_facts = dict(data_facts or {})
        self.fixed_facts = dict(fixed_facts or {})
        self.other_facts = dict(other_facts or {})
        # When training started: the contents of the teachers' folders, and the code of the user.
        self._teachers: object = []
        self._code: Facts = {}
        # Batches per update without `tokens_per_update`. A resumed run takes the number from the checkpoint.
        self.batches_per_update = self.args.world_size
        # The plan of the training loader, or None without token batches.
        self._updates: TokenBatchSampler | None = None
        self._pairs: Any = None  # the dataset of the training loader, with token batches
        self._epoch = 0
        self._epoch_start = 0  # the number of updates before this epoch
        self._resumed_from: Path | None = None
        self._resumed_step = 0
        self._resume_position: dict[str, Any] = {}  # `RunState.position` of that checkpoint
        self._staging: Path | None = None  # the folder that a checkpoint is being written to

    def _base_model(self) -> PreTrainedModel:
        """The model without the wrappers of data parallelism and adapters."""
        wrapped, base = self._unwrapped
        if wrapped is not self.model:  # accelerate looks at all modules to find it
            base = self.accelerator.unwrap_model(self.model)
            base = base.get_base_model() if hasattr(base, "get_base_model") else base
            self._unwrapped = self.model, base
        return base

    def _set_target_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let the model pad and end translations with the target's tokens."""
        model = self._base_model()
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(tokenizer, name)
            if token is None:
                continue
            if getattr(model.config, "decoder_vocab_size", None) and hasattr(
                model.config, f"decoder_{name}"
            ):
                setattr(model.config, f"decoder_{name}", token)
                setattr(model.generation_config, name, token)
            elif token != (source := getattr(self.processing_class, name, token)):
                raise UserError(
                    f"target_tokenizer: its {name} is {token}, the source's {source}: {type(model).__name__} has one "
                    "vocabulary or no decoder_vocab_size: give it separate vocabularies, or the tokenizers equal ids"
                )

    @property
    def by_tokens(self) -> bool:
        """True if batches are limited by tokens (`max_tokens_per_batch`)."""
        return getattr(self.args, "max_tokens_per_batch", None) is not None

    # Start or resume

    def train(
        self, resume_from_checkpoint: str | os.PathLike | bool | None = None, **kwargs: Any
    ) -> TrainOutput:
        """Train. `resume_from_checkpoint=True` resumes from the last complete checkpoint.

        Raises:
            UserError: the checkpoint is incomplete, damaged, of a run with other settings, or older than the last one
                in `output_dir`. No update was trained.
        """
        run = Path(self.args.output_dir)
        checkpoint: Path | None = None
        if resume_from_checkpoint is True:
            checkpoint = last_checkpoint(run)
        elif resume_from_checkpoint:
            checkpoint = Path(resume_from_checkpoint)
            if not (checkpoint / TRAINER_STATE).is_file():
                raise UserError(
                    f"resume_from_checkpoint {checkpoint} is not complete: it has no {TRAINER_STATE}"
                )
            require_last(checkpoint, run)
        if self.is_world_process_zero():
            remove_staging_folder(run)
        self._start_or_resume(checkpoint)
        if checkpoint is None and self.model is not None:
            self._require_finite_weights("model")
        outcome = super().train(
            resume_from_checkpoint=str(checkpoint) if checkpoint else None, **kwargs
        )
        if self.state.global_step == 0:
            raise UserError("no update was trained: the training data has no batch")
        if self.has_nothing_left:
            print_main(
                f"nothing left to train: {self._end_of_run()}; model_name_or_path={checkpoint} starts a new run"
            )
        return outcome

    @property
    def has_nothing_left(self) -> bool:
        """True after `train` if the run had ended before it was resumed."""
        return self._resumed_from is not None and self.state.global_step == self._resumed_step

    def _end_of_run(self) -> str:
        """Why a resumed run trained no update."""
        step = self.state.global_step
        if step >= self.state.max_steps:
            return f"update {step:,} of {self.state.max_steps:,} is done, set a higher max_steps"
        if self._minutes_left() == 0:
            return "its max_minutes are over, and include the time before the resume"
        return "it had stopped early"

    def _start_or_resume(self, checkpoint: Path | None) -> None:
        """Refuse a checkpoint that is damaged or of a different run, and read its position in the data."""
        self._resumed_from = checkpoint
        self._resume_position = {}
        self._read_teachers()
        parts = {
            # A trial of a hyperparameter search has no model yet.
            "model_class": None if self.model is None else self._base_model(),
            "trainer": self,
            "compute_loss_func": self.compute_loss_func,
            "data_collator": self.data_collator,
        }
        self._code = {f"code of {name}": code_digest(part) for name, part in parts.items()}
        if checkpoint is None:
            return
        self._resumed_step = read_json_object(checkpoint / TRAINER_STATE).get("global_step", 0)
        if not self.is_deepspeed_enabled:
            require_training_state(checkpoint, self.args.world_size)
        saved = read_run_state(checkpoint)
        compare(checkpoint, saved, self._run_state(), new_epoch=self.args.ignore_data_skip)
        if self.args.ignore_data_skip:
            return
        self._resume_position = saved.position
        self.batches_per_update = saved.position.get("batches_per_update", self.batches_per_update)

    def _read_teachers(self) -> None:
        teachers = getattr(self.args, "teacher", None)
        self._teachers = content_of(*teachers) if teachers else []

    def _run_state(self) -> RunState:
        """The fingerprint of this run, and its position in the data."""
        return RunState(
            fixed=self._fixed(),
            data=self._data(),
            position=self._position(),
            objective=self._objective(),
            settings=self._settings(),
        )

    def _fixed(self) -> Facts:
        """Settings that cannot change within a run."""
        precision = {"no": "float32"}.get(
            self.accelerator.mixed_precision, self.accelerator.mixed_precision
        )
        selection = plain_values(self.args, SELECTION) if self.args.metric_for_best_model else {}
        base = self._base_model()
        ours = isinstance(base, VanillaTransformerPreTrainedModel)
        return {
            **self.fixed_facts,
            **(plain_values(base.config, ARCHITECTURE) if ours else {}),
            **plain_values(self.args, OPTIMIZATION),
            **selection,
            "precision": precision,
            "model_class": class_name(base),
            **adapter_facts(self.accelerator.unwrap_model(self.model)),
        }

    def _objective(self) -> Facts:
        """Settings of the loss and of regularisation."""
        config = getattr(self.model, "config", None)
        loss = self.compute_loss_func
        return {
            "trainer": class_name(self),
            "compute_loss_func": loss and getattr(loss, "__qualname__", type(loss).__qualname__),
            **plain_values(self.args, OBJECTIVE),
            **plain_values(config, REGULARISATION),
            "teacher": self._teachers,
        }

    def _settings(self) -> Facts:
        """All other settings. A change of one is printed."""
        return {
            **other_settings(self.args),
            **plain_values(self.args, SELECTION),
            **self._code,
            **{f"version of {name}": number for name, number in versions("peft").items()},
            **self.other_facts,
        }

    def _data(self) -> Facts:
        """Settings and facts that determine the batches."""
        args = self.args
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {
            **plain_values(args, PLAN),
            "pairs per update": None if self.by_tokens else pairs,
            "train_sampling_strategy": None if self.by_tokens else args.train_sampling_strategy,
            "dataloader_drop_last": None if self.by_tokens else args.dataloader_drop_last,
            **self.data_facts,
        }

    def _position(self) -> dict[str, Any]:
        """The next batch in the data, if the number of updates is not enough to find it."""
        position: dict[str, Any] = (
            {"batches_per_update": self.batches_per_update} if self.by_tokens else {}
        )
        if not hasattr(self.train_dataset, "__len__"):
            updates = self.state.global_step - self._epoch_start
            ended = self.control.should_epoch_stop
            position |= {"epoch": self._epoch + ended, "updates": 0 if ended else updates}
        return position

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs, updates = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # by the arguments, not by the checkpoint
        if self._resumed_from is not None and self.state.best_global_step:
            # The saved path is invalid in a moved run or from a different working directory.
            best = self._resumed_from.parent / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        position = self._resume_position
        if "epoch" in position:
            return position["epoch"], position["updates"] * self.args.gradient_accumulation_steps
        return epochs, updates

    def _load_callback_state(self) -> None:
        """Restore the callbacks' counters in place.

        The base class does so only with `restore_callback_states_from_checkpoint`, and replaces the callbacks by new
        ones with the arguments of the checkpoint: Ctrl-C and the time limit would reach objects that do not train.
        """
        saved = self.state.stateful_callbacks
        kept: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            name = type(callback).__name__
            count = len(kept.setdefault(name, []))
            states = saved.get(name, [])
            states = states if isinstance(states, list) else [states]
            if callback is not self.control and count < len(states):
                for attribute, value in states[count].get("attributes", {}).items():
                    setattr(callback, attribute, value)
            kept[name].append(callback.state())
        # `Trainer` needs an entry for each callback, also for those that the checkpoint does not contain.
        self.state.stateful_callbacks = {
            name: states[0] if len(states) == 1 else states for name, states in kept.items()
        }

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        with reading_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._require_finite_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        with reading_weights(best):
            super()._load_best_model()
        self._require_finite_weights(best)

    def _require_finite_weights(self, source: object) -> None:
        """Refuse the weights of the model, which come from `source`, if they are not finite."""
        remedy = "take a checkpoint from before the training diverged"
        require_finite_on_all_ranks(self.model.named_parameters(), source, remedy)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading_weights(f"optimizer and schedule of {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Ignore missing tied weights, because they are saved once. Refuse other missing or unexpected weights."""
        tied = set(getattr(self.model, "all_tied_weights_keys", ()))
        missing = [name for name in load_result.missing_keys if name not in tied]
        if isinstance(self.model, VanillaTransformerPreTrainedModel):
            info = {
                "missing_keys": missing,
                "unexpected_keys": load_result.unexpected_keys,
                "mismatched_keys": (),
            }
            check_weights(Path(self._resumed_from or self.args.output_dir), info)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # Train and evaluate

    def _run_epoch(self, *, epoch: int, steps_trained_in_current_epoch: int, **kwargs: Any) -> None:
        """Train an epoch with the order of its number, unless the resumed run has nothing left to train."""
        self._epoch = epoch
        resumed = epoch == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        skipped = (
            steps_trained_in_current_epoch // self.args.gradient_accumulation_steps
            if resumed
            else 0
        )
        self._epoch_start = self.state.global_step - skipped
        self._evaluate_if_due(kwargs["start_time"])
        over = self._training_is_over()  # `Trainer` checks this only after an update
        if self._stop_callbacks():  # their clocks differ between ranks, and all must stop or none
            (over,) = Agreement(over, device=self.args.device).read()
        if over:
            self.control.should_training_stop = True
        if self.control.should_training_stop or self.control.should_epoch_stop:
            return
        sampler = _sampler_of_pairs(kwargs["train_dataloader"])
        for order in (self._updates, self.train_dataset, sampler):
            set_epoch = getattr(order, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        super()._run_epoch(
            epoch=epoch, steps_trained_in_current_epoch=steps_trained_in_current_epoch, **kwargs
        )

    def _training_is_over(self) -> bool:
        """True if a resumed run had ended: at its last update, by early stopping or by the time limit."""
        if self.state.global_step == 0:
            return False
        callbacks = self.callback_handler.callbacks
        stopping = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]
        return (
            self.state.global_step >= self.state.max_steps
            or any(
                each.early_stopping_patience_counter >= each.early_stopping_patience
                for each in stopping
            )
            or self._minutes_left() == 0
        )

    def _stop_callbacks(self) -> list[StopWithCheckpoint]:
        return [
            each for each in self.callback_handler.callbacks if isinstance(each, StopWithCheckpoint)
        ]

    def _minutes_left(self) -> float:
        return min((stop.minutes_left() for stop in self._stop_callbacks()), default=math.inf)

    def _evaluate_if_due(self, start_time: float) -> None:
        """Make the evaluation of the resumed update, if a signal prevented it.

        The checkpoint is not saved again: a run that is killed before its next one repeats the evaluation.
        """
        if self._resumed_from is None or not any(
            stop.evaluation_due for stop in self._stop_callbacks()
        ):
            return
        # Saved again if the evaluation is interrupted again.
        self._load_rng_state(str(self._resumed_from))
        self.control.should_evaluate = True
        self._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, None, self._epoch, None, start_time
        )
        if self.state.best_global_step == self.state.global_step:
            best = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            self.state.best_model_checkpoint = str(best if best.is_dir() else self._resumed_from)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After a signal in the evaluation, save the checkpoint without its scores."""
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except Interrupted:
            self.control.should_evaluate = False
            self.control.should_save = self.control.should_training_stop = True
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Keep the random state as it is, because a resumed run may evaluate at a different time."""
        # A DataLoader draws a seed from the global generator, even if it shuffles nothing.
        with kept_random_state(self.args.device):
            return super().evaluation_loop(*args, **kwargs)

    def _finalize_training(
        self, trial: object, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        """Keep the last checkpoint. With `save_total_limit=1`, `Trainer` would delete every checkpoint but the best,
        also the one that a resumed or interrupted run needs."""
        self._evaluate_if_due(start_time)
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit

    # Save

    def _get_output_dir(self, trial: object) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with original_class(self.model):
            super()._save(output_dir, state_dict)
        if self.args.should_save and self.target_tokenizer is not None:
            save_tokenizers(
                output_dir or self.args.output_dir, self.processing_class, self.target_tokenizer
            )

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Write a checkpoint to the staging folder and rename it when complete, so that a killed run or a full disk
        leaves only complete checkpoints."""
        run = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        self._staging = run / STAGING_FOLDER
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            if self.args.should_save:  # it may still write to the folder when another rank fails
                remove_staging_folder(run)
            raise
        finally:
            staged = self._staging / name
            self._staging = None
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(run / name)
        wait_for_everyone()  # each rank writes its random state
        if self.args.should_save:
            self._write_run_state(staged)
            self.state.save_to_json(str(staged / TRAINER_STATE))
            move_into_place(staged, run / name)
            remove_staging_folder(run)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                str(run.resolve()), self.args.save_total_limit, best and str(Path(best).resolve())
            )
        wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / name))

    def _write_run_state(self, checkpoint: Path) -> None:
        """Write the files of a checkpoint that `Trainer` does not write."""
        if not (checkpoint / CONFIG_NAME).is_file():  # SHARDED_STATE_DICT writes weights only
            self.model.config.save_pretrained(checkpoint)
            if self.processing_class is not None:
                save_tokenizers(checkpoint, self.processing_class, self.target_tokenizer)
        self._run_state().write(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # `_save_checkpoint` pushes after the rename
            super()._push_from_checkpoint(checkpoint_folder)


def _sampler_of_pairs(loader: Any) -> Any:
    """The sampler inside the batch samplers of a loader, or None.

    accelerate wraps them for several ranks, and again to skip what was trained before a resume. Neither it nor
    `Trainer` tells the epoch to a sampler within two of them.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
