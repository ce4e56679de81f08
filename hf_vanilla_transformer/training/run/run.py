"""A training run from arguments to a model folder: load data, train, select weights, save, test."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset
from datasets import config as datasets_config
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    TrainerCallback,
    set_seed,
)

from ...batches.batching import pair_lengths
from ...batches.corpus_tokenizers import Tokenizers
from ...configuration_vanilla_transformer import VanillaTransformerConfig
from ...corpora.corpus import PairWarnings
from ...evaluation.metrics import make_metrics, score_names
from ...evaluation.trainer_metrics import ComputeMetrics, translation_metrics
from ...hub.publishing import destination, publish_run
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...utils.atomic_write import report_full_disk
from ...utils.errors import Interrupted, UserError
from ...utils.normalization import check_normalizer
from ...utils.system_info import counted
from ..state.callbacks import FitThreads, ReleaseFreeMemory, StopWithCheckpoint
from ..state.checkpoints import find_checkpoint, one_run_at_a_time, report_failed_save, resume_hint
from ..state.distributed import (
    StopSignals,
    check_equal_versions,
    end_workers,
    errors_on_main_rank_only,
    print_main,
    silence_other_ranks,
)
from ..state.fingerprint import REMEDY, Facts
from ..trainer.evaluation_budget import EvaluationBudget
from ..trainer.trainer import VanillaTransformerTrainer
from . import finishing
from .adapters import add_lora, merge_lora
from .argument_checks import (
    check_compilation,
    check_optimizer,
    check_selection,
    check_size,
    refused_as_one_line,
)
from .arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
    model_config,
    score_options,
    set_decoding,
)
from .facts import data_facts, facts_of_seeds, fixed_facts, other_facts
from .fine_tuning import (
    NO_IMPORTERS,
    Importers,
    ModelClass,
    describe_defaults,
    resumed_model,
    score_before,
)
from .planning import PlanUpdates, check_schedule
from .precision import resolve_precision
from .report import duration, show_progress
from .run_data import load_base, load_data
from .run_state import Run

_CHECKED_REFERENCES = 100  # that a normaliser must not refuse as a whole


def run_training(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
    pair_warnings: PairWarnings | None = None,
    importers: Importers = NO_IMPORTERS,
    check_facts: Callable[[Facts], None] | None = None,
) -> dict[str, object]:
    """Train a translation model and write a model folder to `args.output_dir`.

    Args:
        model_args, data_args, args: from a recipe and flags (`parse_recipe`).
        pair_warnings: returns warnings about the training pairs (`load_corpus`).
        importers: convert models of other classes that fine-tuning starts from (`load_base_model`).
        check_facts: gets the `facts_of_seeds` before training, and may refuse them.

    Returns:
        The results, as in `all_results.json`.

    Raises:
        UserError: a mistake that the user can correct.
        Interrupted: Ctrl-C or SIGTERM. A checkpoint is saved, unless nothing was trained yet.
    """
    if args.seeds:
        raise UserError("seeds: this is one run: leave it out and set seed, or call run_seeds")
    folder = Path(args.output_dir)
    silence_other_ranks()
    signals = StopSignals()
    with one_run_at_a_time(folder):
        with errors_on_main_rank_only():
            check_equal_versions()
            checkpoint = find_checkpoint(folder, str(args.resume_from_checkpoint or "false"))
            set_seed(args.seed)
            with report_full_disk(datasets_config.HF_DATASETS_CACHE):
                run = load_run(model_args, data_args, args, checkpoint, pair_warnings, importers)
            args = run.args
            print_main(f"model: {run.model.num_parameters():,} parameters")
            published = destination(args)
            resolve_arguments(run.model, args, checkpoint)
            check_positions(run)
            _check_search(run)
            _record_length(run)
            _fit_search(run)
            trainer, stop = make_trainer(run, signals)
            if check_facts is not None:
                check_facts(facts_of_seeds(run))
            show_progress(trainer, run.corpus.pairs.get("validation"), run.tokenizers[1])
        before: dict[str, object] = {}
        if args.model_name_or_path is not None:
            print_main(describe_defaults(args))
            with errors_on_main_rank_only():
                before = score_before(trainer, run)
        with signals:
            with errors_on_main_rank_only():
                results = before | train(trainer, stop, folder, checkpoint)
            if args.lora_r:
                merge_lora(trainer, folder)
            with errors_on_main_rank_only():
                results = finishing.score_and_save(trainer, stop, run, results)
                finishing.write_card(trainer, run, results)
        if published is not None:
            print_main(f"published: {publish_run(folder, published)}")
    return results


def load_run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
    checkpoint: Path | None,
    pair_warnings: PairWarnings | None = None,
    importers: Importers = NO_IMPORTERS,
) -> Run:
    """Load the data and the model: a new one, the one at `model_name_or_path`, or one for the checkpoint."""
    base, model_class, facts = load_base(args, checkpoint, importers)
    if args.model_name_or_path is None:
        choices = [choice.arguments[0] for choice in args.choices.values()]
        for sizes in choices or [model_args]:
            _configuration(sizes, model_class)
    data = load_data((model_args, data_args, args), checkpoint, base, pair_warnings)
    model_args, data_args, args = data.model_args, data.data_args, data.args
    if base is not None:
        model = base.model
    elif args.model_name_or_path is not None and checkpoint is not None:
        model = resumed_model(checkpoint, model_args, data_args, model_class)
    else:
        model = fresh_model(model_args, data.tokenizers, checkpoint, model_class)
    if args.lora_r:
        model = add_lora(model, args)
    return Run(
        model_args=model_args,
        data_args=data_args,
        args=args,
        checkpoint=checkpoint,
        corpus=data.corpus,
        tokenizers=data.tokenizers,
        encoded=data.encoded,
        encoding=data.encoding,
        model=model,
        facts=facts | data.chosen,
    )


def check_positions(run: Run) -> None:
    """Refuse sentences that learned positions cannot represent. Sinusoids have no end."""
    config = run.model.config
    data_args = run.data_args
    encoded = run.encoded
    limit = config.max_position_embeddings
    if config.position_encoding_type != "learned":
        return
    remedy = f"the learned positions end at max_position_embeddings={limit}"
    for name in ("max_source_length", "max_target_length"):
        value = getattr(data_args, name)
        if value is None or value > limit:
            raise UserError(
                f"{name}: {value}: {remedy}; set it to at most {limit}, or more positions"
            )
    for split, data in encoded.items():
        if split == "train":
            continue
        longest = np.maximum(*pair_lengths(data))
        lines = [data[int(row)]["line"] for row in np.flatnonzero(longest > limit)[:5]]
        if lines:
            raise UserError(
                f"{split} data: the lines {', '.join(map(str, lines))} have up to {longest.max()} tokens: {remedy}; "
                f"max_eval_length={limit} leaves them out"
            )


def _check_search(run: Run) -> None:
    """Refuse settings of a search that transformers would refuse to save after the training."""
    search = copy.deepcopy(run.model.generation_config)
    set_decoding(search, run.args)
    folder = Path(run.args.model_name_or_path or run.args.output_dir)
    with refused_as_one_line(f"{folder / 'generation_config.json'}"):
        search.validate(strict=True)


def _record_length(run: Run) -> None:
    """Record the longest source that the model was trained on, for translation. An unknown base model stays one."""
    config = run.model.config
    length = run.encoding["train"].longest_source or run.data_args.max_source_length
    trained = getattr(config, "trained_source_length", None)
    if length and (trained or not run.args.model_name_or_path):
        config.trained_source_length = max(length, trained or 0)


def _fit_search(run: Run) -> None:
    """Let searches end no sooner than the training targets do. One target of a hundred may be noise."""
    search = run.model.generation_config
    limit = getattr(search, "max_length_over_source", None)
    report = run.encoding["train"]
    if limit is None or report.usual_over_source is None or report.usual_over_source <= limit:
        return
    search.max_length_over_source = report.most_over_source
    print_main(
        f"max_length_over_source: {report.most_over_source}, not {limit}, because more than one training target of a "
        f"hundred is longer than its source by over {limit} tokens"
    )


# 1. Model and trainer


def fresh_model(
    model_args: ModelArguments,
    tokenizers: Tokenizers,
    checkpoint: Path | None = None,
    model_class: ModelClass | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Make a model for these vocabularies. Its configuration must equal the checkpoint's, if a run is resumed."""
    source, target = tokenizers
    start = target.bos_token_id if target.bos_token_id is not None else target.pad_token_id
    chosen: dict[str, object] = {"vocab_size": len(source), "decoder_start_token_id": start}
    if target is not source:
        if model_args.share_encoder_decoder_embeddings:
            raise UserError(
                "share_encoder_decoder_embeddings: True: source and target have separate vocabularies: leave it out"
            )
        chosen |= {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": False}
        chosen |= {
            f"decoder_{name}": getattr(target, name) for name in ("pad_token_id", "eos_token_id")
        }
    for token in ("bos", "pad", "eos", "unk"):
        chosen[f"{token}_token_id"] = getattr(source, f"{token}_token_id")
    config = _configuration(model_args, model_class, **chosen)
    check_size(config)
    if checkpoint is not None:
        old = type(config).from_pretrained(checkpoint)
        for name in VanillaTransformerConfig.__annotations__:
            if name != "use_cache" and getattr(old, name) != getattr(config, name):
                # The trainer turns it off.
                trained_with = f"but {checkpoint} was trained with {getattr(old, name)}"
                raise UserError(f"{name}: {getattr(config, name)}, {trained_with}: {REMEDY}")
    return (model_class or VanillaTransformerForConditionalGeneration)(config)


def _configuration(
    model_args: ModelArguments, model_class: ModelClass | None, **chosen: object
) -> VanillaTransformerConfig:
    """The model's sizes and rates, or a UserError about those that cannot be."""
    config_class = VanillaTransformerConfig if model_class is None else model_class.config_class
    try:
        return model_config(model_args, config_class, **chosen)
    except ValueError as error:
        raise UserError(str(error)) from None


def resolve_arguments(
    model: VanillaTransformerForConditionalGeneration,
    args: RunArguments,
    checkpoint: Path | None = None,
) -> None:
    """Set the arguments that depend on the model and the machine: peak learning rate and precision."""
    if args.learning_rate is None:
        # The peak of Eq. 3, for fine-tuning its value after 200,000 updates.
        updates = max(args.warmup_steps, 1) if args.model_name_or_path is None else 200_000
        if args.model_name_or_path is None and 0 < args.warmup_steps < 1:
            raise UserError(
                f"warmup_steps={args.warmup_steps} is a share of the run: give steps, or a learning_rate"
            )
        args.learning_rate = model.config.d_model**-0.5 * updates**-0.5
    resolve_precision(model, args, checkpoint)


def check_arguments(args: RunArguments) -> None:
    """Refuse arguments that would fail in the middle of training."""
    if args.early_stopping_patience is not None and args.eval_strategy == "no":
        raise UserError("early_stopping_patience needs eval_strategy: steps or epoch")
    if args.average_last > 1 and args.save_strategy == "no":
        raise UserError(
            f"average_last={args.average_last} needs checkpoints: set save_strategy to steps or epoch"
        )
    limit = args.save_total_limit
    if limit is not None and limit < args.average_last > 1:
        # The best one counts, too.
        enough = args.average_last + bool(args.load_best_model_at_end)
        raise UserError(
            f"save_total_limit={limit} keeps too few checkpoints for average_last={args.average_last}: set it to "
            f"{enough}, or lower average_last"
        )


def make_trainer(
    run: Run, signals: StopSignals
) -> tuple[VanillaTransformerTrainer, StopWithCheckpoint]:
    """Make the trainer and its time limit."""
    args = run.args
    encoded = run.encoded
    tokenizers = run.tokenizers
    check_arguments(args)
    check_optimizer(args)
    check_compilation(args)
    check_schedule(args)
    stop = StopWithCheckpoint(args.max_minutes, signals)
    callbacks: list[TrainerCallback] = [ReleaseFreeMemory(), FitThreads()]
    if args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    callbacks.append(stop)  # last: it saves a run that a callback before it ends
    # Before the facts are recorded: it may choose the score that selects weights.
    compute_metrics = _validation_metrics(run)
    with refused_as_one_line("training arguments"):
        trainer = VanillaTransformerTrainer(
            model=run.model,
            args=args,
            train_dataset=encoded["train"],
            eval_dataset=encoded.get("validation"),
            data_collator=DataCollatorForSeq2Seq(tokenizers[0], model=run.model),
            processing_class=tokenizers[0],
            target_tokenizer=tokenizers[1],
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            data_facts=data_facts(run),
            fixed_facts=fixed_facts(run),
            other_facts=other_facts(run),
        )
    has_limit = args.max_minutes is not None and args.eval_strategy != "no"
    if has_limit and isinstance(trainer.eval_dataset, Dataset):
        trainer.budget = EvaluationBudget(stop)
        trainer.add_callback(trainer.budget)
    if PlanUpdates.is_needed(args):
        trainer.add_callback(PlanUpdates(trainer, stop))
    if args.average_last > 1 and trainer.is_fsdp_enabled:
        kind = trainer.accelerator.state.fsdp_plugin.state_dict_type
        if "FULL" not in str(kind):
            raise UserError(
                f"average_last={args.average_last} needs FULL_STATE_DICT checkpoints, not {kind}"
            )
    return trainer, stop


def _validation_metrics(run: Run) -> ComputeMetrics:
    """The `compute_metrics` of evaluations. Choose the score that selects the weights, if it is a default."""
    args = run.args
    options = score_options(run.data_args, run.tokenizers[1])
    metrics = make_metrics(
        options["metrics"], options["tokenize"], options["lowercase"], options["split"]
    )
    names = score_names(metrics) + (["invalid"] if options["normalize"] else [])
    check_selection(args, names, several=bool(run.data_args.directions))
    if args.metric_for_best_model not in (None, "bleu"):
        better = "highest" if args.greater_is_better else "lowest"
        print_main(f"the weights with the {better} {args.metric_for_best_model} are kept")
    validation = run.corpus.pairs.get("validation")
    if validation is not None:
        check_normalizer(validation["target"][:_CHECKED_REFERENCES], options["normalize"])
    return translation_metrics(
        run.tokenizers[1],
        groups=run.groups("validation"),
        metrics=metrics,
        lowercase=options["lowercase"],
        sources=None if validation is None else validation["source"],
        normalize=options["normalize"],
    )


# 2. Training


def train(
    trainer: VanillaTransformerTrainer, stop: StopWithCheckpoint, run: Path, checkpoint: Path | None
) -> dict[str, object]:
    """Train. The last complete checkpoint can be resumed from, however training ends."""
    try:
        with report_failed_save(run, "training stopped"):
            outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Interrupted:  # in an evaluation before the first update
        pass
    finally:
        stop.on_train_end()  # `Trainer` omits it after an error
        end_workers()
    seconds = stop.seconds()
    step = trainer.state.global_step
    stop.signals.agree(trainer.args.device)
    if stop.interrupted:
        raise Interrupted(
            f"interrupted at step {step}; {resume_hint(run)}",
            stop.signals.received or signal.SIGINT,
        )
    if not trainer.has_nothing_left:
        print_main(f"trained {counted(step, 'update')} in {duration(seconds)}")
    # After a resume they cover only the part since then.
    metrics = outcome.metrics if checkpoint is None else {}
    return metrics | {"train_updates": step, "train_seconds": seconds, "epoch": trainer.state.epoch}
