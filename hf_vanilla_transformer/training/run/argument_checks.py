"""A wrong value of an argument is refused at once, not in the middle of training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import Trainer, TrainingArguments

from ...configuration_vanilla_transformer import VanillaTransformerConfig
from ...evaluation.metric_names import TITLES, lower_is_better
from ...utils.errors import UserError, did_you_mean, missing_extra
from ...utils.number_ranges import check_ranges
from ...utils.system_calls import memory_size

_AT_LEAST_1 = (
    "max_tokens_per_batch",
    "tokens_per_update",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "save_total_limit",
    "eval_accumulation_steps",
    "dataloader_prefetch_factor",
    "torch_empty_cache_steps",
    "generation_max_length",
    "generation_num_beams",
    "test_num_beams",
    "early_stopping_patience",
    "ddp_timeout",
)
_AT_LEAST_0 = (
    "learning_rate",
    "weight_decay",
    "adam_epsilon",
    "max_grad_norm",
    "warmup_steps",
    "neftune_noise_alpha",
    "eval_delay",
    "dataloader_num_workers",
    "average_last",
    "seed",
    "data_seed",
    "simcut_alpha",
    "r_drop_alpha",
    "crossconst_alpha",
    "consistency_start",
    "teacher_top",
    "lora_r",
)
_ABOVE_0 = (
    "logging_steps",
    "save_steps",
    "eval_steps",
    "max_minutes",
)
_SHARES = (
    "adam_beta1",
    "adam_beta2",
    "label_smoothing_factor",
    "ema_decay",
)
_FINITE = "test_length_penalty", "num_train_epochs"
# Larger values would allocate more than a machine has: tables of positions, hypotheses, processes.
_AT_MOST = {
    "generation_max_length": 100_000,
    "generation_num_beams": 1000,
    "test_num_beams": 1000,
    "dataloader_num_workers": 1000,
    "dataloader_prefetch_factor": 1000,
    "seed": 2**32 - 1,  # NumPy's
    "data_seed": 2**32 - 1,
}
# Further scores of an evaluation.
_OF_TRAINER = "loss", "perplexity", "gen_len"


def check_training_arguments(arguments: TrainingArguments) -> None:
    """Refuse training arguments that train nothing, or that need a package that is not installed."""
    check_ranges(
        arguments,
        at_least_1=_AT_LEAST_1,
        at_least_0=_AT_LEAST_0,
        above_0=_ABOVE_0,
        shares=_SHARES,
        finite=_FINITE,
        at_most=_AT_MOST,
    )
    if arguments.max_steps == 0 or arguments.max_steps < -1:
        raise UserError(
            f"max_steps: {arguments.max_steps}: give a number of updates, or -1 to train num_train_epochs"
        )
    if arguments.max_steps == -1 and arguments.num_train_epochs <= 0:
        raise UserError(
            f"num_train_epochs: {arguments.num_train_epochs}: must be above 0, or set max_steps"
        )
    if arguments.dataloader_persistent_workers and not arguments.dataloader_num_workers:
        raise UserError(
            "dataloader_persistent_workers: True: there are no workers: set dataloader_num_workers"
        )
    optim = getattr(arguments.optim, "value", arguments.optim)
    if arguments.muon and optim not in ("adamw_torch", "adamw_torch_fused"):
        raise UserError(
            f"optim: {optim}: muon needs adamw_torch_fused, the default: leave optim or muon out"
        )
    if arguments.muon and arguments.fp16:
        raise UserError(
            "fp16: True: muon averages gradients over updates, and fp16 scales each differently: use bf16"
        )


# Arguments that a run needs as they are by default, with the reason.
_REQUIRED = {
    "predict_with_generate": (True, "a run scores generated translations"),
    "use_liger_kernel": (False, "there are no Liger kernels for this model"),
    "debug": (False, "it cannot read the Boolean masks of this model, or needs a TPU"),
    "remove_unused_columns": (True, "the encoded text has columns of the run itself"),
    "prediction_loss_only": (False, "a run scores generated translations"),
    "bf16_full_eval": (
        False,
        "it rounds the weights that are saved: bf16 evaluates in bfloat16, too",
    ),
    "fp16_full_eval": (
        False,
        "it rounds the weights that are saved: fp16 evaluates in float16, too",
    ),
}


def check_run_arguments(arguments: TrainingArguments) -> None:
    """Refuse arguments that would make the evaluations of a run fail, or round its weights."""
    for name, (required, reason) in _REQUIRED.items():
        value = getattr(arguments, name)
        if bool(value) is not required:
            raise UserError(f"{name}: {value}: {reason}: leave it out")


def check_selection(args: TrainingArguments, names: Sequence[str], several: bool = False) -> None:
    """Refuse to select by a score that is not measured.

    The default is BLEU, or chrF for `several` directions. If it is not measured, it is the first score.
    """
    if args.metric_for_best_model is None:
        return
    if args.metric_by_default:
        # BLEU of a direction with short sentences is 0, and would decide the mean of all.
        preferred = "chrf" if several else "bleu"
        _select_by(args, preferred if preferred in names else names[0])
        return
    metric = args.metric_for_best_model.removeprefix("eval_")
    if metric in names or metric in _OF_TRAINER:
        return
    measured = [*names, *_OF_TRAINER]
    hint = did_you_mean(metric, measured) or f"choose among {', '.join(measured)}"
    raise UserError(
        f"metric_for_best_model: {args.metric_for_best_model!r} is not measured; {hint}"
    )


def _select_by(args: TrainingArguments, metric: str) -> None:
    """Keep the weights with the best of this score, in the place of the default."""
    if metric != args.metric_for_best_model:
        args.metric_for_best_model = metric
        args.greater_is_better = not is_lower_better(metric)


def is_lower_better(metric: str) -> bool:
    """Return whether less of a score is better. Raise a UserError for one of which only the user knows it."""
    is_lower = lower_is_better(metric)
    if is_lower is None:
        hint = did_you_mean(metric, TITLES) or "it is no score of this package"
        raise UserError(
            f"metric_for_best_model: {metric}: {hint}; give greater_is_better for a score of your own, true or false"
        )
    return is_lower


def check_size(config: VanillaTransformerConfig) -> None:
    """Refuse a model with weights that need more than the memory of this machine, before it is made."""
    d = config.d_model

    def layer(heads: int, ffn_dim: int, attentions: int) -> int:
        widths = (config.head_dim or d // heads) + (config.value_head_dim or d // heads)
        return attentions * 2 * d * heads * widths + 2 * d * ffn_dim

    parameters = config.vocab_size * d + config.encoder_layers * layer(
        config.encoder_attention_heads, config.encoder_ffn_dim, 1
    )
    parameters += config.decoder_layers * layer(
        config.decoder_attention_heads, config.decoder_ffn_dim, 2
    )
    if config.position_encoding_type == "learned":
        parameters += 2 * config.max_position_embeddings * d
    memory = memory_size()
    if 4 * parameters > memory:
        raise UserError(
            f"the model would have {parameters:,} parameters, {4 * parameters / 1e9:,.0f} GB, and this machine has "
            f"{memory / 1e9:,.0f} GB: make its fields smaller (d_model={d}, …)"
        )


@contextmanager
def refused_as_one_line(settings: str) -> Iterator[None]:
    """Turn an error of a library about wrong settings into a `UserError` that starts with `settings`."""
    try:
        yield
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        LookupError,
        AttributeError,
        ImportError,
        RuntimeError,
    ) as error:
        refusal = UserError(f"{settings}: {' '.join(str(error).split()) or repr(error)}")
        raise missing_extra(error) or refusal from None


def check_optimizer(arguments: TrainingArguments) -> None:
    """Make the optimizer for one parameter."""
    kind = getattr(arguments.optim, "value", arguments.optim)
    with refused_as_one_line(f"optim: {kind} with optim_args={arguments.optim_args}"):
        make, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        if settings.keys() <= {
            "lr",
            "betas",
            "eps",
            "momentum",
            "fused",
            "scale_parameter",
            "relative_step",
        }:
            make([torch.zeros(1, requires_grad=True)], **settings)


def check_compilation(arguments: TrainingArguments) -> None:
    """Let torch check mode and backend of compiled updates. Nothing is compiled."""
    mode = arguments.torch_compile_mode
    backend = arguments.torch_compile_backend
    if mode is None and backend is None:
        return  # the check imports the compiler
    with refused_as_one_line(f"torch_compile_mode: {mode} with torch_compile_backend={backend}"):
        torch.compile(torch.nn.Identity(), backend=backend or "inductor", mode=mode)
