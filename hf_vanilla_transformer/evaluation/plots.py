"""Plots: the cross-attention of a translation, and the training curve."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import decoders
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.shared_copy import shared_copy
from ..inference.alignment import decoder_inputs
from ..inference.translator import TOKENIZER_LOCK, Translator
from ..text.side_tokens import Side, is_byte_level, side_tokens
from ..utils.errors import UserError
from ..utils.plotting import figure_file
from .metric_names import TITLES, lower_is_better, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Printable characters for the space at the start of a token, line breaks and tabs.
_PRINTABLE = str.maketrans({" ": "▁", "\n": "↵", "\r": "↵", "\t": "⇥"})


@torch.inference_mode()
def cross_attention(
    model: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None,
    sentence: str,
    translation: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[list[str], list[str], torch.Tensor]:
    """The cross-attention weights of every decoder layer and head (§3.2.3).

    Args:
        model: it is not changed, so that other threads may use it meanwhile.
        source_tokenizer: the tokenizer of `sentence`.
        target_tokenizer: the tokenizer of the translation. None for a joint tokenizer.
        sentence: the source text.
        translation: the target text, fed to the decoder as in training. None for the model's translation.
        source_lang, target_lang: the direction, of a model of many languages.

    Returns:
        The S source tokens and T target tokens in readable form, and the weights, float32 on the CPU, of shape
        (layers, heads, T, S). Row t is the distribution of the step that predicts target token t. It sums to 1.

    Raises:
        UserError: an empty sentence, or a language that the model does not have.
    """
    if not sentence.strip():
        raise UserError("sentence: it is empty, so there is nothing to attend to")
    target_tokenizer = target_tokenizer or source_tokenizer
    translator = Translator(model, source_tokenizer, target_tokenizer).directed(
        source_lang, target_lang
    )
    source_ids = translator.encode(sentence)
    if translation is None:
        (translation,) = translator.translate([sentence], protect=False)
    with TOKENIZER_LOCK:
        (target_ids,) = translator.directions.encode_targets(
            target_tokenizer, [translation], [translator.directions.default]
        )
    output = shared_copy(model, attention="eager")(
        input_ids=torch.tensor([source_ids], device=model.device),
        decoder_input_ids=decoder_inputs(model, [target_ids]),
        output_attentions=True,
    )
    weights = torch.stack(output.cross_attentions).squeeze(1).float().cpu()  # (layers, heads, T, S)
    return (
        _readable(source_tokenizer, source_ids, "source"),
        _readable(target_tokenizer, target_ids, "target"),
        weights,
    )


def plot_attention(
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    weights: torch.Tensor,
    path: str | os.PathLike,
    *,
    layer: int | None = None,
) -> Path:
    """Plot one layer of `cross_attention` as heatmaps: the mean of its heads, then each head.

    Args:
        source_tokens: S tokens, the columns.
        target_tokens: T tokens, the rows.
        weights: (layers, heads, T, S).
        path: the plot. Its suffix chooses the format: `.png`, `.pdf`, `.svg` …
        layer: counted from 1. None for the last.

    Raises:
        UserError: a layer that does not exist, a format that matplotlib does not know, or no matplotlib.
    """
    layer = len(weights) if layer is None else layer
    if not 1 <= layer <= len(weights):
        raise UserError(f"layer: the model has decoder layers 1 to {len(weights)}, not {layer}")
    heads = list(weights[layer - 1])  # H of (T, S)
    panels = [("mean of the heads", torch.stack(heads).mean(0))]
    panels += [(f"head {number}", head) for number, head in enumerate(heads, start=1)]
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    # inches: a cell of 0.22 fits its token's label in the smallest legible type
    width = max(1.8, 0.22 * len(source_tokens))
    height = max(1.8, 0.22 * len(target_tokens))
    size = (columns * width + 1.8, rows * height + 2.2)
    with figure_file(path, figsize=size, layout="constrained") as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axis, (title, panel) in zip(grid.flat, panels, strict=False):
            image = axis.imshow(panel.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axis.set_title(title, fontsize=10)
            # a "$" in a token must not start math mode
            style = {"fontsize": 8, "parse_math": False}
            axis.set_xticks(range(len(source_tokens)), source_tokens, rotation=90, **style)
            axis.set_yticks(range(len(target_tokens)), target_tokens, **style)
            axis.tick_params(labeltop=True, labelbottom=False, length=0)
            axis.label_outer()
        for spare in grid.flat[len(panels) :]:
            spare.remove()
        figure.colorbar(image, ax=figure.axes, label="attention weight", shrink=0.6, pad=0.02)
        figure.suptitle(f"Cross-attention, decoder layer {layer} of {len(weights)}", fontsize=13)
    return Path(path)


def _readable(tokenizer: PreTrainedTokenizerBase, ids: list[int], side: Side) -> list[str]:
    """Tokens as readable text: byte-level "ĠfÃ¼r" becomes "▁für", an incomplete character becomes "�"."""
    by_id = side_tokens(tokenizer, 1 + max(ids, default=0), side)
    tokens = [by_id[i] for i in ids]
    if is_byte_level(tokenizer):
        special = set(tokenizer.all_special_tokens)
        byte_level = decoders.ByteLevel()
        tokens = [token if token in special else byte_level.decode([token]) for token in tokens]
    # control characters are escaped: "\x04"
    return [
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in token.translate(_PRINTABLE))
        for token in tokens
    ]


# The training curve

# A palette for colour-blind readers (Okabe and Ito 2008).
TRAIN_COLOR = "#0072b2"
EVAL_COLOR = "#d55e00"
SCORE_COLOR = "#009e73"

Points = list[tuple[int, float]]


def plot_curve(log_history: Sequence[Mapping[str, float]], path: Path) -> Path:
    """Plot the training and validation loss in `trainer.state.log_history` and, below them, a validation score.

    The training loss without label smoothing (`nll_loss`) is preferred, because the validation loss is unsmoothed. The
    score is the first of `TITLES` that was measured. Without one only the loss is plotted. Return the path.
    """
    train = _points(log_history, "nll_loss") or _points(log_history, "loss")
    evaluation = _during_training(log_history, "eval_loss")
    scores = ((name, _during_training(log_history, f"eval_{name}")) for name in TITLES)
    name, score = next((each for each in scores if each[1]), ("", []))
    if not (train or evaluation or score):
        raise UserError(
            "log_history: it has neither losses nor scores to draw; set logging_steps or eval_steps lower"
        )
    panels = 1 + bool(score)
    with figure_file(path, figsize=(8, 1.2 + 2.7 * panels), layout="constrained") as figure:
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
        for axis in axes:
            axis.grid(color="0.9", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
        # a line needs two points to be visible
        _draw(axes[0], train, TRAIN_COLOR, "training", marker="o" if len(train) == 1 else "")
        _draw(axes[0], evaluation, EVAL_COLOR, "validation")
        axes[0].set_ylabel("Loss")
        if train or evaluation:
            axes[0].legend(frameon=False)
        if score:
            _draw(axes[1], score, SCORE_COLOR, title_of(name))
            is_lower = lower_is_better(name)
            if is_lower is not None:
                step, best = (min if is_lower else max)(score, key=lambda point: point[1])
                axes[1].set_title(f"best {best:.2f} at update {step:,}", loc="right", fontsize=10)
            axes[1].set_ylabel(title_of(name))
        axes[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes[-1].xaxis.set_major_formatter("{x:,.0f}")
        axes[-1].set_xlabel("Updates")
    return Path(path)


def _draw(axis: "Axes", points: Points, color: str, label: str, marker: str = "o") -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color=color, label=label, marker=marker, markersize=4)


def _points(entries: Iterable[Mapping[str, float]], name: str) -> Points:
    """(step, value) for each step, from its first log entry. NaN and infinity are left out."""
    points: dict[int, float] = {}
    for entry in entries:
        value = entry.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            points.setdefault(int(entry["step"]), float(value))
    return sorted(points.items())


def _during_training(log_history: Sequence[Mapping[str, float]], name: str) -> Points:
    """The points before the end of training. Later evaluations score the best or averaged weights, not the weights
    of their step, so they are plotted only if there are no other points."""
    before_end = takewhile(lambda entry: "train_runtime" not in entry, log_history)
    return _points(before_end, name) or _points(log_history, name)
