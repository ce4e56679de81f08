"""The training curve, a plot of the logged losses and scores, written atomically."""

import numpy as np
import pytest

from hf_vanilla_transformer.evaluation.plots import EVAL_COLOR, SCORE_COLOR, TRAIN_COLOR, _during_training, plot_curve

pytest.importorskip("matplotlib", reason="plots need matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests.model_helpers import error_of

pytestmark = pytest.mark.usefixtures("drawn_figures")


def history(updates: int = 3000) -> list[dict]:
    """The log of `Trainer`: losses often, evaluations seldom, the summary of training, and an evaluation after it."""
    entries: list[dict] = []
    for step in range(50, updates + 1, 50):
        entries.append({"loss": 1.3 + 6 * np.exp(-step / 500), "learning_rate": 1e-3, "epoch": 0.1, "step": step})
        if step % 500 == 0:
            bleu = 40 * (1 - np.exp(-step / 900))
            entries.append({"eval_loss": 1.6 + 5 * np.exp(-step / 500), "eval_bleu": bleu, "step": step})
    entries.append({"train_runtime": 9.0, "train_loss": 2.0, "step": updates})
    entries.append({"eval_loss": 0.1, "eval_bleu": 99.0, "step": updates})
    return entries


def pixels_of(color: str, path) -> int:
    """The number of pixels of this colour in the image."""
    image = imread(path)[..., :3]
    return int((np.abs(image - np.array(to_rgb(color))).max(-1) < 0.02).sum())


def test_curve_has_losses_and_score(tmp_path) -> None:
    path = plot_curve(history(), tmp_path / "curve.png")
    height, width, _ = imread(path).shape
    assert (width, height) == (1200, 990)
    assert all(pixels_of(color, path) > 200 for color in (TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR))
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_curve_leaves_out_evaluations_after_training() -> None:
    assert _during_training(history(), "eval_bleu")[-1] == (3000, pytest.approx(40 * (1 - np.exp(-3000 / 900))))
    after = [{"train_runtime": 9.0, "step": 60}, {"eval_bleu": 7.0, "step": 60}, {"eval_bleu": 8.0, "step": 60}]
    assert _during_training(after, "eval_bleu") == [(60, 7.0)]


def test_curve_prefers_the_unsmoothed_loss(tmp_path) -> None:
    both = [{**entry, "nll_loss": entry["loss"] - 1} if "loss" in entry else entry for entry in history(1000)]
    alone = [{**entry, "loss": entry["loss"] - 1} if "loss" in entry else entry for entry in history(1000)]
    images = [imread(plot_curve(each, tmp_path / "curve.png")) for each in (both, alone, history(1000))]
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])


def test_curve_refuses_an_empty_log(tmp_path) -> None:
    assert "logging_steps" in error_of(plot_curve, [{"train_runtime": 1.0, "step": 0}], tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []
