"""A training run from arguments to a model folder: load, train, choose, test, save."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, set_seed

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data import save_tokenizers
from ..errors import Interrupted, UserError
from ..evaluation.metrics import translation_metrics
from ..hub.finished_run import destination, publish_run
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import DataArguments, RunArguments
from .callbacks import StopWithCheckpoint
from .checkpoints import (
    INDEX,
    STATE,
    WEIGHTS,
    disk_may_fill,
    how_to_resume,
    remove_broken_checkpoints,
    whole_checkpoints,
)
from .corpus import Tokenizers, choose_tokenizers, encode_corpus, load_corpus
from .finishing import choose_weights, draw_attention, save, set_decoding, test, write_card_and_curve
from .precision import bf16_is_faster
from .processes import from_first, hush_others, is_first, one_voice, say
from .trainer import VanillaTransformerTrainer


def run_training(model_args: Any, data_args: DataArguments, args: RunArguments, command: str = "") -> dict[str, Any]:
    """Train a translator and leave a model folder in `args.output_dir`.

    Args:
        model_args, data_args, args: what a recipe and flags say (`parse_recipe`).
        command: how the run was called, for the model card.

    Returns:
        All results, as they stand in `all_results.json`.

    Raises:
        UserError: anything that the user can mend.
        Interrupted: Ctrl-C; a checkpoint is saved.
    """
    run = Path(args.output_dir)
    hush_others()
    with one_voice():
        checkpoint = find_checkpoint(run, args)
        set_seed(args.seed)
        with args.main_process_first(desc="reading"):  # the others find it in the cache
            corpus = load_corpus(data_args, args)
        tokenizers = from_first(lambda: choose_tokenizers(corpus, model_args, data_args, checkpoint))
        with args.main_process_first(desc="encoding"):
            encoded, encoding = encode_corpus(corpus, tokenizers, data_args, args.seed)
        model = build_model(model_args, tokenizers, checkpoint)
        say(f"model: {model.num_parameters():,} parameters")
        published = destination(args)
        settle_arguments(model, args)
        trainer, stop = make_trainer(model, tokenizers, encoded, data_args, args, checkpoint)
    if checkpoint is None and is_first():
        start_folder(run, tokenizers)
    wait_for_everyone()
    results = train(trainer, stop, run, checkpoint)
    if data_args.streaming:
        say(f"train (streamed, last pass): {corpus.reports['train'].summary()}; {encoding['train'].summary()}")
    with one_voice():
        results |= choose_weights(trainer, run, args)
        set_decoding(trainer.model, args)
        if "test" in encoded:
            results |= test(trainer, tokenizers[1], corpus, encoded["test"], data_args)
        save(trainer, tokenizers, run, results)
        if is_first():
            if not trainer.is_fsdp_enabled:  # the model is with all processes, and the others are not asked
                draw_attention(model, tokenizers, corpus, run)
            write_card_and_curve(trainer, corpus, results, model_args, data_args, args, command)
            if published is not None:
                say(f"published: {publish_run(run, published)}")
    return results


# 1. Where the run lives


def find_checkpoint(run: Path, args: RunArguments) -> Path | None:
    """What to resume from. Looks and complains, but changes nothing.

    Returns:
        A whole checkpoint, or None for a new run.

    Raises:
        UserError: the folder already holds a run or something else, or has nothing to resume from.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"output_dir {run} is a file; name a folder")
    resume = str(args.resume_from_checkpoint or "false")
    if resume.lower() == "true":
        checkpoints = whole_checkpoints(run)
        if not checkpoints:
            raise UserError(f"output_dir {run} has no whole checkpoint to resume from; start without it")
        say(f"resuming from {checkpoints[-1]}")
        return checkpoints[-1]
    if resume.lower() != "false":
        if Path(resume) not in whole_checkpoints(Path(resume).parent):
            raise UserError(f"resume_from_checkpoint {resume} is no whole checkpoint; `true` takes the run's last")
        return Path(resume)
    if holds_run(run) and not args.overwrite_output_dir:
        raise UserError(
            f"output_dir {run} already has a run: go on with it (--resume_from_checkpoint true), "
            f"replace it (--overwrite_output_dir true) or choose another folder"
        )
    if (run / ".git").exists() or run.resolve() in (Path.home(), Path.cwd(), *Path.cwd().parents):
        raise UserError(f"output_dir {run} is no folder for a run; name one of its own")
    return None


def holds_run(run: Path) -> bool:
    """Whether the folder has weights or checkpoints."""
    return (run / WEIGHTS).exists() or (run / INDEX).exists() or any(run.glob("checkpoint-*"))


def start_folder(run: Path, tokenizers: Tokenizers) -> None:
    """Begin a new run: an old one, which the user said to replace, goes only now that nothing can be wrong."""
    if holds_run(run):
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    save_tokenizers(run, *tokenizers)


# 2. Model and trainer


def build_model(
    model_args: Any, tokenizers: Tokenizers, checkpoint: Path | None = None
) -> VanillaTransformerForConditionalGeneration:
    """A fresh model for these vocabularies, of the same shape as the one in the checkpoint to resume from."""
    chosen = {name: value for name, value in vars(model_args).items() if value is not None}
    preset = chosen.pop("preset", None)
    source, target = tokenizers
    chosen["vocab_size"] = len(source)
    if target is not source:
        chosen["decoder_vocab_size"] = len(target)
        chosen["share_encoder_decoder_embeddings"] = False
    for token in ("bos", "pad", "eos", "unk"):
        chosen[f"{token}_token_id"] = getattr(target, f"{token}_token_id")
    start = target.bos_token_id if target.bos_token_id is not None else target.pad_token_id
    chosen["decoder_start_token_id"] = start
    try:
        config = (
            VanillaTransformerConfig.from_preset(preset, **chosen) if preset else VanillaTransformerConfig(**chosen)
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    if checkpoint is not None:
        old = VanillaTransformerConfig.from_pretrained(checkpoint)
        for name in VanillaTransformerConfig.__annotations__:
            if name != "use_cache" and getattr(old, name) != getattr(config, name):  # off while training
                raise UserError(f"{checkpoint} has {name}={getattr(old, name)}, not {getattr(config, name)}")
    return VanillaTransformerForConditionalGeneration(config)


def settle_arguments(model: VanillaTransformerForConditionalGeneration, args: RunArguments) -> None:
    """Fill in what depends on the model and the machine: the peak learning rate and the precision."""
    if args.learning_rate is None:  # Eq. 3 at its peak
        if 0 < args.warmup_steps < 1:
            raise UserError(f"warmup_steps={args.warmup_steps} is a share of the run; give steps, or a learning_rate")
        args.learning_rate = model.config.d_model**-0.5 * max(args.warmup_steps, 1) ** -0.5
    if not args.auto_bf16 or args.bf16 or args.fp16:
        return
    if from_first(lambda: bf16_is_faster(model.to(args.device))):
        args.bf16, args.mixed_precision = True, "bf16"
        say("bf16: measured to be faster here")


def refuse_what_cannot_be(encoded: dict[str, Any], args: RunArguments) -> None:
    """Say in one line, before any training, what the trainer would meet in its middle."""
    if isinstance(encoded["train"], torch.utils.data.IterableDataset):
        if args.max_steps <= 0:
            raise UserError("streaming=True needs max_steps: nobody knows how long a stream is")
        if args.dataloader_num_workers:
            raise UserError("streaming=True counts what it drops in this process: set dataloader_num_workers to 0")
    if args.eval_strategy != "no" and "validation" not in encoded:
        raise UserError(f"eval_strategy={args.eval_strategy.value} needs validation data; give some, or `no`")
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
    checkpoint: Path | None,
) -> tuple[VanillaTransformerTrainer, StopWithCheckpoint]:
    """The trainer, with scores from real translations."""
    refuse_what_cannot_be(encoded, args)
    stop = StopWithCheckpoint(args.max_minutes)
    if checkpoint is not None:
        kept = json.loads((checkpoint / STATE).read_text(encoding="utf-8")).get("stateful_callbacks", {})
        stop.spent = kept.get("StopWithCheckpoint", {}).get("attributes", {}).get("spent", 0.0)
    callbacks: list[Any] = [stop]
    if args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    trainer = VanillaTransformerTrainer(
        model=model,
        args=args,
        train_dataset=encoded["train"],
        eval_dataset=encoded.get("validation"),
        data_collator=DataCollatorForSeq2Seq(tokenizers[0], model=model),
        processing_class=tokenizers[0],
        target_tokenizer=tokenizers[1],
        compute_metrics=translation_metrics(
            tokenizers[1], tokenize=data_args.bleu_tokenize, lowercase=data_args.bleu_lowercase
        ),
        callbacks=callbacks,
    )
    if args.average_last > 1 and trainer.is_fsdp_enabled:
        kind = trainer.accelerator.state.fsdp_plugin.state_dict_type
        if "FULL" not in str(kind):
            raise UserError(
                f"average_last={args.average_last} needs whole checkpoints: use FULL_STATE_DICT, not {kind}"
            )
    return trainer, stop


# 3. Training


def train(
    trainer: VanillaTransformerTrainer, stop: StopWithCheckpoint, run: Path, checkpoint: Path | None
) -> dict[str, Any]:
    """Train; whatever ends it, the last whole checkpoint stays and can be resumed from."""
    if is_first():
        remove_broken_checkpoints(run)
    wait_for_everyone()
    with disk_may_fill(run, "training stopped"):
        outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = stop.seconds()
    if stop.interrupted:
        raise Interrupted(f"interrupted at step {trainer.state.global_step}; {how_to_resume(run)}")
    say(f"trained {trainer.state.global_step:,} updates in {seconds / 60:.1f} minutes")
    whole = outcome.metrics if checkpoint is None else {}  # the trainer's speed and loss are of this process only
    return whole | {"train_updates": trainer.state.global_step, "train_seconds": seconds, "epoch": trainer.state.epoch}
