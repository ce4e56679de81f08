"""Settings that a recipe or a flag gives, and that the other settings of the run leave without effect."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from .arguments import DataArguments, RunArguments

_WITHOUT_WARM_UP = ("constant", "reduce_lr_on_plateau", "greedy")
# Arguments of transformers -> the argument of an optimizer.
_OF_ADAM = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}


@dataclass(frozen=True)
class _Rule:
    names: tuple[str, ...]  #: the arguments
    why: Callable[
        [DataArguments, RunArguments], str | None
    ]  #: the reason, or None if they are read


def _value(setting: Any) -> Any:
    return getattr(setting, "value", setting)


def _of_strategy(name: str) -> Callable[[DataArguments, RunArguments], str | None]:
    def why(data_args: DataArguments, args: RunArguments) -> str | None:
        strategy = _value(getattr(args, name))
        return None if strategy == "steps" else f"{name} is {strategy}"

    return why


def _of_batches(data_args: DataArguments, args: RunArguments) -> str | None:
    limit = args.max_tokens_per_batch
    return None if limit is None else f"max_tokens_per_batch={limit} makes the batches"


def _of_epochs(data_args: DataArguments, args: RunArguments) -> str | None:
    is_chosen = "max_steps" in args.explicit and args.max_steps > 0
    return f"max_steps={args.max_steps} ends the run" if is_chosen else None


def _of_workers(data_args: DataArguments, args: RunArguments) -> str | None:
    return "packed rows are made in the main process (pack)" if args.pack else None


def _of_warm_up(data_args: DataArguments, args: RunArguments) -> str | None:
    schedule = _value(args.lr_scheduler_type)
    has_rate = "learning_rate" in args.explicit  # the default rate depends on the warm-up
    return f"lr_scheduler_type is {schedule}" if schedule in _WITHOUT_WARM_UP and has_rate else None


def _of_adapters(data_args: DataArguments, args: RunArguments) -> str | None:
    return None if args.lora_r else "lora_r is 0"


def _of_teacher(data_args: DataArguments, args: RunArguments) -> str | None:
    return None if args.teacher else "there is no teacher"


def _of_directions(data_args: DataArguments, args: RunArguments) -> str | None:
    return None if data_args.directions else "there are no directions"


def _of_tokens(data_args: DataArguments, args: RunArguments) -> str | None:
    name = data_args.tokenizer_name or args.model_name_or_path
    return f"{name} has its tokenizer" if name else None


def _of_selection(data_args: DataArguments, args: RunArguments) -> str | None:
    chooses_last = args.average_last > 1 or args.ema_decay
    stops = args.early_stopping_patience is not None
    if args.load_best_model_at_end or chooses_last or stops or _value(args.save_strategy) == "best":
        return None
    return "load_best_model_at_end is False, so that the last weights are kept"


def _of_hub(data_args: DataArguments, args: RunArguments) -> str | None:
    return None if args.push_to_hub else "push_to_hub is False"


_RULES = (
    _Rule(("per_device_train_batch_size", "train_sampling_strategy"), _of_batches),
    _Rule(("num_train_epochs",), _of_epochs),
    _Rule(("eval_steps",), _of_strategy("eval_strategy")),
    _Rule(("save_steps",), _of_strategy("save_strategy")),
    _Rule(("logging_steps",), _of_strategy("logging_strategy")),
    _Rule(("dataloader_num_workers", "dataloader_prefetch_factor"), _of_workers),
    _Rule(("warmup_steps",), _of_warm_up),
    _Rule(("lora_alpha", "lora_dropout", "lora_target_modules"), _of_adapters),
    _Rule(("teacher_weight",), _of_teacher),
    _Rule(("language_token", "add_languages", "sampling_temperature"), _of_directions),
    _Rule(("vocab_size", "min_frequency", "separate_vocabularies"), _of_tokens),
    _Rule(("metric_for_best_model", "greater_is_better"), _of_selection),
    _Rule(("hub_model_id", "hub_private_repo", "hub_revision"), _of_hub),
)


def unread_settings(model_args: Any, data_args: DataArguments, args: RunArguments) -> list[str]:
    """Return a line for each setting of a recipe or a flag that has no effect, with the reason.

    The names are those in `args.explicit`. Defaults are not reported.
    """
    values = {**vars(model_args), **vars(data_args), **vars(args)}
    reasons: dict[str, str] = {}
    for rule in _RULES:
        why = rule.why(data_args, args)
        for name in rule.names if why else ():
            reasons[name] = str(why)
    optimizer = _value(args.optim)
    _, read = Trainer.get_optimizer_cls_and_kwargs(args)
    for name, argument in _OF_ADAM.items():
        if argument not in read:
            reasons[name] = f"optim is {optimizer}"
    if unread := _unread_optim_args(args, read):
        reasons["optim_args"] = f"optim is {optimizer}, which knows no {unread}"
    return [
        f"not read: {name}={_value(values[name])}, because {why}"
        for name, why in reasons.items()
        if name in args.explicit and values[name] is not None
    ]


def _unread_optim_args(args: RunArguments, read: dict[str, Any]) -> str:
    """The names in `optim_args` that change nothing of the optimizer's arguments `read`."""
    items = str(args.optim_args or "").split(",")
    unread: list[str] = []
    for number, item in enumerate(items):
        without = copy.copy(args)
        without.optim_args = ",".join(items[:number] + items[number + 1 :])
        if item and Trainer.get_optimizer_cls_and_kwargs(without)[1] == read:
            unread.append(item.partition("=")[0].strip())
    return ", ".join(unread)
