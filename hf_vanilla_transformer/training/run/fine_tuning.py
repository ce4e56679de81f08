"""Fine-tuning: load the base model, refuse fields that contradict it, and score it before training."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeAlias

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...batches.corpus_tokenizers import Tokenizers
from ...configuration_vanilla_transformer import VanillaTransformerConfig
from ...corpora.directions import parse_directions
from ...evaluation.trainer_metrics import score_test_split
from ...hub.card import SPLITS
from ...inference.directions import Directions
from ...inference.loading import load_model, registered_class
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...text import load_tokenizers
from ...text.language_tokens import recorded_tokens
from ...text.vocabulary import extend_languages
from ...utils.atomic_write import atomic_file
from ...utils.errors import UserError
from ...utils.hub_folders import from_hub
from ...utils.model_folder import check_model_files
from ...utils.shipped_models import model_folder
from ...utils.untrusted import read_json_object
from ..state.checkpoints import SCORES_BEFORE
from ..state.distributed import is_main_rank, print_main
from ..state.fingerprint import REGULARISATION, read_run_state
from ..trainer.trainer import VanillaTransformerTrainer
from .arguments import DataArguments, ModelArguments, RunArguments, score_options, set_decoding
from .facts import SCORED, split_fact
from .run_state import Run

# Data fields that describe a new tokenizer.
_REMEDY = "leave it out of flags and recipe"
_TOKENIZER_FIELDS = ("tokenizer_name", "separate_vocabularies", "min_frequency", "lowercase")

#: A class of translators, the package's own or a subclass.
ModelClass: TypeAlias = type[VanillaTransformerForConditionalGeneration]


class ForeignModel(Protocol):
    """What an importer returns, such as `interop.converted.Converted`."""

    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None  #: of source and target, or of the source
    target_tokenizer: PreTrainedTokenizerBase | None


#: Functions that convert the folder of a model, by its model type.
Importers: TypeAlias = Mapping[str, Callable[[Path], ForeignModel]]
NO_IMPORTERS: Importers = MappingProxyType({})


@dataclass
class PretrainedTranslator:
    """The model that fine-tuning starts from."""

    name: str  #: `model_name_or_path`
    model: VanillaTransformerForConditionalGeneration  #: in float32, on the CPU
    tokenizers: Tokenizers  #: of source and target


def base_folder(args: RunArguments, fetch: bool) -> Path | None:
    """The folder of the base model, or None without one. `fetch` gets it from the Hub if it is not a folder."""
    name = args.model_name_or_path
    if name is None or not (fetch or Path(model_folder(name)).exists()):
        return None
    return _folder_of(name)


def _folder_of(name: str) -> Path:
    folder = Path(model_folder(name))
    return folder if folder.exists() else from_hub(name, "model_name_or_path: ")


def load_base_model(
    name: str,
    model_class: ModelClass | None = None,
    importers: Importers = NO_IMPORTERS,
) -> PretrainedTranslator:
    """Load a model to be fine-tuned, with its tokenizers.

    Args:
        name: a folder, or a name on the Hub. The model is one of this package or of a registered subclass, or one
            that `importers` convert.
        model_class: loaded instead of the class of the folder.
        importers: the functions that convert other models, by model type, such as `interop.importers.IMPORTERS`.
    """
    folder = _folder_of(name)
    check_model_files(folder)
    kind = read_json_object(folder / "config.json").get("model_type")
    known = registered_class(folder) if model_class is None else model_class
    if known is not None and issubclass(known, VanillaTransformerForConditionalGeneration):
        model = load_model(folder, device="cpu", dtype="float32", model_class=model_class)
        return PretrainedTranslator(name, model, load_tokenizers(folder))
    if kind not in importers:
        others = f" and those of transformers' {', '.join(importers)}" if importers else ""
        raise UserError(
            f"model_name_or_path: {name} has model_type={kind!r}; this package's models{others} can be fine-tuned; "
            "`vanilla-transformer convert` reads others"
        )
    foreign = importers[str(kind)](folder)
    if foreign.tokenizer is None:
        raise UserError(f"model_name_or_path: {name} has no tokenizer: add its files to the folder")
    tokenizers = foreign.tokenizer, foreign.target_tokenizer or foreign.tokenizer
    return PretrainedTranslator(name, foreign.model.float(), tokenizers)


def check_fields(
    name: str,
    config: VanillaTransformerConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelArguments,
    data_args: DataArguments,
) -> None:
    """Refuse recipe fields that contradict the base model.

    The regularisation may change. All other fields of the configuration decide the shapes or the meaning of weights.
    """
    # A recipe's `vocab_size` counts no tokens of languages.
    size_in_its_recipe = config.vocab_size - len(recorded_tokens(tokenizer.init_kwargs))
    for field, value in vars(model_args).items():
        if value is None or field in REGULARISATION:
            continue
        if field == "preset":
            raise UserError(f"preset: {value}: fine-tuning keeps the sizes of {name}, {_REMEDY}")
        if field == "vocab_size" and value == size_in_its_recipe:
            continue
        if (kept := getattr(config, field)) != value:
            raise UserError(f"{field}: {value}: fine-tuning keeps {kept} of {name}, {_REMEDY}")
    for field in _TOKENIZER_FIELDS:
        if (value := getattr(data_args, field)) != getattr(DataArguments, field):
            raise UserError(
                f"{field}: {value}: fine-tuning keeps the tokenizer of {name}, {_REMEDY}"
            )


def check_tokens_kept(name: str, tokenizers: Tokenizers, data_args: DataArguments) -> None:
    """Refuse `tokens` that are not those of the base model."""
    sides = {"source_tokens": data_args.source_tokens, "target_tokens": data_args.target_tokens}
    for (field, own), tokenizer in zip(sides.items(), tokenizers, strict=True):
        tokens = own or data_args.tokens
        if tokens not in (tokenizer.init_kwargs.get("tokens"), DataArguments.tokens):
            field = field if own else "tokens"
            raise UserError(
                f"{field}: {tokens}: fine-tuning keeps the tokenizer of {name}, {_REMEDY}"
            )


def prepare_model(
    base: PretrainedTranslator, model_args: ModelArguments, data_args: DataArguments
) -> None:
    """Check the recipe against the base model, and set its dropout and label smoothing."""
    check_fields(base.name, base.model.config, base.tokenizers[0], model_args, data_args)
    check_tokens_kept(base.name, base.tokenizers, data_args)
    if data_args.directions:
        add_languages(base, data_args)
    elif Directions(
        *base.tokenizers, base.model.generation_config.forced_bos_token_id
    ).needs_target:
        raise UserError(
            f"model_name_or_path: {base.name} translates into many languages: give the directions of the text "
            "(--directions en-de)"
        )
    changes = {
        name: getattr(model_args, name)
        for name in REGULARISATION
        if getattr(model_args, name) is not None
    }
    if changes:
        # Modules copy their dropout when they are made.
        config = type(base.model.config)(**{**base.model.config.to_dict(), **changes})
        weights = base.model.state_dict()
        generation_config = base.model.generation_config
        base.model = type(base.model)(config)
        base.model.load_state_dict(weights)
        base.model.generation_config = generation_config


def add_languages(base: PretrainedTranslator, data_args: DataArguments) -> None:
    """Add the languages of the directions that the base model lacks to its tokenizer and embeddings."""
    tokenizer, target_tokenizer = base.tokenizers
    if target_tokenizer is not tokenizer:
        raise UserError(
            f"directions: {base.name} has two tokenizers, and its languages cannot share their tokens"
        )
    related = {
        code: known
        for code, _, known in (item.partition("=") for item in data_args.add_languages or ())
    }
    directions = parse_directions(data_args.directions or [])
    new = extend_languages(
        base.model, tokenizer, directions, related, data_args.language_token == "source"
    )
    if new:
        print_main(f"new languages: {', '.join(new)}")


def resumed_model(
    checkpoint: Path,
    model_args: ModelArguments,
    data_args: DataArguments,
    model_class: ModelClass | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Make a model of the sizes of a checkpoint of a fine-tuning run. The trainer loads its weights."""
    chosen = (
        model_class or registered_class(checkpoint) or VanillaTransformerForConditionalGeneration
    )
    config = chosen.config_class.from_pretrained(checkpoint)
    check_fields(str(checkpoint), config, load_tokenizers(checkpoint)[0], model_args, data_args)
    for name in REGULARISATION:
        if (value := getattr(model_args, name)) is not None:
            setattr(config, name, value)
    model = chosen(config)
    model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model


def describe_defaults(args: RunArguments) -> str:
    """One line about the optimizer settings. The defaults differ from those for fresh weights."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    rate = f"learning_rate {args.learning_rate:.3g}"
    name = "max_tokens_per_batch" if args.max_tokens_per_batch else "per_device_train_batch_size"
    chosen = f"{rate}, lr_scheduler_type {schedule}, warmup_steps {args.warmup_steps:g}, {name} {getattr(args, name)}"
    return f"fine-tuning {args.model_name_or_path}: {chosen} (fresh weights have the schedule of section 5.3)"


def score_before(trainer: VanillaTransformerTrainer, run: Run) -> dict[str, object]:
    """Score the base model as `before_test_bleu` and `before_eval_bleu`. A resumed run takes its first scores."""
    args = run.args
    checkpoint = run.checkpoint
    scores: dict[str, object] = {}
    if checkpoint is not None:
        scores = _kept_scores(checkpoint, trainer)
    else:
        # Without adapters.
        model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
        if trainer.eval_dataset is not None:
            print_main("before fine-tuning, validation:")
            # Not `evaluate`: its log and samples belong to an update.
            scores |= trainer.predict(trainer.eval_dataset, metric_key_prefix="before_eval").metrics
        saved = copy.deepcopy(model.generation_config)
        set_decoding(model.generation_config, args)
        for split in SCORED:
            if split in run.encoded:
                print_main(f"before fine-tuning, {split}:")
                pairs = run.corpus.pairs[split]
                options = score_options(run.data_args, run.tokenizers[1])
                results = score_test_split(
                    trainer, run.encoded[split], pairs, split, options, run.groups(split)
                )
                scores |= {f"before_{name}": value for name, value in results.items()}
        model.generation_config = saved
    if scores and is_main_rank():
        with atomic_file(Path(args.output_dir) / SCORES_BEFORE) as temporary:
            temporary.write_text(
                json.dumps(scores, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
    return scores


def _kept_scores(checkpoint: Path, trainer: VanillaTransformerTrainer) -> dict[str, object]:
    """The base model's scores from the start of a run that is resumed, on the splits that are the same as then."""
    file = checkpoint.parent / SCORES_BEFORE
    scores = read_json_object(file) if file.is_file() else {}
    then = read_run_state(checkpoint).settings
    for prefix, split in SPLITS.items():
        name = split_fact(split)
        if name in then and then[name] != trainer.other_facts[name]:
            prefix = f"before_{prefix}_"
            scores = {
                score: value for score, value in scores.items() if not score.startswith(prefix)
            }
            print_main(
                f"{split}: not the split that the base model was scored on, so there is no score before"
            )
    return scores
