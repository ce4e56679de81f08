"""`vanilla-transformer attention`: plots without a display, and errors."""

import pytest

from tests.trainer_helpers import as_flags

pytestmark = pytest.mark.usefixtures("drawn_figures")

SENTENCE = "two hundred and one"


@pytest.fixture
def run(command, in_tmp_path, tmp_path):
    """Run the subcommand with flags. Return exit status, standard output and standard error."""
    return lambda **flags: command("attention", *as_flags(flags))


def test_plot_without_a_display(run, model_folder, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="it comes with the extra 'plot'")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(matplotlib.rcParams, "backend", "TkAgg")  # as MPLBACKEND sets it
    status, printed, errors = run(
        model=model_folder, sentence=SENTENCE, translation="zweihunderteins", output="attention.png"
    )
    assert (status, printed) == (0, "attention.png\n"), errors
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams["backend"] == "TkAgg"  # the user's plots keep it


def test_layer_and_default_translation(run, model_folder, tmp_path):
    status, printed, errors = run(
        model=model_folder, sentence="two", layer=1, output="a.svg", device="cpu"
    )
    assert (status, printed) == (0, "a.svg\n"), errors
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer": 3}, "layer: "),
        ({"sentence": " "}, "sentence: "),
        ({"output": "a.docx"}, "a.docx: "),
        ({"output": "no/such/a.png"}, "no/such"),
        ({"model": "missing"}, "missing: "),
        ({"device": "cuda:99"}, "device: 'cuda:99'"),
    ],
)
def test_invalid_arguments_are_one_line_errors(run, model_folder, wrong, message):
    right = {"model": model_folder, "sentence": SENTENCE, "translation": "eins", "output": "a.png"}
    status, printed, errors = run(**right | wrong)
    assert status == 2 and printed == ""
    assert errors.startswith("error: ") and message in errors
