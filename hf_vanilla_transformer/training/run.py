"""A training run from arguments to a model folder: load data, train, select weights, save, test."""

import signal
from pathlib import Path
from typing import Any

import torch
from datasets import config as datasets_config
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, set_seed

from ..atomic_write import report_full_disk
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import Interrupted, UserError
from ..evaluation.metrics import translation_metrics
from ..hub.finished_run import destination, publish_run
from ..inference.languages import name_languages
from ..inference.loading import import_class, trust_code
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from . import finishing
from .argument_checks import check_optimizer, check_schedule, check_size, refused_as_one_line
from .arguments import DataArguments, RunArguments, bleu_options, model_config
from .callbacks import FitThreads, ReleaseFreeMemory, StopWithCheckpoint
from .checkpoints import report_failed_save, resume_hint
from .corpus import (
    Corpus,
    Tokenizers,
    check_positions,
    choose_tokenizers,
    data_facts,
    encode_corpus,
    load_corpus,
    match_case,
    run_languages,
    tokenizer_facts,
)
from .distributed import broadcast_from_main, errors_on_main_rank_only, print_main, silence_other_ranks
from .fine_tuning import describe_defaults, load_base_model, prepare_model, resumed_model, score_before
from .precision import resolve_precision
from .report import duration, show_progress
from .run_folder import find_checkpoint, one_run_at_a_time
from .signals import StopSignals
from .trainer import VanillaTransformerTrainer


def run_training(model_args: Any, data_args: DataArguments, args: RunArguments, command: str = "") -> dict[str, Any]:
    """Train a translation model and write a model folder to `args.output_dir`.

    Args:
        model_args, data_args, args: from a recipe and flags (`parse_recipe`).
        command: the command line, for the model card.

    Returns:
        The results, as in `all_results.json`.

    Raises:
        UserError: a mistake that the user can correct.
        Interrupted: Ctrl-C or SIGTERM. A checkpoint is saved, unless nothing was trained yet.
    """
    run = Path(args.output_dir)
    silence_other_ranks()
    signals = StopSignals()
    with one_run_at_a_time(run):
        with errors_on_main_rank_only():
            checkpoint = find_checkpoint(run, str(args.resume_from_checkpoint or "false"))
            set_seed(args.seed)
            with report_full_disk(datasets_config.HF_DATASETS_CACHE):
                corpus, tokenizers, encoded, encoding, model = load_data_and_model(
                    model_args, data_args, args, checkpoint
                )
            print_main(f"model: {model.num_parameters():,} parameters")
            published = destination(args)
            resolve_arguments(model, args, checkpoint)
            check_positions(model.config, encoded, tokenizers, data_args)
            _record_length(model.config, encoding["train"].longest_source or data_args.max_source_length, args)
            fixed = {"fine-tuning": args.model_name_or_path is not None}
            facts = {
                "data_facts": data_facts(corpus, data_args, args),
                "fixed_facts": fixed | tokenizer_facts(tokenizers, model_args, data_args),
            }
            trainer, stop = make_trainer(model, tokenizers, encoded, data_args, args, facts, signals)
            show_progress(trainer, stop, corpus.pairs.get("validation"), tokenizers[1])
        before: dict[str, Any] = {}
        if args.model_name_or_path is not None:
            print_main(describe_defaults(args))
            with errors_on_main_rank_only():
                before = score_before(trainer, corpus, encoded, data_args, args, checkpoint)
        with signals:
            results = before | train(trainer, stop, run, checkpoint)
            if data_args.streaming:
                last_pass = f"{corpus.reports['train'].summary()}; {encoding['train'].summary()}"
                print_main(f"train (streamed, last pass): {last_pass}")
                for warning in corpus.overlap.warnings() if corpus.overlap else ():
                    print_main(warning)
            with errors_on_main_rank_only():
                results = finishing.score_and_save(trainer, stop, tokenizers, corpus, encoded, data_args, results)
                finishing.write_card(trainer, tokenizers, corpus, results, model_args, data_args, args, command)
        if published is not None:
            print_main(f"published: {publish_run(run, published)}")
    return results


def load_data_and_model(
    model_args: Any, data_args: DataArguments, args: RunArguments, checkpoint: Path | None
) -> tuple[Corpus, Tokenizers, dict[str, Any], dict[str, Any], VanillaTransformerForConditionalGeneration]:
    """Load the corpus, the tokenizers, the encoded splits, their reports, and the model: a new one, the base model of
    `model_name_or_path`, or one for the checkpoint to resume from."""
    fine_tuned = args.model_name_or_path is not None
    model_class: Any = None if args.model_class is None else import_class(args.model_class)
    for folder in (args.model_name_or_path, *(args.teacher or ())) if args.trust_remote_code else ():
        if folder and Path(folder).is_dir():
            trust_code(Path(folder))
    base = load_base_model(str(args.model_name_or_path), model_class) if fine_tuned and checkpoint is None else None
    if base is not None:
        prepare_model(base, model_args, data_args)
    with args.main_process_first(desc="reading"):  # the other ranks read the cache
        corpus = load_corpus(data_args, args)
    if base is not None:
        tokenizers = base.tokenizers
    else:
        tokenizers = broadcast_from_main(lambda: choose_tokenizers(corpus, model_args, data_args, checkpoint))
    match_case(tokenizers, data_args)
    name_languages(tokenizers, run_languages(data_args, args))
    with args.main_process_first(desc="encoding"):
        encoded, encoding = encode_corpus(corpus, tokenizers, data_args, args.seed)
    if base is not None:
        model = base.model
    elif fine_tuned and checkpoint is not None:
        model = resumed_model(checkpoint, model_args, data_args, model_class)
    else:
        model_class = model_class or VanillaTransformerForConditionalGeneration
        model = build_model(model_args, tokenizers, checkpoint, model_class)
    return corpus, tokenizers, encoded, encoding, model


def _record_length(config: Any, length: int | None, args: RunArguments) -> None:
    """Record the longest source that the model was trained on, for translation. An unknown base model stays one."""
    trained = getattr(config, "trained_source_length", None)
    if length and (trained or not args.model_name_or_path):
        config.trained_source_length = max(length, trained or 0)


# 1. Model and trainer


def build_model(
    model_args: Any,
    tokenizers: Tokenizers,
    checkpoint: Path | None = None,
    model_class: type[VanillaTransformerForConditionalGeneration] = VanillaTransformerForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """Make a model for these vocabularies. Its configuration must equal the checkpoint's, if a run is resumed."""
    source, target = tokenizers
    start = target.bos_token_id if target.bos_token_id is not None else target.pad_token_id
    chosen: dict[str, Any] = {"vocab_size": len(source), "decoder_start_token_id": start}
    if target is not source:
        chosen |= {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": False}
        chosen |= {f"decoder_{name}": getattr(target, name) for name in ("pad_token_id", "eos_token_id")}
    for token in ("bos", "pad", "eos", "unk"):
        chosen[f"{token}_token_id"] = getattr(source, f"{token}_token_id")
    try:
        config = model_config(model_args, model_class.config_class, **chosen)
    except ValueError as error:
        raise UserError(str(error)) from None
    check_size(config)
    if checkpoint is not None:
        old = model_class.config_class.from_pretrained(checkpoint)
        for name in VanillaTransformerConfig.__annotations__:
            if name != "use_cache" and getattr(old, name) != getattr(config, name):  # the trainer turns it off
                raise UserError(f"{checkpoint} has {name}={getattr(old, name)}, not {getattr(config, name)}")
    return model_class(config)


def resolve_arguments(
    model: VanillaTransformerForConditionalGeneration, args: RunArguments, checkpoint: Path | None = None
) -> None:
    """Set the arguments that depend on the model and the machine: peak learning rate and precision."""
    if args.learning_rate is None and args.model_name_or_path is not None:
        # The end of the schedule of §5.3: its value after 200,000 updates, 1e-4 at the base size.
        args.learning_rate = model.config.d_model**-0.5 * 200_000**-0.5
    if args.learning_rate is None:  # the peak of Eq. 3
        if 0 < args.warmup_steps < 1:
            raise UserError(f"warmup_steps={args.warmup_steps} is a share of the run: give steps, or a learning_rate")
        args.learning_rate = model.config.d_model**-0.5 * max(args.warmup_steps, 1) ** -0.5
    resolve_precision(model, args, checkpoint)


def check_arguments(encoded: dict[str, Any], args: RunArguments) -> None:
    """Refuse arguments that would fail in the middle of training."""
    if isinstance(encoded["train"], torch.utils.data.IterableDataset):
        if args.max_steps <= 0:
            raise UserError("streaming=True needs max_steps, because the length of a stream is unknown")
        if args.dataloader_num_workers:
            raise UserError("streaming=True counts dropped pairs in the main process: set dataloader_num_workers to 0")
    if args.eval_strategy != "no" and "validation" not in encoded:
        raise UserError(f"eval_strategy={args.eval_strategy.value} needs validation data: give some, or set it to no")
    if args.early_stopping_patience is not None and args.eval_strategy == "no":
        raise UserError("early_stopping_patience needs eval_strategy: steps or epoch")
    if args.average_last > 1 and args.save_strategy == "no":
        raise UserError(f"average_last={args.average_last} needs checkpoints: set save_strategy to steps or epoch")


def make_trainer(
    model: VanillaTransformerForConditionalGeneration,
    tokenizers: Tokenizers,
    encoded: dict[str, Any],
    data_args: DataArguments,
    args: RunArguments,
    facts: dict[str, Any],
    signals: StopSignals,
) -> tuple[VanillaTransformerTrainer, StopWithCheckpoint]:
    """Make the trainer and its time limit, with the `facts` of `ResumableTrainer`."""
    check_arguments(encoded, args)
    check_optimizer(args)
    check_schedule(args)
    stop = StopWithCheckpoint(args.max_minutes, signals)
    callbacks: list[Any] = [ReleaseFreeMemory(), FitThreads()]
    if args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    callbacks.append(stop)  # last: it saves a run that a callback before it ends
    with refused_as_one_line("training arguments"):
        trainer = VanillaTransformerTrainer(
            model=model,
            args=args,
            train_dataset=encoded["train"],
            eval_dataset=encoded.get("validation"),
            data_collator=DataCollatorForSeq2Seq(tokenizers[0], model=model),
            processing_class=tokenizers[0],
            target_tokenizer=tokenizers[1],
            compute_metrics=translation_metrics(tokenizers[1], **bleu_options(data_args)),
            callbacks=callbacks,
            **facts,
        )
    if args.average_last > 1 and trainer.is_fsdp_enabled:
        kind = trainer.accelerator.state.fsdp_plugin.state_dict_type
        if "FULL" not in str(kind):
            raise UserError(f"average_last={args.average_last} needs FULL_STATE_DICT checkpoints, not {kind}")
    return trainer, stop


# 2. Training


def train(
    trainer: VanillaTransformerTrainer, stop: StopWithCheckpoint, run: Path, checkpoint: Path | None
) -> dict[str, Any]:
    """Train. The last complete checkpoint can be resumed from, however training ends."""
    try:
        with report_failed_save(run, "training stopped"):
            outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Interrupted:  # in an evaluation before the first update
        pass
    finally:
        stop.on_train_end()  # `Trainer` omits it after an error
    seconds, step = stop.seconds(), trainer.state.global_step
    if stop.interrupted:
        with errors_on_main_rank_only():
            raise Interrupted(
                f"interrupted at step {step}; {resume_hint(run)}", stop.signals.received or signal.SIGINT
            )
    print_main(f"trained {step:,} updates in {duration(seconds)}")
    metrics = outcome.metrics if checkpoint is None else {}  # after a resume they cover only the part since then
    return metrics | {"train_updates": step, "train_seconds": seconds, "epoch": trainer.state.epoch}
