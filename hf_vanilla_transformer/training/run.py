"""A training run from arguments to a model folder: load, train, choose, test, save."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from datasets import Dataset, IterableDataset
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data import (
    EncodingReport,
    PairReport,
    encode_pairs,
    load_pairs,
    load_tokenizers,
    number_pairs,
    save_tokenizers,
    train_tokenizer,
    with_bpe_dropout,
)
from ..errors import Interrupted, UserError
from ..evaluation.attention_maps import cross_attention, plot_attention
from ..evaluation.metrics import score_translations, translation_metrics
from ..generation_vanilla_transformer import chosen_settings
from ..hub.card import CardFacts, describe_hardware, versions, write_model_card
from ..hub.finished_run import destination, publish_run
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import DataArguments, RunArguments, chosen_values
from .callbacks import StopWithCheckpoint
from .checkpoints import (
    INDEX,
    STATE,
    WAITING_ROOM,
    WEIGHTS,
    average_weights,
    remove_broken_checkpoints,
    whole_checkpoints,
    written_beside,
)
from .curve import plot_curve
from .precision import bf16_is_faster
from .processes import from_first, hush_others, is_first, one_voice, say
from .trainer import VanillaTransformerTrainer, as_itself

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
SPLITS = ("train", "validation", "test")
_ROWS_READ = 1000


@dataclass
class Corpus:
    """Sentence pairs by split, and what was said about each split."""

    pairs: dict[str, Dataset | IterableDataset]
    reports: dict[str, PairReport]


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


# 2. Data


def load_corpus(data_args: DataArguments, args: RunArguments) -> Corpus:
    """Load and check every split that the arguments name, and say what was dropped."""
    if data_args.numbers_size is not None:
        languages = data_args.source_lang or "en", data_args.target_lang or "de"
        splits = number_pairs(data_args.numbers_size, args.seed, *languages, maximum=data_args.numbers_maximum)
        return Corpus(dict(splits), {})
    corpus = Corpus({}, {})
    for split in SPLITS:
        source = _split_arguments(data_args, split)
        if source is None:
            continue
        streaming = data_args.streaming and split == "train"
        pairs, report = load_pairs(
            **source,
            source_lang=data_args.source_lang,
            target_lang=data_args.target_lang,
            source_column=data_args.source_column,
            target_column=data_args.target_column,
            streaming=streaming,
        )
        if not streaming:
            say(f"{split}: {report.summary()}")
        corpus.pairs[split], corpus.reports[split] = pairs, report
    if "train" not in corpus.pairs:
        raise UserError(
            "nothing to train on: give train_file, or train_source_file and train_target_file, or dataset_name"
        )
    return corpus


def _split_arguments(data_args: DataArguments, split: str) -> dict[str, Any] | None:
    """What `load_pairs` needs to read one split; files win over a data set's split, so that a recipe that names a
    data set can be pointed at files."""
    file = getattr(data_args, f"{split}_file")
    source, target = (getattr(data_args, f"{split}_{side}_file") for side in ("source", "target"))
    if file is not None and (source or target):
        raise UserError(f"give {split}_file or {split}_source_file and {split}_target_file, not both")
    if file is not None:
        return {"file": file}
    if source or target:
        if not (source and target):
            raise UserError(f"{split}_source_file and {split}_target_file go together; one of them is missing")
        return {"source_file": source, "target_file": target}
    if data_args.dataset_name and not (data_args.train_file or data_args.train_source_file):
        name, config = data_args.dataset_name, data_args.dataset_config_name
        return {"dataset_name": name, "dataset_config_name": config, "split": split}
    return None


def choose_tokenizers(
    corpus: Corpus, model_args: Any, data_args: DataArguments, checkpoint: Path | None
) -> Tokenizers:
    """Load the tokenizers, or train them on the training text; a resumed run keeps its own."""
    if checkpoint is not None:
        return load_tokenizers(checkpoint)
    if data_args.tokenizer_name:
        tokenizers = load_tokenizers(data_args.tokenizer_name)
    else:
        size = model_args.vocab_size or VanillaTransformerConfig().vocab_size
        train, report = corpus.pairs["train"], corpus.reports.get("train")
        # a stream is known only when it has been read
        known = report.fingerprint if report is not None and not data_args.streaming else ""

        def learn(*columns: str) -> PreTrainedTokenizerBase:
            # many rows at a time: one by one, a million of them take 20 s to read
            batches = ((column, train.select_columns([column]).iter(_ROWS_READ)) for column in columns)
            texts = (text for column, rows in batches for batch in rows for text in batch[column])
            content = f"{known} {' '.join(columns)}" if known else None
            return train_tokenizer(texts, size, data_args.min_frequency, data_args.lowercase, content)

        if data_args.separate_vocabularies:
            tokenizers = learn("source"), learn("target")
        else:
            tokenizers = (learn("source", "target"),) * 2
    say(f"tokenizer: {' and '.join(f'{len(each):,}' for each in dict.fromkeys(tokenizers))} tokens")
    return tokenizers


def encode_corpus(
    corpus: Corpus, tokenizers: Tokenizers, data_args: DataArguments, seed: int = 0
) -> tuple[dict[str, Any], dict[str, EncodingReport]]:
    """Turn text into ids; too long training pairs are dropped and counted, evaluation keeps every pair."""
    encoded: dict[str, Any] = {}
    reports = {}
    for split, pairs in corpus.pairs.items():
        training = split == "train"
        data, report = encode_pairs(
            pairs,
            *tokenizers,
            max_source_length=data_args.max_source_length,
            max_target_length=data_args.max_target_length,
            drop_too_long=training,
        )
        if report.too_long:
            say(f"{split}: {report.summary()}")
        if training and data_args.bpe_dropout:
            data = with_bpe_dropout(data, *tokenizers, dropout=data_args.bpe_dropout, seed=seed)
        encoded[split], reports[split] = data, report
    if "validation" in encoded and data_args.max_eval_samples:
        size = min(data_args.max_eval_samples, len(encoded["validation"]))
        encoded["validation"] = encoded["validation"].select(range(size))
    return encoded, reports


# 3. Model and trainer


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


# 4. Training, and which weights to keep


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
        raise Interrupted(f"interrupted at step {trainer.state.global_step}; {_how_to_resume(run)}")
    say(f"trained {trainer.state.global_step:,} updates in {seconds / 60:.1f} minutes")
    whole = outcome.metrics if checkpoint is None else {}  # the trainer's speed and loss are of this process only
    return whole | {"train_updates": trainer.state.global_step, "train_seconds": seconds, "epoch": trainer.state.epoch}


# What the operating system, safetensors and torch.save say of a full disk.
_DISK_FULL = "No space left", "code: 28", "unexpected pos", "PytorchStreamWriter failed"


@contextmanager
def disk_may_fill(run: Path, consequence: str) -> Iterator[None]:
    """Turn a failure to write, whichever library met it, into one line; what was half written is deleted.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = any(sign in str(error) for sign in _DISK_FULL) or shutil.disk_usage(run).free < 2**20
        if not (full or isinstance(error, PermissionError)):
            raise
        remove_broken_checkpoints(run)
        reason = "no space left on the disk" if full else str(error)
        raise UserError(f"{reason}: {consequence}; {_how_to_resume(run)}") from error


def _how_to_resume(run: Path) -> str:
    checkpoints = whole_checkpoints(run)
    if not checkpoints:
        return "no checkpoint was saved yet"
    return f"{checkpoints[-1]} is whole: go on with --resume_from_checkpoint true"


def choose_weights(trainer: VanillaTransformerTrainer, run: Path, args: RunArguments) -> dict[str, float]:
    """Score the weights at hand (the last ones, or the best with `load_best_model_at_end`) and the average of the
    last checkpoints on the validation split; go on with the better."""
    if trainer.eval_dataset is None:
        return {}
    single = trainer.evaluate()
    checkpoints = whole_checkpoints(run)[-args.average_last :] if args.average_last > 1 else []
    if len(checkpoints) < 2:
        return single
    averaged = run / f"average-of-{len(checkpoints)}.safetensors"
    if is_first():
        with disk_may_fill(run, "the average was not made"):
            average_weights(checkpoints, averaged)
    wait_for_everyone()
    kept = all_weights(trainer.model)
    load_weights(trainer.model, load_file(averaged))
    wait_for_everyone()
    if is_first():
        averaged.unlink()
    average = trainer.evaluate()
    say(f"validation BLEU: {single['eval_bleu']:.2f} single, {average['eval_bleu']:.2f} averaged")
    better = average["eval_bleu"] >= single["eval_bleu"]
    if not better:
        load_weights(trainer.model, kept)
    chosen = average if better else single
    return chosen | {
        "eval_bleu_single": single["eval_bleu"],
        "eval_bleu_averaged": average["eval_bleu"],
        "averaged_checkpoints": len(checkpoints) if better else 0,
    }


def all_weights(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    """A copy of the weights as one process has them, where several share the model too; tied ones once."""
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: weights[name].clone() for name in weights.keys() - set(model.all_tied_weights_keys)}


def load_weights(model: VanillaTransformerForConditionalGeneration, weights: dict[str, Any]) -> None:
    """Give a model, each process's share of it if it is shared, these weights; of tied ones, one is enough."""
    untied = model.state_dict().keys() - weights.keys() - set(model.all_tied_weights_keys)
    if untied:
        raise UserError(f"the weights lack {sorted(untied)[0]}")
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)
    model.tie_weights()


def set_decoding(model: VanillaTransformerForConditionalGeneration, args: RunArguments) -> None:
    """Give the finished model the decoding that it was told to be tested with; it is saved with it."""
    config = model.generation_config
    if args.test_num_beams is not None:
        config.num_beams = args.test_num_beams
    if args.test_length_penalty is not None:
        config.length_penalty = args.test_length_penalty
        # or nobody could tell a penalty of 1.0 from the default that Seq2SeqTrainer fills in
        vars(config).pop("paper_length_penalty", None)


def forget_defaults(config: GenerationConfig) -> None:
    """Take out what `Seq2SeqTrainer` fills in when it evaluates, and nobody chose."""
    chosen = chosen_settings(config)
    for name in config._get_default_generation_params().keys() - chosen.keys():
        setattr(config, name, None)


# 5. Test and results


def test(
    trainer: VanillaTransformerTrainer,
    target_tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    encoded: Dataset,
    data_args: DataArguments,
) -> dict[str, Any]:
    """Translate the test split as the finished model will, and score it against the text as it was read."""
    start = time.monotonic()
    predicted = trainer.predict(encoded, metric_key_prefix="test", num_beams=trainer.model.generation_config.num_beams)
    seconds = time.monotonic() - start
    ids = predicted.predictions
    ids[ids < 0] = target_tokenizer.pad_token_id
    hypotheses = target_tokenizer.batch_decode(ids, skip_special_tokens=True)
    scores = score_translations(
        hypotheses,
        corpus.pairs["test"]["target"],
        tokenize=data_args.bleu_tokenize,
        lowercase=data_args.bleu_lowercase,
    )
    say(f"test: BLEU {scores['bleu']:.2f} ({scores['bleu_signature']}), chrF {scores['chrf']:.2f}")
    metrics = {name: value for name, value in predicted.metrics.items() if name.startswith("test_")}
    return metrics | {f"test_{name}": value for name, value in scores.items()} | {"test_seconds": seconds}


def save(trainer: VanillaTransformerTrainer, tokenizers: Tokenizers, run: Path, results: dict[str, Any]) -> None:
    """Make the run's folder a model folder. Each file is written beside and then renamed."""
    model, beside = trainer.model, run / WAITING_ROOM
    weights = all_weights(model) if trainer.is_fsdp_enabled else None  # which all processes must ask for
    if not is_first():
        return
    shutil.rmtree(beside, ignore_errors=True)
    try:
        forget_defaults(model.generation_config)
        model.config.use_cache = True  # the trainer switches it off
        with disk_may_fill(run, "the model was not saved"), as_itself(model):
            model.save_pretrained(beside, state_dict=weights)
            save_tokenizers(beside, *tokenizers)
        for path in sorted(beside.rglob("*")):
            if path.is_file():
                target = run / path.relative_to(beside)
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    trainer.save_state()
    with written_beside(run / "all_results.json") as part:
        part.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# A longer sentence is no picture for a card.
_DRAWN_CHARACTERS = 150


def draw_attention(
    model: VanillaTransformerForConditionalGeneration, tokenizers: Tokenizers, corpus: Corpus, run: Path
) -> None:
    """Where the model looks while it reads the translation of the first test sentence that is not too long."""
    rows = iter(corpus.pairs.get("test", ()))
    row = next((row for row in rows if max(len(row["source"]), len(row["target"])) <= _DRAWN_CHARACTERS), None)
    if row is None:
        return
    try:
        source, target, weights = cross_attention(model, *tokenizers, row["source"], row["target"])
        say(f"attention map: {plot_attention(source, target, weights, run / 'attention.png')}")
    except UserError as error:
        print(f"no attention map: {error}", file=sys.stderr)


def write_card_and_curve(
    trainer: VanillaTransformerTrainer,
    corpus: Corpus,
    results: dict[str, Any],
    model_args: Any,
    data_args: DataArguments,
    args: RunArguments,
    command: str,
) -> None:
    """The curve, where matplotlib is installed, and the model card."""
    run = Path(args.output_dir)
    try:
        say(f"curve: {plot_curve(trainer.state.log_history, run / 'curve.png')}")
    except UserError as error:
        print(f"no curve: {error}", file=sys.stderr)
    source, target = data_args.source_lang, data_args.target_lang
    facts = CardFacts(
        model_name=run.resolve().name,
        languages=(source, target) if source and target else None,
        recipe=chosen_values(model_args, data_args, args),
        command=command or None,
        metrics=results,
        data_summaries={split: report.summary() for split, report in corpus.reports.items()},
        data_fingerprints={
            split: print_ for split, report in corpus.reports.items() if (print_ := report.fingerprint)
        },
        parameters=trainer.model.num_parameters(),
        config=trainer.model.config.to_dict(),
        train_seconds=results["train_seconds"],
        hardware=describe_hardware(),
        versions=versions(),
        datasets=[data_args.dataset_name] if data_args.dataset_name and _from_hub(data_args) else [],
        example=corpus.pairs["test"][0]["source"] if "test" in corpus.pairs else None,
    )
    say(f"model card: {write_model_card(run, facts)}")


def _from_hub(data_args: DataArguments) -> bool:
    own_files = data_args.train_file or data_args.train_source_file
    return not own_files and not Path(str(data_args.dataset_name)).exists()
