"""Plot the training curve: loss and translation score over updates."""

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..plotting import figure_file

NAMES = {"eval_bleu": "BLEU", "eval_chrf": "chrF", "eval_exact_match": "Exact match, %"}

# A palette for colour-blind readers (Okabe and Ito 2008).
TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR = "#0072b2", "#d55e00", "#009e73"
_MARKED_LINE: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 4}

Points = list[tuple[int, float]]


def plot_curve(log_history: Sequence[dict[str, Any]], path: Path, metric: str = "eval_bleu") -> Path:
    """Plot the training and validation loss in `trainer.state.log_history` and, below them, a validation score.

    The training loss without label smoothing (`nll_loss`) is preferred, because the validation loss is unsmoothed.
    `metric` is the score's name in the log. Without such entries only the loss is plotted. Return the path.
    """
    train = _points(log_history, "nll_loss") or _points(log_history, "loss")
    evaluation, score = _during_training(log_history, "eval_loss"), _during_training(log_history, metric)
    if not (train or evaluation or score):
        raise UserError("log_history: it has neither losses nor scores to draw; set logging_steps or eval_steps lower")
    panels = 1 + bool(score)
    with figure_file(path, figsize=(8, 1.2 + 2.7 * panels), layout="constrained") as figure:
        axes = _axes(figure, panels)
        _draw_loss(axes[0], train, evaluation)
        if score:
            axes[1].plot(*zip(*score, strict=True), **_MARKED_LINE, color=SCORE_COLOR)
            step, best = max(score, key=lambda point: point[1])
            axes[1].plot(step, best, marker="o", ms=9, markerfacecolor="none", color=SCORE_COLOR)
            axes[1].set_title(f"best {best:.2f} at update {step:,}", loc="right", fontsize=10, color=SCORE_COLOR)
            axes[1].set_ylabel(NAMES.get(metric, metric.removeprefix("eval_")))
    return Path(path)


def _points(entries: Iterable[dict[str, Any]], name: str) -> Points:
    """(step, value) for each step, from its first log entry. NaN and infinity are left out."""
    points: dict[int, float] = {}
    for entry in entries:
        value = entry.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            points.setdefault(int(entry["step"]), float(value))
    return sorted(points.items())


def _during_training(log_history: Sequence[dict[str, Any]], name: str) -> Points:
    """The points before the end of training. Later evaluations score the best or averaged weights, not the weights
    of their step, so they are plotted only if there are no other points."""
    before_end = takewhile(lambda entry: "train_runtime" not in entry, log_history)
    return _points(before_end, name) or _points(log_history, name)


def _axes(figure: Any, panels: int) -> Any:
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02, y=0.08)
    figure.align_ylabels(axes)
    axes[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1].set_xlabel("Updates")
    return axes


def _draw_loss(axis: Any, train: Points, evaluation: Points) -> None:
    if train:
        marker = "o" if len(train) == 1 else ""  # a line needs two points to be visible
        axis.plot(*zip(*train, strict=True), color=TRAIN_COLOR, linewidth=1.6, marker=marker, label="training")
    if evaluation:
        axis.plot(*zip(*evaluation, strict=True), **_MARKED_LINE, color=EVAL_COLOR, label="validation")
    if train or evaluation:
        axis.legend(frameon=False)
    axis.set_ylabel("Loss")
