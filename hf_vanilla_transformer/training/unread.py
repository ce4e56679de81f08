"""Settings that a recipe or a flag gives, and that the other settings of the run leave without effect."""

import copy
from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from .arguments import DataArguments, RunArguments

_WITHOUT_WARM_UP = ("constant", "reduce_lr_on_plateau", "greedy")
# Arguments of transformers -> the argument of an optimizer.
_OF_ADAM = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}


def _value(setting: Any) -> Any:
    return getattr(setting, "value", setting)


def _rules(
    data_args: DataArguments, args: RunArguments
) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Arguments, whether they have no effect, and the reason."""
    limit = args.max_tokens_per_batch
    names: tuple[str, ...] = ("per_device_train_batch_size", "train_sampling_strategy")
    yield names, limit is not None, f"max_tokens_per_batch={limit} makes the batches"

    is_chosen = "max_steps" in args.explicit and args.max_steps > 0
    yield ("num_train_epochs",), is_chosen, f"max_steps={args.max_steps} ends the run"

    for kind in ("eval", "save", "logging"):
        strategy = _value(getattr(args, f"{kind}_strategy"))
        yield (f"{kind}_steps",), strategy != "steps", f"{kind}_strategy is {strategy}"

    names = ("dataloader_num_workers", "dataloader_prefetch_factor")
    unchanging = not data_args.augment and not data_args.rewrite
    reason = "packed rows of pairs that do not change are made in the main process (pack)"
    yield names, bool(args.pack) and unchanging, reason

    schedule = _value(args.lr_scheduler_type)
    has_rate = "learning_rate" in args.explicit  # the default rate depends on the warm-up
    unread = schedule in _WITHOUT_WARM_UP and has_rate
    yield ("warmup_steps",), unread, f"lr_scheduler_type is {schedule}"

    names = ("lora_alpha", "lora_dropout", "lora_target_modules")
    yield names, not args.lora_r, "lora_r is 0"
    yield ("teacher_weight",), not args.teacher, "there is no teacher"
    names = ("language_token", "add_languages", "sampling_temperature")
    yield names, not data_args.directions, "there are no directions"

    model = data_args.tokenizer_name or args.model_name_or_path
    names = ("vocab_size", "min_frequency", "separate_vocabularies")
    yield names, bool(model), f"{model} has its tokenizer"

    selects = (
        args.load_best_model_at_end
        or args.average_last > 1
        or args.ema_decay
        or args.early_stopping_patience is not None
        or _value(args.save_strategy) == "best"
    )
    reason = "load_best_model_at_end is False, so that the last weights are kept"
    yield ("metric_for_best_model", "greater_is_better"), not selects, reason

    names = ("hub_model_id", "hub_private_repo", "hub_revision")
    yield names, not args.push_to_hub, "push_to_hub is False"


def unread_settings(model_args: Any, data_args: DataArguments, args: RunArguments) -> list[str]:
    """Return a line for each setting of a recipe or a flag that has no effect, with the reason.

    The names are those in `args.explicit`. Defaults are not reported.
    """
    values = {**vars(model_args), **vars(data_args), **vars(args)}
    reasons: dict[str, str] = {}
    for names, unread, why in _rules(data_args, args):
        if unread:
            reasons |= dict.fromkeys(names, why)
    optimizer = _value(args.optim)
    _, read = Trainer.get_optimizer_cls_and_kwargs(args)
    for name, argument in _OF_ADAM.items():
        if argument not in read:
            reasons[name] = f"optim is {optimizer}"
    if unknown := _unread_optim_args(args, read):
        reasons["optim_args"] = f"optim is {optimizer}, which knows no {unknown}"
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
