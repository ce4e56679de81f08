"""Untrusted files may be damaged or malicious: the error is one line, nothing is run, and nothing is written."""

import importlib
import io
import logging
import os
import pickle
import random
import re
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_vanilla_transformer.interop import converting
from hf_vanilla_transformer.interop.converting import FORMATS, convert
from hf_vanilla_transformer.interop.state_dicts import read_torch_file
from hf_vanilla_transformer.utils.errors import DiskFull
from tests.interop.checkpoints import eole, fairseq, joeynmt, marian_npz, opennmt, torch_transformer
from tests.interop.checkpoints.torch_transformer import TUTORIAL_OPTIONS
from tests.interop.foreign import Record, write_fsmt_folder, write_m2m100_folder, write_opus_folder
from tests.model_helpers import error_of, randomise

Tensors = dict[str, Tensor]


@dataclass
class Format:
    """How a good checkpoint of a format is written, and its tensors changed.

    Attributes:
        write: into a folder. Returns the input of the conversion, and the file of the weights.
        key: of the tensors in that file.
        embedding: the name of an embedding matrix. linear: of another matrix.
    """

    write: Callable[[Path], tuple[Path, Path]]
    embedding: str
    linear: str
    key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def change(self, path: Path, change: Callable[[Tensors], object]) -> None:
        if path.suffix == ".npz":
            arrays = dict(np.load(path))
            options = {"special:model.yml": arrays.pop("special:model.yml")}
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            change(tensors)
            np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()}, **options)
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            whole = read_torch_file(path)
            change(whole[self.key] if self.key else whole)
            torch.save(whole, path)


def saved_model(folder: Path, file: str, save: Callable[[Path], object]) -> tuple[Path, Path]:
    """A checkpoint that is one file."""
    save(folder / file)
    return folder / file, folder / file


def saved_folder(folder: Path, file: str, save: Callable[[Path], object]) -> tuple[Path, Path]:
    save(folder)
    return folder, folder / file


def save_state_dict(path: Path) -> None:
    model = torch_transformer.AroundTorch(torch_transformer.PYTORCH_TUTORIAL)
    torch.save(randomise(model).state_dict(), path)


def save_joeynmt(folder: Path) -> None:
    joeynmt.save(folder, joeynmt.weights((7, 6)))


SAFETENSORS, FFN = "model.safetensors", "model.encoder.layers.0.fc1.weight"
CASES = {
    "marian": Format(
        lambda to: saved_folder(to, SAFETENSORS, write_opus_folder),
        "model.shared.weight",
        FFN,
    ),
    "fsmt": Format(
        lambda to: saved_folder(to, SAFETENSORS, write_fsmt_folder),
        "model.encoder.embed_tokens.weight",
        FFN,
    ),
    "m2m100": Format(
        lambda to: saved_folder(
            to / "m2m", SAFETENSORS, lambda folder: write_m2m100_folder(folder, tokenizer=False)
        ),
        "model.shared.weight",
        FFN,
    ),
    "opennmt": Format(
        lambda to: saved_model(
            to, "model.pt", lambda path: opennmt.save(path, *opennmt.weights((9, 8)))
        ),
        "encoder.embeddings.make_embedding.emb_luts.0.weight",
        "encoder.transformer.0.feed_forward.w_1.weight",
        "model",
    ),
    "eole": Format(
        lambda to: saved_folder(
            to, "model.00.safetensors", lambda folder: eole.save(folder, eole.weights())
        ),
        "src_emb.embeddings.weight",
        "encoder.transformer_layers.0.mlp.gate_up_proj.weight",
    ),
    "torch": Format(
        lambda to: saved_model(to, "model.pt", save_state_dict),
        "src_tok_emb.embedding.weight",
        "transformer.encoder.layers.0.linear1.weight",
        options={"heads": 4, **TUTORIAL_OPTIONS},
    ),
    "fairseq": Format(
        lambda to: saved_model(
            to, "model.pt", lambda path: fairseq.save(path, fairseq.weights(23, 29))
        ),
        "encoder.embed_tokens.weight",
        "encoder.layers.0.fc1.weight",
        "model",
    ),
    "marian-npz": Format(
        lambda to: saved_model(
            to, "model.npz", lambda path: marian_npz.save(path, marian_npz.weights((23, 23)))
        ),
        "Wemb",
        "encoder_l1_ffn_W1",
    ),
    "joeynmt": Format(
        lambda to: saved_folder(to, "best.ckpt", save_joeynmt),
        "src_embed.lut.weight",
        "encoder.layers.0.feed_forward.pwff_layer.0.weight",
        "model_state",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A checkpoint of every format that can be converted."""
    return {name: case.write(tmp_path_factory.mktemp(name)) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def copied(request: pytest.FixtureRequest, good: dict, tmp_path: Path) -> tuple[str, Path, Path]:
    """The format, and a copy of its checkpoint: the input of the conversion, and the file of the weights."""
    source, weights = good[request.param]
    folder = source if source.is_dir() else source.parent
    shutil.copytree(folder, tmp_path / "in")
    copy = tmp_path / "in"
    return request.param, copy / source.relative_to(folder), copy / weights.relative_to(folder)


Refused = Callable[[str, Path], str]


@pytest.fixture
def assert_refused(record_property: Record) -> Refused:
    """Convert a bad file: returns the one-line error, after checking that no files are left."""

    def check(name: str, source: Path) -> str:
        folder = source.parent if source.is_file() else source
        output = folder.with_name("out") / "model"
        message = error_of(convert, name, source, output, **CASES[name].options)
        assert message
        assert len(message) < 600
        assert not [*output.parent.glob("*")]
        record_property("bad file", name)
        return message

    return check


def test_untrusted_cases_cover_every_format() -> None:
    assert set(CASES) == set(FORMATS)


def test_untrusted_complete_files_are_converted(
    copied: tuple[str, Path, Path], tmp_path: Path
) -> None:
    name, source, _ = copied
    convert(name, source, tmp_path / "out", **CASES[name].options)
    assert (tmp_path / "out" / "model.safetensors").is_file()


WRONG_CONTENTS = [
    *(0, 20, 0.6, 0.98),
    b"<!DOCTYPE html><title>404</title>",
    b"PK\x03\x04" * 99,
    None,
]


@pytest.mark.parametrize("left", WRONG_CONTENTS)
def test_untrusted_files_that_are_cut_missing_or_of_another_kind(copied, left, assert_refused):
    name, source, weights = copied
    content = weights.read_bytes()
    if left is None:
        weights.unlink()
    elif isinstance(left, bytes):
        weights.write_bytes(left)
    else:
        weights.write_bytes(content[: int(left if left >= 1 else left * len(content))])
    assert_refused(name, source)


def replace(tensors: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


def quantised(tensor: Tensor) -> Tensor:
    return (100 * tensor).to(torch.int8)


CHANGES: dict[str, Callable[[Tensors, Format], object]] = {
    "missing": lambda tensors, case: tensors.pop(case.linear),
    "surplus": lambda tensors, case: tensors.update(
        {"encoder.layers.0.adapter.weight": torch.ones(3)}
    ),
    "transposed": lambda tensors, case: replace(tensors, case.linear, lambda weight: weight.T),
    "narrower": lambda tensors, case: replace(tensors, case.embedding, lambda table: table[:, :-1]),
    "flat": lambda tensors, case: replace(tensors, case.embedding, torch.flatten),
    "not finite": lambda tensors, case: replace(tensors, case.linear, lambda weight: weight / 0.0),
    "quantised": lambda tensors, case: [replace(tensors, name, quantised) for name in tensors],
    "partly quantised": lambda tensors, case: replace(tensors, case.linear, quantised),
}


@pytest.mark.parametrize("change", CHANGES)
def test_untrusted_tensors_that_do_not_fit(copied, change, assert_refused):
    name, source, weights = copied
    CASES[name].change(weights, lambda tensors: CHANGES[change](tensors, CASES[name]))
    assert_refused(name, source)


class Attack:
    """Unpickling it creates a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def attack(path: Path, mark: Path, way: str) -> None:
    if path.suffix == ".npz":
        with io.BytesIO() as plain:
            pickle.dump(Attack(mark), plain)
            np.savez(path, **{"special:model.yml": np.array([Attack(mark)], dtype=object)})
            if way == "pickle":
                path.write_bytes(plain.getvalue())
        return
    content = {"model": Attack(mark), "model_state": Attack(mark), "generator": {}, "opt": {}}
    if way == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=way == "torch")


@pytest.mark.parametrize("way", ["pickle", "torch", "old torch"])
def test_untrusted_code_is_not_run(copied, way, tmp_path, assert_refused):
    name, source, weights = copied
    if weights.suffix == ".safetensors":  # older folders have this instead
        weights.unlink()
        weights = weights.with_name("pytorch_model.bin")
    attack(weights, tmp_path / "mark", way)
    message = assert_refused(name, source)
    assert not (tmp_path / "mark").exists()
    if way != "pickle" and weights.suffix in (".pt", ".ckpt"):
        assert "system" in message
    if weights.suffix == ".npz" and way != "pickle":
        attack(weights, tmp_path / "mark", way)
        np.load(weights, allow_pickle=True)["special:model.yml"]
    elif way == "pickle":
        pickle.loads(weights.read_bytes())  # the attack is a real one
    else:
        torch.load(weights, weights_only=False)
    assert (tmp_path / "mark").exists()


class Settings:
    """Stands for a class of another library: also an OmegaConf node, a logger, a vocabulary of torchtext."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


class Attributes(dict):
    """Like Lightning's hyperparameters."""


class Lines(list):
    """Like OmegaConf's lists."""


def tokenize(text: str) -> list[str]:
    return text.split()


HARMLESS: dict[str, Any] = {
    "NumPy's numbers": [np.float64(2.5), np.int32(1), np.bool_(True), np.str_("x")],
    "NumPy's arrays": [np.arange(6.0).reshape(2, 3), np.array(["a"]), np.array([{}], dtype=object)],
    "random states": [
        np.random.get_state(),
        np.random.default_rng(1),
        random.Random(1),
        torch.Generator(),
    ],
    "paths and dates": [
        Path("x"),
        datetime.now(),
        timedelta(1),
        datetime.now(timezone.utc),
        Decimal(1),
    ],
    "collections": [
        defaultdict(list, {"a": [1]}),
        deque([1], maxlen=3),
        Counter("ab"),
        {1},
        frozenset([2]),
        range(3),
    ],
    "values": [
        slice(1, 2),
        1j,
        b"bytes",
        bytearray(b"x"),
        re.compile("a+"),
        SimpleNamespace(a=1),
        int,
    ],
    "objects": [
        Settings(a=Settings()),
        Attributes(a=1),
        Lines([1]),
        Namespace(lr=np.float32(1), to=Path("x")),
    ],
    "functions": [tokenize, partial(tokenize, "a b"), torch.nn.functional.gelu],
    "optimizers": [
        torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]),
        torch.device("cpu"),
        torch.float16,
    ],
    "modules": [torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", HARMLESS)
def test_read_torch_file_skips_harmless_objects(name, zipped, tmp_path, monkeypatch):
    if name == "modules" and not zipped:
        pytest.skip("torch.save stored the code of modules then")
    library: Any = ModuleType("some_library")
    for thing in (Settings, Attributes, Lines, tokenize):
        setattr(library, thing.__name__, thing)
        monkeypatch.setattr(thing, "__module__", "some_library")
    content = {
        "model": {"w": torch.arange(3.0)},
        "args": Namespace(a=1),
        "n": [1, "x", None],
        "extra": HARMLESS[name],
    }
    with monkeypatch.context() as installed:
        installed.setitem(sys.modules, "some_library", library)
        torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    whole = read_torch_file(tmp_path / "model.pt")
    assert whole["model"]["w"].tolist() == [0, 1, 2]
    assert whole["args"] == Namespace(a=1)
    assert whole["n"] == [1, "x", None]
    assert len(whole["extra"]) == len(HARMLESS[name])
    assert not any(isinstance(part, Settings | Attributes | Lines) for part in whole["extra"])


class Call:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize(
    "function",
    [
        os.system,
        subprocess.Popen,
        eval,
        exec,
        open,
        shutil.rmtree,
        runpy.run_path,
        importlib.import_module,
        getattr,
        compile,
        np.load,
        torch.load,
        torch.hub.load,
        logging.FileHandler,
        pickle.loads,
        read_torch_file,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("zipped", [True, False])
def test_read_torch_file_refuses_calls_of_functions(
    function: Callable, zipped: bool, model_file: Path, tmp_path: Path
) -> None:
    call = Call(function, str(tmp_path / "mark"))
    content = {"model": {"w": torch.ones(1)}, "extra": [np.float64(1), call]}
    torch.save(content, model_file, _use_new_zipfile_serialization=zipped)
    assert re.search(r"contains [\w.]+", error_of(read_torch_file, model_file))
    assert [*tmp_path.iterdir()] == [model_file]


def test_conversion_on_a_full_disk_leaves_no_files(good, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converting, "save_tokenizers", full)
    with pytest.raises(DiskFull, match="no space left"):
        convert("marian", good["marian"][0], tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []
