"""`vanilla-transformer attention`: plots without a display, and errors."""

import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import cross_attention
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
    status, printed, errors = run(model=model_folder, sentence="two", layer=1, output="a.svg", device="cpu")
    assert (status, printed) == (0, "a.svg\n"), errors
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_numbers_are_printed_without_a_plot(run, model_folder):
    status, printed, errors = run(model=model_folder, sentence=SENTENCE, translation="zweihunderteins", layer=1)
    assert status == 0, errors
    translator = Translator.from_pretrained(model_folder, "cpu")
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    source, target, weights = cross_attention(translator.model, *tokenizers, SENTENCE, "zweihunderteins")
    header, *rows = (line.split("\t") for line in printed.splitlines())
    assert header == ["", *source] and [row[0] for row in rows] == target
    numbers = torch.tensor([[float(cell) for cell in row[1:]] for row in rows])
    torch.testing.assert_close(numbers, weights[0].mean(dim=0), atol=1e-4, rtol=0)


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
