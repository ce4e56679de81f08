"""The arguments of a training run: model, data and training. Recipes and command-line flags use the field names."""

from dataclasses import MISSING, Field, dataclass, fields, make_dataclass
from enum import Enum
from typing import Any

import torch
from transformers import GenerationConfig, Seq2SeqTrainingArguments
from transformers.hf_argparser import HfArg

from ..configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .argument_checks import check_ranges, check_run_arguments, check_training_arguments

# Configuration fields that the tokenizers decide, or that a translation model does not use.
_NOT_ARGUMENTS = {"decoder_vocab_size", "is_encoder_decoder", "use_cache", "position_offset"}


def _optional(help: str) -> Any:
    return HfArg(default=None, help=help)


def _model_fields() -> list[tuple[str, Any, Field]]:
    """One optional argument per configuration field. None keeps the value of the preset or the default."""
    # HfArgumentParser accepts no union but `X | None`.
    parsed_as: dict[Any, Any] = {float | int: float, int | None: int}
    arguments = []
    for each in fields(VanillaTransformerConfig):
        own = each.name in VanillaTransformerConfig.__annotations__
        if not own or each.name in _NOT_ARGUMENTS or each.name.endswith("_token_id"):
            continue
        default = "" if each.default in (MISSING, None) else f" (default {each.default})"
        help = f"{each.name} of VanillaTransformerConfig{default}"
        arguments.append((each.name, parsed_as.get(each.type, each.type) | None, _optional(help)))
    preset = _optional(f"A row of Table 3 to start from: {', '.join(PRESETS)}")
    return [*arguments, ("preset", str | None, preset)]


# Generated from the configuration, so that the two cannot drift apart.
ModelArguments = make_dataclass("ModelArguments", _model_fields())
ModelArguments.__doc__ = "The architecture: a preset, and any field of `VanillaTransformerConfig` but the token ids."


@dataclass
class DataArguments:
    """Where the sentence pairs come from, and how they are tokenized."""

    source_lang: str | None = _optional("Source language, such as en")
    target_lang: str | None = _optional("Target language, such as de")
    train: list[str] | None = _optional(
        "Text to train on: two plain-text files, source first (train.en train.de); a TSV, CSV, JSON lines, Parquet, "
        "TMX or XLIFF file; a prefix (data/train: data/train.en, data/train.de); a folder of distil; numbers, the "
        "built-in corpus; or a dataset on the Hub (user/name or user/name:configuration). Several are mixed"
    )
    validation: list[str] | None = _optional("The same, for evaluation during training and to select a checkpoint")
    test: list[str] | None = _optional("The same, scored once after training")
    base_test: list[str] | None = _optional(
        "Fine-tuning: a test set of the base model's text, scored before and after, so that forgetting is seen"
    )
    train_weights: list[int] | None = _optional(
        "How often each pair of each input occurs in an epoch; of streams, the pairs that are read in turn"
    )
    source_column: str | None = _optional("Column of the source sentences")
    target_column: str | None = _optional("Column of the target sentences")
    numbers_size: int = HfArg(default=20_000, help="Training pairs of the built-in corpus, number words of num2words")
    streaming: bool = HfArg(default=False, help="Stream the training data (needs max_steps)")
    max_source_length: int | None = HfArg(default=256, help="Drop (and report) training pairs with more source tokens")
    max_target_length: int | None = HfArg(default=256, help="The same for target tokens")
    held_out_pairs: int | None = _optional(
        "Without validation data: validate on this many pairs of the training data (at most a tenth), drawn by seed"
    )
    max_train_samples: int | None = _optional("Train on the first N pairs only")
    max_eval_length: int | None = HfArg(
        default=1024,
        help="Leave out (and report) validation and test pairs with more tokens on a side: the memory of a "
        "batch grows with its longest pair",
    )
    max_eval_samples: int | None = _optional("Validate on the first N pairs only")
    max_test_samples: int | None = _optional("Score the first N pairs of the test sets only")
    tokenizer_name: str | None = _optional("A folder with a tokenizer, and optionally target_tokenizer/ in it")
    separate_vocabularies: bool = HfArg(default=False, help="Train one tokenizer per language, not a joint one")
    min_frequency: int = HfArg(default=2, help="How often a pair must occur to become a BPE merge")
    lowercase: bool = HfArg(default=False, help="Lower-case all text")
    bidirectional: bool = HfArg(
        default=False, help="Train on each pair in both directions (the first stage of Bi-SimCut, Gao et al. 2022)"
    )
    bpe_dropout: float = HfArg(default=0.0, help="BPE-dropout while training (Provilkov et al. 2020)")
    bleu_tokenize: str | None = _optional(
        "sacreBLEU's tokenizer: 13a, none, intl, zh …; None: the one that fits the script of the target"
    )
    bleu_lowercase: bool = HfArg(default=False, help="Case-insensitive scores")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with token batches (§5.1) for `VanillaTransformerTrainer`.

    Raises:
        ValueError: a number below 1, or settings in batches or sentences together with settings in tokens.
    """

    max_tokens_per_batch: int | None = _optional(
        "Batches of at most this many source tokens and this many target tokens, padding included, on "
        "each device; replaces per_device_train_batch_size"
    )
    tokens_per_update: int | None = _optional(
        "Target tokens per update, about, over all batches and ranks (§5.1: 25000); None: one batch per device"
    )
    stream_window: int = HfArg(default=20_000, help="Pairs of a stream that are buffered to build token batches from")
    simcut_alpha: float = HfArg(default=0.0, help="SimCut (Gao et al. 2022): weight α of its divergence; the paper: 3")
    simcut_probability: float = HfArg(default=0.05, help="SimCut: share of the token embeddings that are zeroed")
    r_drop_alpha: float = HfArg(default=0.0, help="R-Drop (Liang et al. 2021): weight α of its divergence; there: 5")
    consistency_start: int = HfArg(
        default=0, help="Updates with the plain loss, which take half the time or less, before SimCut or R-Drop starts"
    )
    teacher: list[str] | None = _optional(
        "Word-level distillation: folder of a model with the same vocabularies to learn from; several form an ensemble"
    )
    teacher_weight: float = HfArg(default=0.5, help="Weight λ of the teacher's distributions, 1 - λ of the references")
    teacher_top: int = HfArg(
        default=0,
        help="Compute the teacher's distributions once, before training, and keep this many tokens of each, such as "
        "16: updates then cost what plain ones do; 0 asks the teacher in each update",
    )
    muon: bool = HfArg(
        default=False,
        help="Train the weight matrices of the layers with Muon (Jordan et al. 2024), everything else with optim",
    )
    ema_decay: float = HfArg(
        default=0.0, help="Decay of an exponential moving average of the weights, such as 0.999; 0 keeps none"
    )

    def __post_init__(self) -> None:
        if isinstance(self.teacher, str):
            self.teacher = [self.teacher]
        check_training_arguments(self)
        self._check_objectives()
        if self.max_tokens_per_batch is None:
            if self.tokens_per_update is not None:
                raise ValueError(f"tokens_per_update={self.tokens_per_update} needs max_tokens_per_batch")
        elif self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} counts batches: with "
                "max_tokens_per_batch set tokens_per_update instead"
            )
        elif self.dataloader_drop_last or self.auto_find_batch_size:
            name = "dataloader_drop_last" if self.dataloader_drop_last else "auto_find_batch_size"
            raise ValueError(f"{name}=True does not go with max_tokens_per_batch")
        super().__post_init__()
        if self.accelerator_config.dispatch_batches is None:
            # Every rank reads a stream and takes its share of the batches. accelerate's default would let the main
            # rank read for all, and concatenate batches that are padded to different lengths.
            self.accelerator_config.dispatch_batches = False

    def _check_objectives(self) -> None:
        if self.consistency_start and not (self.simcut_alpha or self.r_drop_alpha):
            raise ValueError(f"consistency_start={self.consistency_start} needs simcut_alpha or r_drop_alpha")
        if not 0 <= self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight}: must be from 0 to 1")
        if self.teacher_top and not self.teacher:
            raise ValueError(f"teacher_top={self.teacher_top} needs a teacher")
        values = {name: getattr(self, name) for name in ("simcut_alpha", "r_drop_alpha")}
        values["teacher"] = " ".join(self.teacher or [])
        chosen = [f"{name}={value}" for name, value in values.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are different objectives: choose one")
        if chosen and self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} replaces the model's loss: with {chosen[0]} "
                "use the label_smoothing of the configuration"
            )


@dataclass
class RunArguments(VanillaTransformerTrainingArguments):
    """`VanillaTransformerTrainingArguments` with the paper's optimizer and schedule (§5.3) as defaults, and the
    arguments of a whole run (`run_training`)."""

    model_name_or_path: str | None = _optional(
        "Fine-tune this model: a model folder, a folder of a MarianMTModel (OPUS-MT), or a name on the Hub"
    )
    model_class: str | None = _optional(
        "Train this subclass of VanillaTransformerForConditionalGeneration: MODULE:CLASS (gated:GatedTranslator)"
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Run the code that the folder of model_name_or_path or of a teacher contains"
    )
    learning_rate: float | None = _optional(
        "Peak learning rate; default: the paper's d_model^-0.5 · warmup_steps^-0.5, for fine-tuning its value after "
        "200,000 updates, d_model^-0.5 · 200000^-0.5"
    )
    # None until `__post_init__`: the defaults depend on whether weights are fresh.
    lr_scheduler_type: str = _optional("Learning rate schedule; default: inverse_sqrt (§5.3), for fine-tuning linear")
    warmup_steps: float = _optional(
        "Steps of linear warm-up, below 1 a share of all; default: 4000 (§5.3), for fine-tuning 0.05"
    )
    logging_steps: float = _optional(
        "Updates between two printed lines, below 1 a share of all; default: 500, for fine-tuning 0.05"
    )
    adam_beta2: float = HfArg(default=0.98, help="β2 of Adam (§5.3)")
    adam_epsilon: float = HfArg(default=1e-9, help="ε of Adam (§5.3)")
    train_sampling_strategy: str = HfArg(default="group_by_length", help="How training examples are sampled")
    predict_with_generate: bool = HfArg(default=True, help="Evaluate generated translations")
    report_to: None | str | list[str] = HfArg(default="none", help="Where to log: none, tensorboard …")
    metric_for_best_model: str | None = _optional("The metric that selects the best checkpoint; default BLEU")
    # Every parameter gets a gradient in every step.
    ddp_find_unused_parameters: bool | None = HfArg(default=False, help="Whether DDP searches for unused parameters")
    auto_bf16: bool = HfArg(default=False, help="Train in bf16 if a few timed steps are faster than in float32")
    early_stopping_patience: int | None = _optional("Stop after this many evaluations without improvement")
    max_minutes: float | None = _optional("Stop training after this many minutes")
    average_last: int = HfArg(
        default=0, help="Average the last N checkpoints (§6.1), if that scores higher, or without validation data"
    )
    test_num_beams: int | None = _optional("Beams for the test split and in the saved generation_config.json")
    test_length_penalty: float | None = _optional("Exponent α of the length penalty, likewise")

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False
            if self.bf16:
                self.use_cpu = True  # the base class refuses bf16 on a CPU without use_cpu
        fine_tuning = self.model_name_or_path is not None
        if self.lr_scheduler_type is None:
            self.lr_scheduler_type = "linear" if fine_tuning else "inverse_sqrt"
        if self.warmup_steps is None:
            self.warmup_steps = 0.05 if fine_tuning else 4000
        if self.logging_steps is None:
            self.logging_steps = 0.05 if fine_tuning else 500  # a fine-tuning run may have fewer updates
        selects = self.load_best_model_at_end or self.early_stopping_patience is not None
        selects = selects or getattr(self.save_strategy, "value", self.save_strategy) == "best"
        if selects and not self.metric_for_best_model:
            self.metric_for_best_model = "bleu"
            self.greater_is_better = True
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith("perplexity"):
            self.greater_is_better = False  # the base class knows this of "loss" only
        check_run_arguments(self)
        super().__post_init__()


def model_config(
    model_args: Any, config_class: type[VanillaTransformerConfig] = VanillaTransformerConfig, **overrides: Any
) -> VanillaTransformerConfig:
    """The configuration that `ModelArguments` describe, with overrides."""
    chosen = {name: value for name, value in vars(model_args).items() if value is not None} | overrides
    preset = chosen.pop("preset", None)
    return config_class.from_preset(preset, **chosen) if preset else config_class(**chosen)


def bleu_options(data_args: DataArguments) -> dict[str, Any]:
    """The options of BLEU in evaluations and in the test."""
    return {"tokenize": data_args.bleu_tokenize, "lowercase": data_args.bleu_lowercase}


def set_decoding(config: GenerationConfig, args: RunArguments) -> None:
    """Set the search of the test in the generation config that is saved with the model.

    `generation_max_length` replaces a limit that a base model has. The paper's limit grows with the source and stays.
    """
    if args.generation_max_length is not None and config.to_diff_dict().keys() & {"max_length", "max_new_tokens"}:
        config.max_length, config.max_new_tokens = args.generation_max_length, None
    if args.test_num_beams is not None:
        config.num_beams = args.test_num_beams
    if args.test_length_penalty is not None:
        config.length_penalty = args.test_length_penalty


def chosen_values(*arguments: Any) -> dict[str, Any]:
    """The values of model, data and run arguments that differ from the defaults, as a recipe would set them."""
    chosen = {}
    for each in arguments:
        default = vars(type(each)())
        for name in (field.name for field in fields(each)):
            value = getattr(each, name)
            if value is not None and value != default[name]:
                chosen[name] = value.value if isinstance(value, Enum) else value
    return chosen
