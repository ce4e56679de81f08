"""Figures as files: formats, refused paths, and the user's matplotlib settings."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.utils.plotting import check_figure_path, figure_file
from tests.model_helpers import error_of

pytestmark = pytest.mark.usefixtures("drawn_figures")

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed; it comes with the extra 'plot'")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("PDF", b"%PDF"), ("svg", b"<?xml")])
def test_figure_file_has_the_format_of_its_suffix(tmp_path: Path, suffix: str, start: bytes) -> None:
    with figure_file(tmp_path / f"a.{suffix}", figsize=(2, 1)) as figure:
        figure.subplots().plot([1, 2])
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{suffix}"]
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)


def test_figure_file_limits_the_pixels_of_a_large_figure(tmp_path: Path) -> None:
    with figure_file(tmp_path / "a.png", figsize=(200, 1)):
        pass
    assert 11_990 < int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big") <= 12_000
    with figure_file(tmp_path / "a.png", figsize=(2, 1)):
        pass
    assert int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big") == 300
    assert error_of(check_figure_path, "a.xyz").startswith("a.xyz: matplotlib cannot write this format: name it .png")


def test_figure_file_restores_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "backend", "TkAgg")
    before = dict(matplotlib.rcParams)
    with figure_file(tmp_path / "a.png"):
        pass
    assert dict(matplotlib.rcParams) == before
