"""The arguments of a training run: model, data and training. Recipes and command-line flags use the field names."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeAlias

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from ...configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from ...corpora.data_arguments import DataArguments, optional_argument, run_task
from ...evaluation.metric_names import ScoreOptions, default_metrics
from ...text.token_kinds import token_splitter
from ...utils.errors import UserError
from ...utils.normalization import import_normalizer
from .argument_checks import check_run_arguments, check_training_arguments, is_lower_better

#: The arguments of a whole run.
ParsedArguments: TypeAlias = "tuple[ModelArguments, DataArguments, RunArguments]"


def _of_config(name: str) -> Any:
    """A field of `VanillaTransformerConfig`. None keeps the value of the preset or the default."""
    default = getattr(VanillaTransformerConfig, name)
    shown = "" if default is None else f" (default {default})"
    return HfArg(default=None, help=f"{name} of VanillaTransformerConfig{shown}")


@dataclass
class ModelArguments:
    """The architecture: a preset, and any field of `VanillaTransformerConfig` but the token ids.

    The tokenizers decide the ids and `decoder_vocab_size`.
    """

    vocab_size: int | None = _of_config("vocab_size")
    d_model: int | None = _of_config("d_model")
    encoder_layers: int | None = _of_config("encoder_layers")
    decoder_layers: int | None = _of_config("decoder_layers")
    encoder_attention_heads: int | None = _of_config("encoder_attention_heads")
    decoder_attention_heads: int | None = _of_config("decoder_attention_heads")
    encoder_ffn_dim: int | None = _of_config("encoder_ffn_dim")
    decoder_ffn_dim: int | None = _of_config("decoder_ffn_dim")
    head_dim: int | None = _of_config("head_dim")
    value_head_dim: int | None = _of_config("value_head_dim")
    activation_function: str | None = _of_config("activation_function")
    dropout: float | None = _of_config("dropout")
    attention_dropout: float | None = _of_config("attention_dropout")
    activation_dropout: float | None = _of_config("activation_dropout")
    position_encoding_type: str | None = _of_config("position_encoding_type")
    max_position_embeddings: int | None = _of_config("max_position_embeddings")
    scale_embedding: bool | None = _of_config("scale_embedding")
    layer_norm_position: str | None = _of_config("layer_norm_position")
    layer_norm_eps: float | None = _of_config("layer_norm_eps")
    attention_bias: bool | None = _of_config("attention_bias")
    lm_head_bias: bool | None = _of_config("lm_head_bias")
    final_layer_norm: bool | None = _of_config("final_layer_norm")
    share_encoder_decoder_embeddings: bool | None = _of_config("share_encoder_decoder_embeddings")
    tie_word_embeddings: bool | None = _of_config("tie_word_embeddings")
    label_smoothing: float | None = _of_config("label_smoothing")
    attention_kernels: str | None = _of_config("attention_kernels")
    preset: str | None = optional_argument(f"A row of Table 3 to start from: {', '.join(PRESETS)}")


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with token batches (§5.1) for `VanillaTransformerTrainer`.

    Raises:
        ValueError: a number below 1, or settings in batches or sentences together with settings in tokens.
    """

    max_tokens_per_batch: int | None = optional_argument(
        "Batches of at most this many source tokens and this many target tokens, padding included, on "
        "each device; replaces per_device_train_batch_size"
    )
    tokens_per_update: int | None = optional_argument(
        "Target tokens per update, about, over all batches and ranks (§5.1: 25000); None: one batch per device"
    )
    pack: bool | None = optional_argument(
        "Pack several pairs into each row of a token batch, so that all batches have one shape and little padding; "
        "default: on a GPU"
    )
    torch_compile: bool | None = optional_argument(
        "Compile the update of packed rows as one graph; without packed rows, the model by torch.compile; default: "
        "packed rows on a GPU"
    )
    simcut_alpha: float = HfArg(
        default=0.0, help="SimCut (Gao et al. 2022): weight α of its divergence (in the paper 3)"
    )
    r_drop_alpha: float = HfArg(
        default=0.0, help="R-Drop (Liang et al. 2021): weight α of its divergence (in the paper 5)"
    )
    crossconst_alpha: float = HfArg(
        default=0.0,
        help="CrossConST (Gao et al. 2023): weight α of the divergence from a translation of the target itself, for "
        "directions without training text",
    )
    consistency_start: int = HfArg(
        default=0,
        help="Updates with the plain loss, which take half the time or less, before consistency starts",
    )
    teacher: list[str] | None = optional_argument(
        "Word-level distillation: folder of a model with the same vocabularies to learn from; several form an ensemble"
    )
    teacher_weight: float = HfArg(
        default=0.5, help="Weight λ of the teacher's distributions, 1 - λ of the references"
    )
    teacher_top: int = HfArg(
        default=0,
        help="Compute the teacher's distributions once, before training, and keep this many tokens of each, such as "
        "16: updates then cost what plain ones do; 0 asks the teacher in each update",
    )
    muon: bool = HfArg(
        default=False,
        help="Train the weight matrices of the layers with Muon (Jordan et al. 2024), everything else with optim",
    )
    skip_nonfinite_gradients: bool = HfArg(
        default=False,
        help="Leave out an update whose gradient is not finite although its loss is, and count it in the log, instead "
        "of stopping; fp16 always leaves it out",
    )
    ema_decay: float = HfArg(
        default=0.0,
        help="Decay of an exponential moving average of the weights, such as 0.999; 0 keeps none",
    )

    def __post_init__(self) -> None:
        if self.report_to is None:  # type: ignore[has-type]
            self.report_to = "none"  # the base class makes it [None], and then refuses that
        if not torch.accelerator.is_available():
            # Without it the base class refuses bf16, and accelerate forms no group of several processes.
            self.use_cpu = True
            self.dataloader_pin_memory = False
        self.check()
        if self.max_tokens_per_batch is None:
            if self.tokens_per_update is not None:
                raise ValueError(
                    f"tokens_per_update={self.tokens_per_update} needs max_tokens_per_batch"
                )
        elif self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} counts batches: with "
                "max_tokens_per_batch set tokens_per_update instead"
            )
        elif self.dataloader_drop_last or self.auto_find_batch_size:
            name = "dataloader_drop_last" if self.dataloader_drop_last else "auto_find_batch_size"
            raise ValueError(f"{name}=True does not go with max_tokens_per_batch")
        super().__post_init__()
        if self.dataloader_pin_memory and torch.cuda.is_available():
            self.accelerator_config.non_blocking = True  # the host goes on while a batch is copied
        if self.accelerator_config.dispatch_batches is None:
            # Every rank reads a stream of the caller's and takes its share. accelerate's default would let the main
            # rank read for all, and concatenate batches that are padded to different lengths.
            self.accelerator_config.dispatch_batches = False

    def check(self) -> None:
        """Refuse values that are wrong or do not go together. They may be set after the arguments are made."""
        if isinstance(self.teacher, str):
            self.teacher = [self.teacher]
        check_training_arguments(self)
        self._check_objectives()

    def _check_objectives(self) -> None:
        alphas = {
            name: getattr(self, name)
            for name in ("simcut_alpha", "r_drop_alpha", "crossconst_alpha")
        }
        if self.consistency_start and not any(alphas.values()):
            raise ValueError(
                f"consistency_start={self.consistency_start} needs one of {', '.join(alphas)}"
            )
        if not 0 <= self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight}: must be from 0 to 1")
        if self.teacher_top and not self.teacher:
            raise ValueError(f"teacher_top={self.teacher_top} needs a teacher")
        chosen = [f"{name}={value}" for name, value in alphas.items() if value]
        if self.teacher:
            chosen.append(f"teacher={' '.join(self.teacher)}")
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are different objectives: choose one")
        if chosen and self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} replaces the model's loss: with {chosen[0]} "
                "use the label_smoothing of the configuration"
            )


@dataclass
class Choice:
    """The arguments of a run for a size of the training text, from `by_pairs` of a recipe."""

    fields: dict[str, object]  #: those of the recipe that no flag overrides
    why: str
    arguments: ParsedArguments


@dataclass
class RunArguments(VanillaTransformerTrainingArguments):
    """`VanillaTransformerTrainingArguments` with the paper's optimizer and schedule (§5.3) as defaults, and the
    arguments of a whole run (`run_training`)."""

    model_name_or_path: str | None = optional_argument(
        "Fine-tune this model: a model folder, a folder of a MarianMTModel (OPUS-MT), or a name on the Hub or of "
        "a model of this package"
    )
    model_class: str | None = optional_argument(
        "Train this subclass of VanillaTransformerForConditionalGeneration: MODULE:CLASS (gated:GatedTranslator)"
    )
    lora_r: int = HfArg(
        default=0,
        help="Fine-tune with LoRA adapters of this rank, such as 16, on all projections of the layers; 0 trains all "
        "weights",
    )
    trust_remote_code: bool = HfArg(
        default=False,
        help="Run the code that the folder of model_name_or_path or of a teacher contains",
    )
    learning_rate: float | None = optional_argument(
        "Peak learning rate; default: the paper's d_model^-0.5 · warmup_steps^-0.5, for fine-tuning its value after "
        "200,000 updates, d_model^-0.5 · 200000^-0.5"
    )
    # None until `__post_init__`: the defaults depend on whether weights are fresh.
    lr_scheduler_type: str = optional_argument(
        "Learning rate schedule (default: inverse_sqrt, §5.3, for fine-tuning linear)"
    )
    warmup_steps: float = optional_argument(
        "Steps of linear warm-up, below 1 a share of all; default: 4000 (§5.3), for fine-tuning 0.05"
    )
    logging_steps: float = optional_argument(
        "Updates between two printed lines, below 1 a share of all; default: 500, for fine-tuning 0.05"
    )
    adam_beta2: float = HfArg(default=0.98, help="β2 of Adam (§5.3)")
    adam_epsilon: float = HfArg(default=1e-9, help="ε of Adam (§5.3)")
    train_sampling_strategy: str = HfArg(
        default="group_by_length", help="How training examples are sampled"
    )
    predict_with_generate: bool = HfArg(default=True, help="Evaluate generated translations")
    report_to: None | str | list[str] = HfArg(
        default="none", help="Where to log: none, tensorboard …"
    )
    metric_for_best_model: str | None = optional_argument(
        "The metric that selects the best checkpoint (default: the first of metrics)"
    )
    greater_is_better: bool | None = optional_argument(
        "Whether a greater metric_for_best_model is better (default: as the metric is)"
    )
    ddp_find_unused_parameters: bool | None = optional_argument(
        "Whether DDP searches for unused parameters, and thereby keeps the order of its sums, so that a resumed run "
        "has the same bits; default: with more than two processes"
    )
    auto_bf16: bool = HfArg(
        default=False, help="Train in bf16 if a few timed steps are faster than in float32"
    )
    early_stopping_patience: int | None = optional_argument(
        "Stop after this many evaluations without improvement"
    )
    max_minutes: float | None = optional_argument("Stop training after this many minutes")
    seeds: list[int] | None = optional_argument(
        "Make a run for each seed, in output_dir/seed-1 ..., and a table of mean and deviation"
    )
    average_last: int = HfArg(
        default=0,
        help="Average the last N checkpoints (§6.1), if that scores higher, or without validation data",
    )
    test_num_beams: int | None = optional_argument(
        "Beams for the test split and in the saved generation_config.json"
    )
    test_length_penalty: float | None = optional_argument(
        "Exponent α of the length penalty, likewise"
    )
    #: by the largest number of training pairs
    choices: dict[int, Choice] = field(init=False, default_factory=dict)
    #: fields of the recipe and the flags, also those with the value of a default
    named: list[str] = field(init=False, default_factory=list)
    #: fields of the recipe that no flag overrides
    of_recipe: list[str] = field(init=False, default_factory=list)
    #: `metric_for_best_model` is a default, to be replaced if it is not measured
    metric_by_default: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        fine_tuning = self.model_name_or_path is not None
        if self.lr_scheduler_type is None:
            self.lr_scheduler_type = "linear" if fine_tuning else "inverse_sqrt"
        if self.warmup_steps is None:
            self.warmup_steps = 0.05 if fine_tuning else 4000
        if self.logging_steps is None:
            # A fine-tuning run may have fewer updates.
            self.logging_steps = 0.05 if fine_tuning else 500
        selects = self.load_best_model_at_end or self.early_stopping_patience is not None
        selects = selects or getattr(self.save_strategy, "value", self.save_strategy) == "best"
        if selects and not self.metric_for_best_model:
            self.metric_for_best_model = "bleu"
            self.metric_by_default = True
        if self.metric_for_best_model and self.greater_is_better is None:
            # The base class would take the end of its name for it.
            metric = self.metric_for_best_model.removeprefix("eval_")
            self.greater_is_better = not is_lower_better(metric)
        check_run_arguments(self)
        super().__post_init__()
        if self.ddp_find_unused_parameters is None and self.world_size <= 2:
            # Every parameter gets a gradient in every step, and the order of two summands does not matter.
            self.ddp_find_unused_parameters = False


def model_config(
    model_args: ModelArguments,
    config_class: type[VanillaTransformerConfig] = VanillaTransformerConfig,
    **overrides: object,
) -> VanillaTransformerConfig:
    """The configuration that `ModelArguments` describe, with overrides."""
    chosen = {
        name: value for name, value in vars(model_args).items() if value is not None
    } | overrides
    preset = chosen.pop("preset", None)
    return config_class.from_preset(preset, **chosen) if preset else config_class(**chosen)


def score_options(data_args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> ScoreOptions:
    """The arguments of `score_translations` in evaluations and in the test. `tokenizer` is that of the target."""
    split = token_splitter(tokenizer)
    if "top_k" in (data_args.metrics or ()):
        raise UserError(
            "metrics: top_k scores n-best lists, and a run has one prediction for each line: "
            "score the trained model with evaluate --n_best"
        )
    return {
        "metrics": data_args.metrics or list(default_metrics(run_task(data_args), split)),
        "normalize": import_normalizer(data_args.normalize),
        "tokenize": data_args.bleu_tokenize,
        "lowercase": data_args.bleu_lowercase,
        "split": split,
    }


def set_decoding(config: GenerationConfig, args: RunArguments) -> None:
    """Set the search of the test in the saved generation config. The paper's limit of the length stays."""
    if args.generation_max_length is not None and config.to_diff_dict().keys() & {
        "max_length",
        "max_new_tokens",
    }:
        config.max_length = args.generation_max_length
        config.max_new_tokens = None
    if args.test_num_beams is not None:
        config.num_beams = args.test_num_beams
    if args.test_length_penalty is not None:
        config.length_penalty = args.test_length_penalty


def chosen_values(
    *arguments: ModelArguments | DataArguments | TrainingArguments,
) -> dict[str, object]:
    """The values of model, data and run arguments that differ from the defaults, as a recipe would set them."""
    chosen = {}
    for each in arguments:
        default = vars(type(each)())
        for name in (one.name for one in fields(each) if one.init):
            value = getattr(each, name)
            if value is not None and value != default[name]:
                chosen[name] = value.value if isinstance(value, Enum) else value
    return chosen
