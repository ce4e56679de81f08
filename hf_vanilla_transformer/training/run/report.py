"""Output of a training run: a line for each log entry, sample translations, and a bar on a terminal."""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset, disable_progress_bars
from tqdm import tqdm
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging

from ...evaluation.metric_names import TITLES, title_of
from ...evaluation.trainer_metrics import ComputeMetrics
from ...text.language_tokens import decode_targets
from ...text.token_kinds import tokenizer_task
from ...utils.markdown import isolated
from ...utils.system_calls import encodable
from ...utils.system_info import counted

_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
_MAX_CHARACTERS = 150  # of a sample sentence

# Names in the log of `Trainer`: format. All other entries are in trainer_state.json and in the logs of report_to.
_TRAINING = {
    "loss": "loss {:.3f}",
    "nll_loss": "nll {:.3f}",
    "perplexity": "perplexity {:.2f}",
    "tokens_per_second": "{:,.0f} target tokens/s",
    "learning_rate": "learning rate {:.2e}",
    "skipped_updates": "{} updates skipped",
}
_EVALUATION = {
    "eval_sentences": "{:,} sentences",
    "eval_loss": "loss {:.3f}",
    "eval_perplexity": "perplexity {:.2f}",
    "eval_bleu": "BLEU {:.2f}",
    "eval_chrf": "chrF {:.2f}",
    "eval_exact_match": "exact match {:.1f} %",
    "eval_runtime": "{:.1f} s",
}
# Starts of the names of other entries. Scores of directions have the names of scores at their start.
_UNSHOWN = ("gen_len", "samples", "steps", "runtime", "model_preparation_time", *TITLES)


class SampleTranslations:
    """The translation of one validation sentence from each evaluation, another one each time.

    Args:
        pairs: the validation pairs, with the columns `source` and `target`.
        evaluated: returns the rows of `pairs` in the current evaluation, or None for all.
    """

    def __init__(
        self, pairs: Dataset, evaluated: Callable[[], Sequence[int] | None] = lambda: None
    ):
        self.pairs = pairs
        self.evaluated = evaluated
        self._evaluations = 0
        self._shown: set[int] = set()
        self._sample: tuple[int, str] | None = None  # row and translation, from the last evaluation
        self._answer = "translation"  # the name of what the model wrote

    def taken_from(
        self,
        compute_metrics: ComputeMetrics,
        tokenizer: PreTrainedTokenizerBase,
    ) -> ComputeMetrics:
        """Wrap `compute_metrics` to keep the translation of a sentence that has not been shown."""
        if tokenizer_task(tokenizer) == "sequence":
            self._answer = "prediction"

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            ids = prediction.predictions
            self._sample = None
            if not isinstance(ids, np.ndarray):
                # With `eval_do_concat_batches=False` a list of batches.
                return compute_metrics(prediction)
            rows = self.evaluated()
            rows = range(len(ids)) if rows is None else rows
            # Multiples of the golden ratio spread the samples over all places.
            place = int((self._evaluations + 0.5) * _GOLDEN_RATIO % 1 * len(rows))
            if int(rows[place]) not in self._shown:
                self._sample = int(rows[place]), decode_targets(tokenizer, ids[[place]])[0]
            self._evaluations += 1
            return compute_metrics(prediction)

        return compute

    def lines(self) -> list[str]:
        """Source, reference and translation of the sample, after an evaluation."""
        if self._sample is None:
            return []
        row, translation = self._sample
        self._shown.add(row)
        self._sample = None
        pair = self.pairs[row]
        texts = {"source": pair["source"], "reference": pair["target"], self._answer: translation}
        return [f"  {name:11}  {isolated(_short(text))}" for name, text in texts.items()]


class TrainingReport(TrainerCallback):
    """Print a readable line for each log entry, and a sample translation, if any, after each evaluation."""

    def __init__(self, samples: SampleTranslations | None = None, task: str = "language"):
        self.samples = samples
        self.items = "sentences" if task == "language" else "sequences"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        if state.is_world_process_zero and state.global_step < state.max_steps:
            limit = (
                f", at most {args.max_minutes:g} minutes"
                if getattr(args, "max_minutes", None)
                else ""
            )
            _write(
                f"training on {args.device}: {counted(state.max_steps, 'update')}{limit}, into {args.output_dir}"
            )
            self._warn_of_warmup(args, state.max_steps)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        if (
            state.is_world_process_zero
            and state.global_step < state.max_steps
            and getattr(args, "max_minutes", None)
        ):
            self._warn_of_warmup(args, state.global_step)

    @staticmethod
    def _warn_of_warmup(args: TrainingArguments, updates: int) -> None:
        if updates <= (warmup := args.get_warmup_steps(updates)):
            _write(
                f"warning: {counted(updates, 'update')}, all in the warm-up of warmup_steps={warmup:,}: the "
                "learning rate does not reach its peak; train longer, or lower warmup_steps"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        logs: dict[str, float] | None = None,
        **__: object,
    ) -> None:
        if state.is_world_process_zero and (line := log_line(logs or {}, state, self.items)):
            _write(line)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        if state.is_world_process_zero and self.samples is not None:
            for line in self.samples.lines():
                _write(line)


class TrainingBar(ProgressCallback):
    """A bar over the updates."""

    def on_log(self, *_: object, **__: object) -> None:
        """`TrainingReport` prints it."""


def show_progress(
    trainer: Seq2SeqTrainer,
    validation: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Replace the dictionaries that `Trainer` prints by readable lines, and show a bar if there is a terminal."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    samples = None
    if (
        validation is not None
        and trainer.args.predict_with_generate
        and trainer.compute_metrics is not None
    ):
        samples = SampleTranslations(
            validation, lambda: trainer.budget.rows if trainer.budget is not None else None
        )
        trainer.compute_metrics = samples.taken_from(trainer.compute_metrics, tokenizer)
    trainer.add_callback(TrainingReport(samples, tokenizer_task(tokenizer)))
    if sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(TrainingBar())


def hide_bars_without_terminal() -> None:
    """Switch off the bars of datasets and transformers if they would fill a log file."""
    if not sys.stderr.isatty():
        disable_progress_bars()
        logging.disable_progress_bar()


def log_line(logs: dict[str, float], state: TrainerState, items: str = "sentences") -> str:
    """Format a log entry of `Trainer` as one line. The summary at the end gives an empty line: the run prints it.

    `items` names what an evaluation counts.
    """
    if any(name.startswith("eval_") for name in logs):
        if logs.get("eval_sentences") == 1:
            items = items.removesuffix("s")
        apart = {
            name: f"{name.removeprefix('eval_bleu_')} {{:.2f}}"
            for name in logs
            if name.startswith("eval_bleu_")
        }
        apart = _other_scores(logs) | apart | {"eval_sentences": f"{{:,}} {items}"}
        return f"update {state.global_step:,}  validation  {_fields(logs, _EVALUATION | apart)}"
    if "loss" not in logs:
        return ""
    total = f" of {state.max_steps:,}" if state.max_steps > 0 else ""
    left = f"  {duration(60 * logs['minutes_left'])} left" if logs.get("minutes_left") else ""
    return f"update {state.global_step:,}{total}  {_fields(logs, _TRAINING)}{left}"


def _other_scores(logs: dict[str, float]) -> dict[str, str]:
    """The formats of scores that `metrics` adds."""
    names = [name.removeprefix("eval_") for name in logs if name.startswith("eval_")]
    shown = [name for name in names if name in TITLES or not name.startswith(_UNSHOWN)]
    formats = {f"eval_{name}": f"{title_of(name)} {{:.2f}}" for name in shown}
    return formats | _EVALUATION  # some of them have formats of their own


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:,.1f} min"


def _write(line: str) -> None:
    tqdm.write(encodable(line))  # above the bar, if there is one
    sys.stdout.flush()  # a log file is read while it grows


def _fields(logs: dict[str, float], formats: dict[str, str]) -> str:
    return "  ".join(text.format(logs[name]) for name, text in formats.items() if name in logs)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
