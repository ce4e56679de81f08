"""The training curve, a plot of the logged losses and scores, written atomically."""

import math

import numpy as np
import pytest

from hf_vanilla_transformer.evaluation import plots
from hf_vanilla_transformer.evaluation.plots import (
    EVAL_COLOR,
    SCORE_COLOR,
    TRAIN_COLOR,
    _during_training,
    _points,
    plot_curve,
)

pytest.importorskip("matplotlib", reason="plots need matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests.evaluation.figures import texts_of
from tests.model_helpers import error_of


def history(updates: int = 3000) -> list[dict]:
    """The log of `Trainer`: losses often, evaluations seldom, the summary of training, and an evaluation after it."""
    entries: list[dict] = []
    for step in range(50, updates + 1, 50):
        entries.append(
            {
                "loss": 1.3 + 6 * np.exp(-step / 500),
                "learning_rate": 1e-3,
                "epoch": 0.1,
                "step": step,
            }
        )
        if step % 500 == 0:
            bleu = 40 * (1 - np.exp(-step / 900))
            entries.append(
                {
                    "eval_loss": 1.6 + 5 * np.exp(-step / 500),
                    "eval_bleu": bleu,
                    "step": step,
                }
            )
    entries.append({"train_runtime": 9.0, "train_loss": 2.0, "step": updates})
    entries.append({"eval_loss": 0.1, "eval_bleu": 99.0, "step": updates})
    return entries


@pytest.mark.usefixtures("drawn_figures")
def test_curve_is_drawn_in_its_colours(tmp_path) -> None:
    path = plot_curve(history(), tmp_path / "curve.png")
    image = imread(path)[..., :3]
    assert image.shape[:2] == (990, 1200)
    for color in (TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR):
        distance = np.abs(image - np.array(to_rgb(color))).max(-1)
        assert (distance < 0.02).sum() > 200
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def drawn_curve(entries, tmp_path, figures):
    """The figure of a log, and its axes."""
    path = plot_curve(entries, tmp_path / "curve.png")
    assert path == tmp_path / "curve.png"
    figure = figures.pop()
    return figure, figure.axes


def lines_of(axis):
    """Label -> points, of the lines of an axis."""
    return {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}


LOSSES = [{"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}]
SCORES = [
    {"eval_loss": 2.5, "eval_bleu": 30.126, "step": 1200},
    {"eval_bleu": 20.0, "step": 1500},
]


def test_curve_has_losses_above_the_score(tmp_path, figures) -> None:
    figure, (losses, scores) = drawn_curve(LOSSES + SCORES, tmp_path, figures)
    assert figure.get_size_inches().tolist() == pytest.approx(
        [8, 6.6]
    )  # 2.7 inches a panel, 1.2 for the rest
    assert lines_of(losses) == {"training": [[1, 3], [2, 2]], "validation": [[1200, 2.5]]}
    assert lines_of(scores) == {"BLEU": [[1200, 30.126], [1500, 20]]}
    lines = [*losses.get_lines(), *scores.get_lines()]
    assert [line.get_color() for line in lines] == [TRAIN_COLOR, EVAL_COLOR, SCORE_COLOR]
    assert [line.get_marker() for line in lines] == ["", "o", "o"]
    assert {line.get_markersize() for line in lines} == {4}
    assert losses.get_shared_x_axes().joined(losses, scores)
    assert (losses.get_ylabel(), scores.get_ylabel()) == ("Loss", "BLEU")
    assert (losses.get_xlabel(), scores.get_xlabel()) == ("", "Updates")
    assert scores.get_title("right") == "best 30.13 at update 1,200"
    assert texts_of(scores)["best 30.13 at update 1,200"].get_fontsize() == 10
    assert not losses.get_legend().get_frame_on()
    assert scores.get_legend() is None


def test_curve_has_a_grid_and_no_box(tmp_path, figures) -> None:
    for axis in drawn_curve(LOSSES + SCORES, tmp_path, figures)[1]:
        shown = {name for name, spine in axis.spines.items() if spine.get_visible()}
        assert shown == {"left", "bottom"}
        lines = [
            line for line in axis.get_xgridlines() + axis.get_ygridlines() if line.get_visible()
        ]
        assert lines
        assert {(line.get_color(), line.get_linewidth()) for line in lines} == {("0.9", 0.8)}


def test_curve_without_a_score_has_one_panel(tmp_path, figures) -> None:
    figure, (losses,) = drawn_curve(LOSSES[:1], tmp_path, figures)
    assert figure.get_size_inches().tolist() == pytest.approx([8, 3.9])
    assert lines_of(losses) == {"training": [[1, 3]]}
    assert losses.get_lines()[0].get_marker() == "o"  # a line needs two points to be visible
    assert losses.get_xlabel() == "Updates"
    low, high = losses.get_xlim()
    assert [tick for tick in losses.get_xticks() if low <= tick <= high] == [1]


def test_ticks_are_whole_updates(tmp_path, figures) -> None:
    *_, scores = drawn_curve(LOSSES, tmp_path, figures)[1]
    assert all(tick == int(tick) for tick in scores.get_xticks())
    assert scores.xaxis.get_major_formatter()(12345.0) == "12,345"


@pytest.mark.parametrize(
    ("scores", "title"),
    [
        ([10.0, 12.5, 11.0], "best 12.50 at update 2"),
        ([12.5, 12.5, 11.0], "best 12.50 at update 1"),
    ],
)
@pytest.mark.parametrize(
    ("name", "label", "sign"),
    [("bleu", "BLEU", 1), ("exact_match", "exact match", 1), ("ter", "TER", -1)],
)
def test_best_score_is_the_highest_or_of_errors_the_lowest(
    name, label, sign, scores, title, tmp_path, figures
) -> None:
    entries = [
        {f"eval_{name}": sign * score, "step": step} for step, score in enumerate(scores, start=1)
    ]
    losses, axis = drawn_curve(entries, tmp_path, figures)[1]
    assert losses.get_legend() is None  # nothing to explain
    assert axis.get_ylabel() == label
    assert axis.get_title("right") == title.replace("best ", "best -" if sign < 0 else "best ")


def test_first_score_of_the_table_is_drawn(tmp_path, figures) -> None:
    entries = [{"eval_ter": 1.0, "eval_chrf": 2.0, "eval_mine": 3.0, "step": 1}]
    assert lines_of(drawn_curve(entries, tmp_path, figures)[1][1]) == {"chrF": [[1, 2]]}


def test_curve_prefers_the_unsmoothed_loss(tmp_path, figures) -> None:
    both = [{"loss": 3.0, "nll_loss": 2.0, "step": 1}, {"loss": 2.0, "step": 2}]
    (losses,) = drawn_curve(both, tmp_path, figures)[1]
    assert lines_of(losses) == {"training": [[1, 2]]}


def test_points_are_the_first_of_each_step_and_finite() -> None:
    entries = [
        {"loss": 5, "step": 3},
        {"loss": 1.0, "step": 2},
        {"loss": 9.0, "step": 2},
        {"loss": math.nan, "step": 4},
        {"loss": -math.inf, "step": 5},
        {"loss": "none", "step": 6},
        {"step": 7},
    ]
    assert _points(entries, "loss") == [(2, 1.0), (3, 5.0)]


def test_curve_leaves_out_evaluations_after_training() -> None:
    assert _during_training(history(), "eval_bleu")[-1] == (
        3000,
        pytest.approx(40 * (1 - np.exp(-3000 / 900))),
    )
    after = [
        {"train_runtime": 9.0, "step": 60},
        {"eval_bleu": 7.0, "step": 60},
        {"eval_bleu": 8.0, "step": 60},
    ]
    assert _during_training(after, "eval_bleu") == [(60, 7.0)]


def test_curve_refuses_an_empty_log(tmp_path) -> None:
    assert "logging_steps" in error_of(
        plot_curve, [{"train_runtime": 1.0, "step": 0}], tmp_path / "curve.png"
    )
    assert list(tmp_path.iterdir()) == []


def test_colours_are_those_for_colour_blind_readers() -> None:
    """Blue, vermillion and bluish green of Okabe and Ito 2008."""
    colors = [plots.TRAIN_COLOR, plots.EVAL_COLOR, plots.SCORE_COLOR]
    wanted = [(0, 114, 178), (213, 94, 0), (0, 158, 115)]
    assert [tuple(round(255 * part) for part in to_rgb(color)) for color in colors] == wanted
