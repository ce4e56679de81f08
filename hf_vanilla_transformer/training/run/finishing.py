"""The end of a run: select the weights, save the model, score the test split, write results, card and plots."""

import filecmp
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from ...batches.corpus_tokenizers import Tokenizers
from ...corpora.corpus import SPLITS, split_inputs
from ...corpora.mixtures import PART
from ...evaluation.metric_names import DEFAULT, ScoreOptions, lower_is_better, title_of
from ...evaluation.metrics import signatures_of
from ...evaluation.plots import cross_attention, plot_attention, plot_curve
from ...evaluation.trainer_metrics import score_test_split
from ...hub.card import CardFacts, write_model_card
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...text import save_tokenizers
from ...text.token_kinds import tokenizer_task
from ...utils.errors import DiskFull, Interrupted, UserError
from ...utils.system_info import counted, describe_hardware, versions
from ..state.callbacks import StopWithCheckpoint
from ..state.checkpoints import (
    STAGING_FOLDER,
    TRAINER_STATE,
    average_weights,
    complete_checkpoints,
    remove_staging_folder,
    report_failed_save,
    resume_hint,
    staged,
)
from ..state.distributed import broadcast_from_main, is_main_rank, original_class, print_main
from ..trainer.log_metrics import perplexities
from ..trainer.loss_check import require_finite_on_all_ranks
from ..trainer.trainer import VanillaTransformerTrainer
from .arguments import RunArguments, chosen_values, score_options, set_decoding
from .facts import SCORED
from .languages import run_languages
from .run_state import Run

# Files about the weights in the same folder
RESULTS = "all_results.json", "trainer_state.json", "attention.png", "curve.png", "README.md"


def score_and_save(
    trainer: VanillaTransformerTrainer,
    stop: StopWithCheckpoint,
    run: Run,
    results: dict[str, object],
) -> dict[str, object]:
    """Choose the weights, save the model folder, then score the test split and save the results.

    The end of training was saved as a checkpoint before, so a failure or a signal here loses nothing: a resumed run
    continues with the scores. Return `results` with the scores.
    """
    args = run.args
    folder = Path(run.args.output_dir)
    options = score_options(run.data_args, run.tokenizers[1])
    saved = f"the last update is saved, and a resumed run continues with the scores: {resume_hint(folder)}"
    stop.signals.message = f"the scores are left out; {saved}"
    with _scoring("the validation split", stop, args.device, saved):
        results |= choose_weights(trainer, folder, args, options["metrics"])
        if trainer.eval_dataset is not None:
            results |= _validation_facts(trainer, run, options)
        set_decoding(trainer.model.generation_config, args)
    save_model_folder(trainer, run.tokenizers, folder)
    saved = f"the model is saved in {folder}, and a resumed run scores it: {resume_hint(folder)}"
    stop.signals.message = f"the scores are left out; {saved}"
    with _scoring("the test split", stop, args.device, saved):
        for split in SCORED:
            if split in run.encoded:
                data = run.encoded[split]
                pairs = run.corpus.pairs[split]
                results |= score_test_split(trainer, data, pairs, split, options, run.groups(split))
    if is_main_rank():
        save_results(trainer, folder, results)
        if stop.saved_for_scoring:
            shutil.rmtree(folder / f"checkpoint-{stop.saved_step}")
    return results


@contextmanager
def _scoring(
    name: str, stop: StopWithCheckpoint, device: torch.device, saved: str
) -> Iterator[None]:
    """Raise a one-line error that ends with `saved` if scoring fails or is interrupted."""
    try:
        yield
        stop.signals.agree(device)
    except Interrupted:
        pass
    except DiskFull:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(
            f"{name} cannot be scored: {' '.join(str(error).split())}; {saved}"
        ) from error
    if stop.interrupted:
        raise Interrupted(
            f"interrupted before {name} was scored; {saved}", stop.signals.received or signal.SIGINT
        )


def _validation_facts(
    trainer: VanillaTransformerTrainer, run: Run, options: ScoreOptions
) -> dict[str, object]:
    """Return how the validation split was scored: sentences, beams and the signatures of sacreBLEU."""
    beams = trainer.args.generation_num_beams or trainer.model.generation_config.num_beams or 1
    facts: dict[str, object] = {
        "eval_sentences": len(trainer.eval_dataset),
        "eval_num_beams": beams,
    }
    groups = run.groups("validation")
    references = run.corpus.pairs["validation"]["target"]
    if groups is None:
        references = references[:1000]
    signatures = signatures_of(references, options, groups)
    return facts | {f"eval_{name}": value for name, value in signatures.items()}


# Selecting the weights

_WEIGHTS = {
    "single": "the weights of one update",
    "averaged": "the average of the last checkpoints",
    "ema": "the exponential moving average",
}


def choose_weights(
    trainer: VanillaTransformerTrainer,
    run: Path,
    args: RunArguments,
    metrics: Sequence[str] = DEFAULT,
) -> dict[str, float]:
    """Keep the weights with the best score on the validation split.

    The candidates are the current ones (the last, or with `load_best_model_at_end` the best), the average of the last
    checkpoints, and the exponential moving average. The score is `metric_for_best_model`, or the first measured one of
    `metrics`. Without validation data an average is kept unscored, as in §6.1.
    """
    candidates, facts = _averages(trainer, run, args)
    if trainer.eval_dataset is None:
        if not candidates:
            return {}
        chosen = next(iter(candidates))
        load_full_state_dict(trainer.model, candidates[chosen])
        print_main(f"weights: {_WEIGHTS[chosen]}, unscored, because there is no validation data")
        return facts[chosen]

    best = args.load_best_model_at_end and trainer.state.best_model_checkpoint
    step = trainer.state.best_global_step if best else trainer.state.global_step
    single = trainer.scores.get(step) or trainer.evaluate()
    if not candidates:
        return single
    candidates["single"] = full_state_dict(trainer.model)
    scored = {"single": single}
    for name in [each for each in candidates if each not in scored]:  # in one order on all ranks
        scored[name] = _score(
            trainer, candidates[name], with_perplexity="eval_perplexity" in single
        )

    known = [name for name in metrics if lower_is_better(name) is not None]
    measured = [name for name in known if f"eval_{name}" in single]
    default = [*measured, "exact_match"][0]
    metric = (args.metric_for_best_model or default).removeprefix("eval_")
    is_better = (
        args.greater_is_better if args.metric_for_best_model else not lower_is_better(metric)
    )
    sign = 1 if is_better else -1
    scores = {name: scored[name][f"eval_{metric}"] for name in _WEIGHTS if name in scored}
    # The loss decides between equals, then an average: it generalises better.
    losses = {name: scored[name].get("eval_loss", 0.0) for name in scores}
    # Losses may differ between ranks by rounding, and all ranks must load the same weights.
    chosen = broadcast_from_main(
        lambda: max(reversed(scores), key=lambda name: (sign * scores[name], -losses[name]))
    )
    shown = ", ".join(f"{score:.2f} {name}" for name, score in scores.items())
    is_tie = list(scores.values()).count(scores[chosen]) > 1 and "eval_loss" in scored[chosen]
    by_loss = f", of equal ones that of the lowest loss, {losses[chosen]:.4f}" if is_tie else ""
    print_main(f"validation {title_of(metric)}: {shown}; kept: {_WEIGHTS[chosen]}{by_loss}")
    load_full_state_dict(trainer.model, candidates[chosen])
    named_scores = {f"eval_{metric}_{name}": score for name, score in scores.items()}
    return scored[chosen] | named_scores | facts[chosen]


def _averages(
    trainer: VanillaTransformerTrainer, run: Path, args: RunArguments
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, float]]]:
    """The averaged weights that a run may keep, and facts about each of `_WEIGHTS` for its results."""
    averages: dict[str, dict[str, torch.Tensor]] = {}
    facts: dict[str, dict[str, float]] = dict.fromkeys(_WEIGHTS, {"averaged_checkpoints": 0})
    checkpoints = complete_checkpoints(run)[-args.average_last :] if args.average_last > 1 else []
    if len(checkpoints) < args.average_last > 1:
        print_main(
            f"warning: average_last={args.average_last}: the run has {counted(len(checkpoints), 'checkpoint')}"
        )
    if len(checkpoints) > 1:
        averages["averaged"] = averaged_weights(checkpoints, run)
        facts["averaged"] = {"averaged_checkpoints": len(checkpoints)}
    if trainer.ema is not None:
        averages["ema"] = trainer.ema.average
        facts["ema"] = {"averaged_checkpoints": 0, "ema_decay": args.ema_decay}
    return averages, facts


def _score(
    trainer: VanillaTransformerTrainer, weights: dict[str, torch.Tensor], with_perplexity: bool
) -> dict[str, float]:
    """The scores of weights on the validation split. They are loaded for it."""
    load_full_state_dict(trainer.model, weights)
    wait_for_everyone()
    # Not `evaluate`: its log and samples belong to the update.
    scores = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval").metrics
    return scores | perplexities(scores) if with_perplexity else scores


def averaged_weights(checkpoints: list[Path], run: Path) -> dict[str, torch.Tensor]:
    """Average checkpoints in the main process, in a file in the run's folder."""
    file = run / STAGING_FOLDER / "average.safetensors"
    if is_main_rank():
        with report_failed_save(run, "the average was not made"):
            file.parent.mkdir(exist_ok=True)
            average_weights(checkpoints, file)
    wait_for_everyone()
    weights = load_file(file, backend="pread")
    wait_for_everyone()
    if is_main_rank():
        remove_staging_folder(run)
    return weights


def full_state_dict(
    model: VanillaTransformerForConditionalGeneration,
) -> dict[str, torch.Tensor]:
    """A copy of the unsharded weights, tied ones once. With FSDP a collective: all ranks must call it."""
    weights: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    tied = set(model.all_tied_weights_keys)
    # In the order of the model: to load them is a collective, and each process has its own order of a set.
    return {name: weight.clone() for name, weight in weights.items() if name not in tied}


def load_full_state_dict(
    model: VanillaTransformerForConditionalGeneration, weights: dict[str, torch.Tensor]
) -> None:
    """Load unsharded weights into a model, sharded or not. One of each set of tied weights is enough."""
    missing = model.state_dict().keys() - weights.keys() - set(model.all_tied_weights_keys)
    if missing:
        raise UserError(f"the weights lack {sorted(missing)[0]}")
    set_model_state_dict(
        model, {**weights}, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    model.tie_weights()


# Model folder


def save_model_folder(
    trainer: VanillaTransformerTrainer, tokenizers: Tokenizers, run: Path
) -> None:
    """Write model and tokenizers into the run's folder, each file atomically, and delete results of old weights."""
    model = trainer.model
    require_finite_on_all_ranks(
        model.named_parameters(), "model", f"it was not saved; {resume_hint(run)}"
    )
    weights = full_state_dict(model) if trainer.is_fsdp_enabled else None
    if not is_main_rank():
        return
    model.config.use_cache = True  # the trainer switches it off
    with staged(run, "the model was not saved") as staging, original_class(model):
        model.save_pretrained(staging, state_dict=weights)
        save_tokenizers(staging, *tokenizers)
        if not _same_weights(staging, run):
            for name in RESULTS:
                (run / name).unlink(missing_ok=True)


def _same_weights(first: Path, second: Path) -> bool:
    names = {path.name for folder in (first, second) for path in folder.glob("model*.safetensors")}
    return all(
        (second / name).is_file() and filecmp.cmp(first / name, second / name, shallow=False)
        for name in names
    )


def save_results(trainer: VanillaTransformerTrainer, run: Path, results: dict[str, object]) -> None:
    """Write `trainer_state.json` and `all_results.json` into the run's folder, atomically."""
    with staged(run, "the model is saved, its scores are not") as staging:
        trainer.state.save_to_json(str(staging / TRAINER_STATE))
        text = json.dumps(results, indent=2, sort_keys=True)
        (staging / "all_results.json").write_text(text + "\n", encoding="utf-8")


# The attention map of a longer sentence is unreadable in a model card.
_MAX_MAP_CHARACTERS = 150


def draw_attention(model: VanillaTransformerForConditionalGeneration, run: Run) -> None:
    """Plot the cross-attention of the first test pair that is short enough."""
    rows = iter(run.corpus.pairs.get("test", ()))
    row = next(
        (row for row in rows if max(len(row["source"]), len(row["target"])) <= _MAX_MAP_CHARACTERS),
        None,
    )
    if row is None:
        return
    with report_missing_plot("attention map"):
        directions = run.corpus.directions.get("test")
        direction = directions[row[PART]] if directions else (None, None)
        source, target, weights = cross_attention(
            model, *run.tokenizers, row["source"], row["target"], *direction
        )
        file = Path(run.args.output_dir) / "attention.png"
        print_main(f"attention map: {plot_attention(source, target, weights, file)}")


@contextmanager
def report_missing_plot(name: str) -> Iterator[None]:
    """Print why a plot is missing, for example without matplotlib. Only a full disk ends the run."""
    try:
        yield
    except DiskFull:
        raise
    except UserError as error:
        print(f"no {name}: {error}", file=sys.stderr)


def write_card(trainer: VanillaTransformerTrainer, run: Run, results: dict[str, Any]) -> None:
    """Write the attention map and the training curve, if matplotlib is installed, and the model card."""
    if not is_main_rank():
        return
    args = run.args
    data_args = run.data_args
    corpus = run.corpus
    folder = Path(run.args.output_dir)
    base = args.model_name_or_path
    on_hub = {
        split: [each.name for each in split_inputs(data_args, split) if each.on_hub]
        for split in ([] if data_args.data else SPLITS)  # prepared text may be gone
    }
    task = tokenizer_task(*run.tokenizers)
    facts = CardFacts(
        model_name=folder.resolve().name,
        languages=run_languages(data_args, args) if task == "language" else None,
        task=task,
        directions=corpus.directions.get("train", ()),
        recipe=chosen_values(run.model_args, data_args, args),
        metrics=results,
        data_summaries={split: corpus.summary(split) for split in corpus.pairs},
        data_fingerprints={
            split: digest for split in corpus.pairs if (digest := corpus.fingerprint(split))
        },
        parameters=trainer.model.num_parameters(),
        config=trainer.model.config.to_dict(),
        generation_config=trainer.model.generation_config.to_dict()
        if "test_exact_match" in results
        else {},
        train_seconds=results["train_seconds"],
        hardware=describe_hardware(),
        versions=versions(),
        base_model=base if base is None or not Path(base).exists() else Path(base).resolve().name,
        base_model_on_hub=base is not None and not Path(base).exists(),
        datasets=on_hub,
        example=corpus.pairs["test"][0]["source"] if "test" in corpus.pairs else None,
    )
    with report_failed_save(folder, "the model and its scores are saved, its card is not"):
        if not trainer.is_fsdp_enabled:  # a forward pass of a sharded model would need all ranks
            draw_attention(trainer.model, run)
        with report_missing_plot("curve"):
            print_main(f"curve: {plot_curve(trainer.state.log_history, folder / 'curve.png')}")
        print_main(f"model card: {write_model_card(folder, facts)}")
