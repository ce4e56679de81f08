"""Figures as files: formats, refused paths, and the user's matplotlib settings."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.utils.plotting import check_figure_path, figure_file
from tests.model_helpers import error_of

pytestmark = pytest.mark.usefixtures("drawn_figures")

matplotlib = pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed; it comes with the extra 'plot'"
)


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("PDF", b"%PDF"), ("svg", b"<?xml")]
)
def test_figure_file_has_the_format_of_its_suffix(
    tmp_path: Path, suffix: str, start: bytes
) -> None:
    path = tmp_path / f"a.{suffix}"
    with figure_file(path, figsize=(2, 1)) as figure:
        figure.subplots().plot([1, 2])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes().startswith(start)


def test_figure_file_limits_the_pixels_of_a_large_figure(tmp_path: Path) -> None:
    def pixels(inches: int) -> int:
        path = tmp_path / "a.png"
        with figure_file(path, figsize=(inches, 1)):
            pass
        return int.from_bytes(path.read_bytes()[16:20], "big")

    assert 11_990 < pixels(200) <= 12_000
    assert pixels(2) == 300


def test_format_that_matplotlib_cannot_write_is_refused() -> None:
    error = error_of(check_figure_path, "a.xyz")
    assert error.startswith("a.xyz: matplotlib cannot write this format: name it .png")


def test_figure_file_restores_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "backend", "TkAgg")
    before = dict(matplotlib.rcParams)
    with figure_file(tmp_path / "a.png"):
        pass
    assert dict(matplotlib.rcParams) == before
