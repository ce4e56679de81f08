"""The end of a run: which weights to keep, the test, and the model folder with its card and pictures."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.utils import wait_for_everyone
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..atomic_write import atomic_file, move_files
from ..data import save_tokenizers
from ..errors import UserError
from ..evaluation.attention_maps import cross_attention, plot_attention
from ..evaluation.metrics import score_translations
from ..generation_vanilla_transformer import chosen_settings
from ..hub.card import CardFacts, write_model_card
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..system_info import describe_hardware, versions
from .arguments import DataArguments, RunArguments, chosen_values
from .checkpoints import WAITING_ROOM, average_weights, disk_may_fill, whole_checkpoints
from .corpus import Corpus, Tokenizers
from .curve import plot_curve
from .processes import is_first, say
from .trainer import VanillaTransformerTrainer, as_itself

# Which weights to keep


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


# The test and the model folder


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
        move_files(beside, run)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    trainer.save_state()
    with atomic_file(run / "all_results.json") as temporary:
        temporary.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
