"""Choose the fields for a corpus of this size, and the number of updates for the minutes of a run."""

from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

from ...corpora.corpus import Corpus
from ...utils.system_info import counted
from ..state.callbacks import StopWithCheckpoint
from ..state.distributed import broadcast_from_main, has_other_ranks, print_main
from ..state.fingerprint import CHOICE, UPDATES, read_run_state
from ..trainer.trainer import VanillaTransformerTrainer
from .argument_checks import refused_as_one_line
from .arguments import DataArguments, ModelArguments, ParsedArguments, RunArguments

_ENDLESS = "constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy"
_WARM_UP = 10  # updates that are not timed
# Shares of the minutes: before the plan, and without evaluations.
_MEASURED = 0.05
_TRAINED = 0.9
_CHECKED = 0.05  # share of the planned updates after which the plan is checked again
_SLOWER = 0.95  # a plan is shortened if fewer than this share of its updates is possible


def choose_by_pairs(
    parsed: ParsedArguments, corpus: Corpus, checkpoint: Path | None
) -> tuple[ModelArguments, DataArguments, RunArguments, dict[str, object]]:
    """Choose the arguments for the number of training pairs, and return them with the facts for the checkpoints.

    A resumed run keeps its choice, and its number of updates if it was planned.
    """
    model_args, data_args, args = parsed
    kept = {} if checkpoint is None else read_run_state(checkpoint).fixed
    facts: dict[str, object] = {}
    if args.choices:
        report = corpus.reports["train"]
        # Weights repeat pairs.
        kept_pairs = sum(part.kept for part in getattr(report, "parts", [report]))
        pairs = min(len(corpus.pairs["train"]), kept_pairs)
        limits = sorted(args.choices)
        limit = next((size for size in limits if pairs <= size), limits[-1])
        limit = next((size for size in limits if size == kept.get(CHOICE)), limit)
        choice = args.choices[limit]
        model_args, data_args, args = choice.arguments
        facts[CHOICE] = limit
        why = f": {choice.why}" if choice.why else ""
        number = counted(pairs, "training pair")
        print_main(f"{number}: the recipe's fields for up to {limit:,}{why}")
        print_main("  " + " ".join(f"{name}={value}" for name, value in choice.fields.items()))
    if UPDATES in kept and args.max_steps < 0:
        facts[UPDATES] = args.max_steps = kept[UPDATES]
    return model_args, data_args, args, facts


def make_schedule(arguments: TrainingArguments, updates: int) -> Any:
    """Make the learning rate schedule of a run of this number of updates, for one parameter."""
    return get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=arguments.learning_rate or 1.0),
        num_warmup_steps=arguments.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


def check_schedule(arguments: TrainingArguments) -> None:
    """Make the learning rate schedule for one parameter, and take three steps."""
    kind = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    with refused_as_one_line(
        f"lr_scheduler_type: {kind} with lr_scheduler_kwargs={arguments.lr_scheduler_kwargs}"
    ):
        schedule = make_schedule(
            arguments, arguments.max_steps if arguments.max_steps > 0 else 1000
        )
        for _ in range(3):
            schedule.optimizer.step()
            schedule.step(*([1.0] if kind in ("reduce_lr_on_plateau", "greedy") else []))


class PlanUpdates(TrainerCallback):
    """Let a learning rate schedule that ends, such as `linear`, end with `max_minutes`.

    After a twentieth of the minutes `max_steps` is set from the time of the updates so far. `num_train_epochs` stays
    a limit. A tenth of the minutes is left for evaluations (`EvaluationBudget`). If the updates become slower, because
    other processes use the machine, the plan is shortened, so that the rate still decays within the minutes.
    """

    def __init__(self, trainer: VanillaTransformerTrainer, stop: StopWithCheckpoint):
        self.trainer = trainer
        self.stop = stop
        self._start: tuple[int, float] | None = None

    @staticmethod
    def is_needed(args: RunArguments) -> bool:
        """True for a limit of minutes, no number of updates, and a schedule that ends."""
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        return args.max_minutes is not None and args.max_steps < 0 and kind not in _ENDLESS

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        schedule = self.trainer.lr_scheduler
        limit = self.stop.max_seconds
        if limit is None or not isinstance(schedule, LambdaLR):
            return
        step = state.global_step
        seconds = self.stop.seconds() - self.stop.evaluation_seconds
        planned = self._planned()
        if self._start is None:
            if step >= _WARM_UP:
                self._start = step, seconds
            return
        if planned is not None and (step - self._start[0] < planned * _CHECKED or step >= planned):
            return
        if planned is None and step % _WARM_UP and has_other_ranks():
            return  # asking the main rank waits for the device
        per_update = (seconds - self._start[1]) / (step - self._start[0])
        left = int((_TRAINED * limit - seconds) / max(per_update, 1e-9))
        is_due = planned is not None or self.stop.seconds() >= _MEASURED * limit
        possible = broadcast_from_main(lambda: step + max(1, left) if is_due else 0)
        if not possible:
            return
        if planned is not None:
            self._start = step, seconds
            if possible >= _SLOWER * planned:
                return
        self._set_updates(args, state, schedule, min(possible, state.max_steps))
        print_main(
            f"schedule: {counted(state.max_steps, 'update')}, for {limit / 60:g} minutes and "
            f"{args.num_train_epochs:g} epochs at {per_update:.3g} s an update"
        )

    def _planned(self) -> int | None:
        """The number of updates of the plan, or None before there is one."""
        updates = self.trainer.fixed_facts.get(UPDATES)
        return updates if isinstance(updates, int) else None

    def _set_updates(
        self, args: TrainingArguments, state: TrainerState, schedule: LambdaLR, updates: int
    ) -> None:
        """End the run, and with it the schedule, after this number of updates."""
        state.max_steps = args.max_steps = self.trainer.fixed_facts[UPDATES] = updates
        state.compute_steps(args, updates)  # shares such as eval_steps=0.1
        schedule.lr_lambdas = make_schedule(args, updates).lr_lambdas * len(schedule.lr_lambdas)
