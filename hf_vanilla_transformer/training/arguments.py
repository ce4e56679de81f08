"""What a training run can be told, field by field; a recipe file and the command line use the same names."""

from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments

from ..configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig

# Fields of the configuration that the tokenizers decide, or that have no meaning for a translator.
_NOT_CHOSEN = {"decoder_vocab_size", "is_encoder_decoder", "use_cache"}


def _model_fields() -> list[tuple[str, Any, Field]]:
    """One optional argument for each field of the configuration; None leaves the preset's or the default value."""
    single: dict[Any, Any] = {float | int: float, int | None: int}  # the parser takes no other unions
    arguments = []
    for each in fields(VanillaTransformerConfig):
        own = each.name in VanillaTransformerConfig.__annotations__
        if not own or each.name in _NOT_CHOSEN or each.name.endswith("_token_id"):
            continue
        kind = single.get(each.type, each.type)
        shown = "" if each.default in (MISSING, None) else f" (default {each.default})"
        about: Any = field(default=None, metadata={"help": f"{each.name} of VanillaTransformerConfig{shown}"})
        arguments.append((each.name, kind | None, about))
    preset: Any = field(default=None, metadata={"help": f"A row of Table 3 to start from: {', '.join(PRESETS)}"})
    arguments.append(("preset", str | None, preset))
    return arguments


# Made from the configuration, so that the two cannot drift apart.
ModelArguments = make_dataclass("ModelArguments", _model_fields())
ModelArguments.__doc__ = "The model's shape: a preset, and any field of `VanillaTransformerConfig` but the token ids."


@dataclass
class DataArguments:
    """Where the sentence pairs come from, and how they become ids."""

    source_lang: str | None = field(default=None, metadata={"help": "Source language, such as en"})
    target_lang: str | None = field(default=None, metadata={"help": "Target language, such as de"})
    train_file: str | None = field(
        default=None, metadata={"help": "JSON lines, CSV, TSV (also .gz) or Parquet to train on"}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same, to choose the best checkpoint by"})
    test_file: str | None = field(default=None, metadata={"help": "The same, scored once at the end"})
    train_source_file: str | None = field(default=None, metadata={"help": "Parallel text (plain or .gz): the source"})
    train_target_file: str | None = field(default=None, metadata={"help": "Parallel text: the target, line by line"})
    validation_source_file: str | None = field(default=None, metadata={"help": "Validation source text"})
    validation_target_file: str | None = field(default=None, metadata={"help": "Validation target text"})
    test_source_file: str | None = field(default=None, metadata={"help": "Test source text"})
    test_target_file: str | None = field(default=None, metadata={"help": "Test target text"})
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "A data set on the Hub or a folder of one, with splits train, validation and test"},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration"})
    source_column: str | None = field(default=None, metadata={"help": "Column of the source sentences"})
    target_column: str | None = field(default=None, metadata={"help": "Column of the target sentences"})
    numbers_size: int | None = field(
        default=None, metadata={"help": "Train on this many number words instead, made by num2words"}
    )
    numbers_maximum: int = field(default=999_999, metadata={"help": "The largest number"})
    streaming: bool = field(default=False, metadata={"help": "Read while training (max_steps needed)"})
    max_source_length: int | None = field(
        default=256, metadata={"help": "Training pairs with more source tokens are dropped, counted and reported"}
    )
    max_target_length: int | None = field(default=256, metadata={"help": "The same for target tokens"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on the first N pairs only"})
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "A folder with a tokenizer, perhaps target_tokenizer/ in it"},
    )
    separate_vocabularies: bool = field(
        default=False, metadata={"help": "Train one tokenizer for each language instead of a joint one"}
    )
    min_frequency: int = field(default=2, metadata={"help": "How often a pair must occur to become a BPE merge"})
    lowercase: bool = field(default=False, metadata={"help": "Lower-case all text"})
    bpe_dropout: float = field(default=0.0, metadata={"help": "BPE-dropout while training (Provilkov et al. 2020)"})
    bleu_tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer: 13a, none, intl, zh …"})
    bleu_lowercase: bool = field(default=False, metadata={"help": "Score without regard to case"})


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments`, and batches of tokens (§5.1) for `VanillaTransformerTrainer`.

    Raises:
        ValueError: a number below 1, or settings that count batches or sentences beside those that count tokens.
    """

    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Batches of at most this many source tokens and this many target tokens, padding included, on "
            "each device; in place of per_device_train_batch_size"
        },
    )
    tokens_per_update: int | None = field(
        default=None,
        metadata={
            "help": "About this many target tokens an update, in as many batches and processes as that takes (§5.1: "
            "25000); None for one batch on each device"
        },
    )
    stream_window: int = field(
        default=20_000, metadata={"help": "Pairs of a stream that are held to make batches of tokens of"}
    )

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_batch", "tokens_per_update", "stream_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_tokens_per_batch is None:
            if self.tokens_per_update is not None:
                raise ValueError(f"tokens_per_update={self.tokens_per_update} needs max_tokens_per_batch")
        elif self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} counts batches; with "
                "max_tokens_per_batch give tokens_per_update in its place"
            )
        elif self.dataloader_drop_last or self.auto_find_batch_size:
            name = "dataloader_drop_last" if self.dataloader_drop_last else "auto_find_batch_size"
            raise ValueError(f"{name}=True does not go with max_tokens_per_batch")
        super().__post_init__()


@dataclass
class RunArguments(VanillaTransformerTrainingArguments):
    """`VanillaTransformerTrainingArguments` with the paper's optimizer and schedule (§5.3) as defaults, and a little
    more."""

    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate; None is the paper's d_model^-0.5 · warmup_steps^-0.5"}
    )
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "Learning rate schedule"})
    warmup_steps: float = field(default=4000, metadata={"help": "Steps of linear warm-up (§5.3)"})
    adam_beta2: float = field(default=0.98, metadata={"help": "β2 of Adam (§5.3)"})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "ε of Adam (§5.3)"})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "How batches are drawn"})
    predict_with_generate: bool = field(default=True, metadata={"help": "Evaluate by translating"})
    report_to: None | str | list[str] = field(default="none", metadata={"help": "Where to log: none, tensorboard …"})
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "What decides which checkpoint is best; BLEU unless given"}
    )
    # No step leaves a parameter of the model out.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Look for unused parameters"})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Delete the run that output_dir holds"})
    auto_bf16: bool = field(
        default=False, metadata={"help": "Train in bf16 if a few timed steps show that it is faster here"}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better one"}
    )
    max_minutes: float | None = field(default=None, metadata={"help": "Stop training after this many minutes"})
    average_last: int = field(
        default=0, metadata={"help": "Average the last N checkpoints (§6.1) and keep the result if it is better"}
    )
    test_num_beams: int | None = field(
        default=None, metadata={"help": "Beams of the final model, for the test and in generation_config.json"}
    )
    test_length_penalty: float | None = field(
        default=None, metadata={"help": "Exponent α of the final model's length penalty, likewise"}
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin for
            if self.bf16:
                self.use_cpu = True  # the base class refuses bf16 on a CPU that nobody asked for
        chooses = self.load_best_model_at_end or self.early_stopping_patience is not None
        if chooses and not self.metric_for_best_model:
            self.metric_for_best_model = "bleu"
            self.greater_is_better = True
        super().__post_init__()


def chosen_values(*arguments: Any) -> dict[str, Any]:
    """The values that differ from the defaults, as a recipe would write them.

    Args:
        arguments: instances of the three classes above.
    """
    chosen = {}
    for each in arguments:
        default = type(each)()
        for name in (one.name for one in fields(each)):
            value = getattr(each, name)
            if value is not None and value != getattr(default, name):
                chosen[name] = value.value if isinstance(value, Enum) else value
    return chosen
