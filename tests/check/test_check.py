"""`python -m scripts.docs.lessons.check` passes right implementations, and names the place of a mistake."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys

import pytest

from hf_vanilla_transformer.utils.errors import UserError
from scripts.docs.lessons.check.checker import check
from scripts.docs.lessons.check.mistakes import MISTAKES
from scripts.docs.lessons.check.sandbox import check_file
from tests.check import more_styles, styles
from tests.conftest import REPOSITORY
from tests.model_helpers import error_of, first_of_each
from tests.test_planted_faults import FAULTS, file_of, plant

CASES = [
    (getattr(module, name), bug, place)
    for module in (styles, more_styles)
    for name, bugs in module.STYLES.items()
    for bug, place in bugs.items()
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested.tensor", "ignore:.*norm_first", "ignore:.*mismatched"
)


def places(report):
    return [mistake.place for mistake in report.mistakes]


@pytest.mark.parametrize(("model", "bug", "place"), first_of_each(CASES, column=2))
@pytest.mark.slow
def test_mistakes_are_named_and_right_code_passes(model, bug, place):
    report = check(model, {"bug": bug})
    assert places(report) == ([place] if place else [])
    assert (report.difference < 1e-5) == (place is None)


PLACES = {
    "encoder ignores the source mask": "padding",
    "cross-attention sees padding": "padding",
    "causal mask is off by one": "causal mask",
    "sines and cosines are swapped": "positions",
    "embeddings are not scaled by sqrt(d_model)": "embedding scale",
    "attention scores are not scaled": "attention scale",
    "output layer is tied to the source embedding": "tying",
    "dropout is active in evaluation": "dropout",
    "layer norm is inside the residual": "residual",
    "pre-norm reads the residual": "residual",
    "cache position is off by one": "cached step",
    "cross-attention cache is extended at each step": "cached step",
    "pre-norm is ignored": "norm position",
    "padding is counted in positions": "positions",
    "none": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_faults_planted_in_this_model_are_named(name, own_modules):
    package = own_modules / "copied_bundle"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in (REPOSITORY / "hf_vanilla_transformer").glob("*_vanilla_transformer.py"):
        shutil.copy(path, package)
    if name in FAULTS:
        file = package / file_of(FAULTS[name])
        file.write_text(plant(file.read_text("utf-8"), FAULTS[name]), "utf-8")
    modeling = importlib.import_module("copied_bundle.modeling_vanilla_transformer")
    configuration = importlib.import_module("copied_bundle.configuration_vanilla_transformer")

    def model(vocab_size, d_model, n_heads, n_layers, d_ff, layer_norm_position="post"):
        config = configuration.VanillaTransformerConfig(
            vocab_size=vocab_size,
            decoder_vocab_size=vocab_size,
            share_encoder_decoder_embeddings=False,
            d_model=d_model,
            encoder_layers=n_layers,
            decoder_layers=n_layers,
            encoder_attention_heads=n_heads,
            decoder_attention_heads=n_heads,
            encoder_ffn_dim=d_ff,
            decoder_ffn_dim=d_ff,
            pad_token_id=0,
            bos_token_id=1,
            decoder_start_token_id=1,
            layer_norm_position=layer_norm_position,
        )
        return modeling.VanillaTransformerForConditionalGeneration(config)

    if PLACES[name] == "dropout":
        assert "dropout" in error_of(check, model, {})
        return
    report = check(model, {"layer_norm_position": "pre"} if "pre-norm" in name else {})
    assert places(report) == ([PLACES[name]] if PLACES[name] else [])


def test_every_planted_fault_of_the_model_is_tried():
    text = (REPOSITORY / "tests" / "planted_faults.txt").read_text("utf-8")
    _, _, model = text.partition("# The model\n\n")
    model, _, _ = model.partition("# The loss")
    assert {name for name in FAULTS if f"{name}\n" in model} == PLACES.keys() - {"none"}


def test_right_differences_are_noted():
    notes = " ".join(check(styles.make_model, {}).notes)
    for what in ("pre-norm", "unbiased", "log-prob"):
        assert what in notes
    assert "GELU" in " ".join(check(styles.LearnedTransformer, {}).notes)
    assert not check(styles.Transformer, {}).notes


def test_unknown_mistake_is_located():
    (mistake,) = check(styles.Strange, {}).mistakes
    assert mistake.place.startswith("encoder layer 2")


PARTS = {
    "PositionalEncoding": [None, "exponent", "swapped"],
    "MultiHeadAttention": [None, "split", "merge", "scale", "softmax", "mask"],
    "EncoderLayer": [None, "residual", "width"],
    "Norm": [None, "norm"],
}


@pytest.mark.parametrize(
    ("name", "bug"), [(name, bug) for name, bugs in PARTS.items() for bug in bugs]
)
def test_parts_are_checked_alone(name, bug):
    place = (styles.CLASSES | styles.FUNCTIONS)[bug]
    report = check(getattr(styles, name), {"bug": bug})
    assert places(report) == ([place] if place else [])


@pytest.mark.parametrize(
    "name", ["TimeNormed", "SharedNorm", "PreNormTransformer2", "ShiftTwice", "LossyLayers"]
)
def test_whole_models_of_any_name_are_whole(name):
    named = type(name, (styles.Transformer,), {})
    assert places(check(named, {})) == []
    assert places(check(named, {"bug": "embedding"})) == ["embedding scale"]


def test_part_of_another_name_is_refused_with_the_reason():
    named = type("HeadNorm", (styles.MultiHeadAttention,), {})
    assert "as what its name says (norm)" in error_of(check, named, {})


def test_dropout_in_eval_mode_is_refused():
    assert "dropout" in error_of(check, styles.Transformer, {"bug": "dropout"})


def test_every_mistake_has_its_own_name():
    names = {(mistake.place, mistake.option) for mistake in MISTAKES}
    assert len(names) == len(MISTAKES)


HEAD = "import torch\nfrom torch import nn\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: pass", "2 seconds"),
        ("import sys; sys.exit(3)", "exit"),
        ("import os; os._exit(3)", "status 3"),
        ("open('harm', 'w').write('x')", "write"),
        ("import pathlib; pathlib.Path('harm').touch()", "write"),
        ("import os; os.system('touch harm')", "os.system"),
        ("import subprocess; subprocess.run(['touch', 'harm'])", "subprocess.Popen"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "socket.connect"),
        ("try:\n    open('harm', 'w')\nexcept Exception: pass", "write"),
        ("1 / 0", "ZeroDivisionError"),
        ("class Other: pass", "Other"),
        ("class Model(nn.Module):\n    def __init__(self, colour): super().__init__()", "colour"),
        ("class Model(nn.Module): pass", "layers"),
        ("def Model(): return 3", "int"),
    ],
)
@pytest.mark.slow
def test_code_that_cannot_be_checked_gives_one_line(code, message, tmp_path, in_tmp_path):
    (tmp_path / "mine.py").write_text(HEAD + code + "\n")
    with pytest.raises(UserError, match=message) as error:
        check_file("mine.py", "Model", {}, seconds=2 if "while" in code else 60)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()


@pytest.mark.slow
def test_command_runs_in_any_folder(tmp_path):
    (tmp_path / "mine.py").write_text(inspect.getsource(styles))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    for setting, status, text in (
        (["--set", "bug=scale"], 1, "§3.2.1"),
        ([], 0, "equals the paper"),
    ):
        command = [
            sys.executable,
            "-m",
            "scripts.docs.lessons.check",
            "mine.py:Transformer",
            *setting,
        ]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == status
        assert text in ended.stdout
