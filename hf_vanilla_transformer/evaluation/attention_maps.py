"""Where a translation looks: the decoder's attention over the source, as numbers and as a picture."""

import math
import os
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_write import atomic_file
from ..errors import UserError
from ..inference.alignment import eager_attention
from ..inference.translator import Translator

#: Marks the space that a token begins with, and line breaks and tabs, which have no shape of their own.
VISIBLE = str.maketrans({" ": "▁", "\n": "↵", "\r": "↵", "\t": "⇥"})

#: Fonts for the scripts that matplotlib's own font lacks; those that the machine has are used.
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Arial Unicode MS", "Noto Sans")

#: The longer side of a picture of a very long sentence; matplotlib draws at most 2^16 pixels, in memory.
MAX_PIXELS = 12_000


@torch.inference_mode()
def cross_attention(
    model: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None,
    sentence: str,
    translation: str | None = None,
) -> tuple[list[str], list[str], torch.Tensor]:
    """The attention of every decoder layer and head over the source (§3.2.3).

    Args:
        model: the model, whose mode and attention implementation are as before afterwards.
        source_tokenizer: for `sentence`.
        target_tokenizer: for the translation; None means that one tokenizer serves both languages.
        sentence: the source text.
        translation: the target text, read word by word as in training; None is the model's own translation.

    Returns:
        The S source tokens and T target tokens in readable form, and the weights, float32 on the CPU, of shape
        (layers, heads, T, S). Row t is the distribution from which target token t was predicted; it sums to 1.

    Raises:
        UserError: an empty sentence.
    """
    if not sentence.strip():
        raise UserError("sentence: it is empty, so there is nothing to attend to")
    target_tokenizer = target_tokenizer or source_tokenizer
    if translation is None:
        (translation,) = Translator(model, source_tokenizer, target_tokenizer).translate([sentence])
    source_ids, target_ids = source_tokenizer(sentence)["input_ids"], target_tokenizer(translation)["input_ids"]
    # the decoder sees each token only after it has been predicted, so it reads them one place later (§3.1)
    decoder_ids = [model.config.decoder_start_token_id, *target_ids[:-1]]
    with eager_attention(model):
        output = model(
            input_ids=torch.tensor([source_ids], device=model.device),
            decoder_input_ids=torch.tensor([decoder_ids], device=model.device),
            output_attentions=True,
        )
    weights = torch.stack(output.cross_attentions).squeeze(1).float().cpu()  # (layers, heads, T, S)
    return _readable(source_tokenizer, source_ids), _readable(target_tokenizer, target_ids), weights


def plot_attention(
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    weights: torch.Tensor,
    path: str | os.PathLike,
    *,
    layer: int | None = None,
) -> Path:
    """Draw one layer of `cross_attention`: the mean of its heads, then each head.

    Args:
        source_tokens: S tokens, along the top.
        target_tokens: T tokens, down the side.
        weights: (layers, heads, T, S).
        path: the picture, of a kind that matplotlib can write: `.png`, `.pdf`, `.svg` …
        layer: counted from 1; None is the last.

    Returns:
        The path.

    Raises:
        UserError: a layer that is not there, a kind of picture that matplotlib does not know, or no matplotlib.
    """
    layers = weights.shape[0]
    layer = layers if layer is None else layer
    if not 1 <= layer <= layers:
        raise UserError(f"layer: the model has decoder layers 1 to {layers}, not {layer}")
    heads = list(weights[layer - 1])  # H of (T, S)
    panels = [("mean of the heads", torch.stack(heads).mean(0))]
    panels += [(f"head {number}", head) for number, head in enumerate(heads, start=1)]
    with figures() as figure_class:
        figure = _draw(figure_class, panels, source_tokens, target_tokens)
        figure.suptitle(f"Cross-attention, decoder layer {layer} of {layers}", fontsize=13)
        save_figure(figure, path)
    return Path(path)


def save_figure(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure to a file.

    Raises:
        UserError: a kind of picture that matplotlib does not know.
    """
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=min(150, MAX_PIXELS / max(figure.get_size_inches())))
    except ValueError as error:
        raise UserError(f"{path}: matplotlib cannot write this kind of picture; name it .png, .pdf or .svg") from error


def _draw(
    figure_class: Any,
    panels: list[tuple[str, torch.Tensor]],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
) -> Any:
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    # inches: a cell of 0.22 leaves room for its token in the smallest type that is easy to read
    width, height = max(1.8, 0.22 * len(source_tokens)), max(1.8, 0.22 * len(target_tokens))
    figure = figure_class(figsize=(columns * width + 1.8, rows * height + 2.2), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[len(panels) :]:
        spare.remove()
    for index, (title, weights) in enumerate(panels):
        axis = axes[index]
        image = axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set_title(title, fontsize=10, fontweight="bold" if index == 0 else "normal")
        _label(axis, source_tokens, target_tokens, top=index < columns, left=index % columns == 0)
    figure.colorbar(image, ax=figure.axes, label="attention weight", shrink=0.6, pad=0.02)
    return figure


def _label(axis: Any, source_tokens: Sequence[str], target_tokens: Sequence[str], *, top: bool, left: bool) -> None:
    # tokens are text: a "$" must not begin a formula
    style = {"fontsize": 8, "parse_math": False}
    axis.set_xticks(
        range(len(source_tokens)), source_tokens if top else [""] * len(source_tokens), rotation=90, **style
    )
    axis.set_yticks(range(len(target_tokens)), target_tokens if left else [""] * len(target_tokens), **style)
    axis.tick_params(top=top, labeltop=top, bottom=False, labelbottom=False, length=0)
    # white lines between the cells, so that the eye finds its row
    axis.set_xticks([column - 0.5 for column in range(1, len(source_tokens))], minor=True)
    axis.set_yticks([row - 0.5 for row in range(1, len(target_tokens))], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    for side in axis.spines.values():
        side.set_color("0.8")


@contextmanager
def figures():
    """Matplotlib's figure class, without a window and with fonts for many scripts; nothing global is changed."""
    try:
        import matplotlib
        from matplotlib import font_manager
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install matplotlib") from error
    installed = set(font_manager.get_font_names())
    with matplotlib.rc_context({"font.family": [font for font in FONTS if font in installed] or ["sans-serif"]}):
        yield Figure


def _readable(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Tokens as text: a byte-level vocabulary writes "ĠfÃ¼r" for " für"; part of a character becomes "�"."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    if "Ġ" in tokenizer.get_vocab():
        special, byte_level = set(tokenizer.all_special_tokens), decoders.ByteLevel()
        tokens = [token if token in special else byte_level.decode([token]) for token in tokens]
    # control characters have no shape either: "\x04"
    return ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in token.translate(VISIBLE)) for token in tokens]
