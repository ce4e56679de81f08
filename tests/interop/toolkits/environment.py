"""Shared by the comparisons: an environment for old toolkits, a small corpus, and the comparison itself."""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_vanilla_transformer.inference.loading import load_model

UPDATES, SENTENCES, BEAMS = 150, 50, 5

# Packages that the toolkits import besides torch and themselves. They are installed without their own requirements.
SHARED = [
    *(
        "numpy",
        "pyyaml",
        "sentencepiece",
        "sacremoses",
        "subword-nmt",
        "sacrebleu",
        "packaging",
        "pandas",
        "plotly",
    ),
    *(
        "tensorboard",
        "datasets",
        "matplotlib",
        "seaborn",
        "importlib_metadata",
        "configargparse",
        "six",
        "requests",
    ),
    *(
        "flask",
        "waitress",
        "pyonmttok",
        "rapidfuzz",
        "pyahocorasick",
        "ctranslate2",
        "hydra-core",
        "omegaconf",
    ),
    *("cython", "setuptools", "bitarray", "regex", "cffi", "portalocker", "onnxruntime"),
    *("safetensors", "tokenizers", "pydantic", "rich", "aiohttp", "fastapi", "uvicorn"),
]

# Toolkits of 2019 on today's Python: names that NumPy no longer has, dataclasses that Python 3.11 refuses as defaults,
# compiled parts, and imports that are not used here.
SHIM = """
import builtins, dataclasses, importlib.abc, importlib.machinery, sys, types
import numpy
for name in ("float", "int", "bool", "object"):
    if name not in vars(numpy):
        setattr(numpy, name, getattr(builtins, name))

def batches(indices, lengths, max_tokens, max_sentences, multiple):
    return [indices[start : start + max_sentences] for start in range(0, len(indices), max_sentences)]

class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        libraries = {"spacy", "fasttext", "stanza", "sklearn", "scipy"}
        root = name.partition(".")[0]
        is_missing = root in libraries and importlib.machinery.PathFinder.find_spec(root) is None
        is_known = name == "fairseq.data.data_utils_fast" or is_missing
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_known else None
    def create_module(self, spec):
        return types.ModuleType(spec.name)
    def exec_module(self, module):
        def lookup(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return batches if name.startswith("batch") else type(name, (), {})
        module.__getattr__ = lookup

sys.meta_path.insert(0, Replaced())
plain = dataclasses.dataclass

def hashable(cls=None, **options):
    if cls is None:
        return lambda each: hashable(each, **options)
    return plain(cls, **options, **({"unsafe_hash": True} if cls.__module__.startswith("fairseq") else {}))

dataclasses.dataclass = hashable
"""


def run(work: Path, packages: list[str], *command: object) -> str:
    """A command of the environment's Python, with the packages on its path. Returns its output."""
    paths = [work / "shim", *(work / package for package in packages)]
    # the toolkits load the pickles that they wrote themselves
    trusting = {
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    environment = os.environ | trusting | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    python = work / "environment" / "bin" / "python"
    done = subprocess.run(
        [python, *map(str, command)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def install(work: Path, *packages: str, pip_options: tuple[str, ...] = ()) -> None:
    """An environment with the torch of this one, and each package in a folder beside it."""
    pip = ("-m", "pip", "install", "-q")
    wanted = [f"torch=={version('torch').partition('+')[0]}", *SHARED]
    # written last, so that an installation that was cut, or had other packages, is completed
    installed = work / "environment" / "installed.txt"
    if not installed.is_file() or installed.read_text().splitlines() != wanted:
        subprocess.run([sys.executable, "-m", "venv", work / "environment"], check=True)
        run(work, [], *pip, *wanted)
        installed.write_text("\n".join(wanted))
    (work / "shim").mkdir(exist_ok=True)
    (work / "shim" / "sitecustomize.py").write_text(SHIM)
    for package in packages:
        if not (work / package).is_dir():
            run(work, [], *pip, "--no-deps", "--target", work / package, *pip_options, package)


def install_source(work: Path, package: str) -> None:
    """The same for a toolkit whose compiled parts cannot be built: its source as it is."""
    install(work)
    if (work / package).is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        pip_options = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", folder)
        run(work, [], "-m", "pip", "download", "-q", *pip_options, package)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        shutil.move(next(path for path in Path(folder).iterdir() if path.is_dir()), work / package)


def write_corpus(folder: Path) -> None:
    """Letters and their reverse: train.en, train.de and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for name, count in (("train", 400), ("dev", SENTENCES), ("test", SENTENCES)):
        lines = [
            [draw.choice("abcdefghij") for _ in range(draw.randint(2, 8))] for _ in range(count)
        ]
        for language, step in (("en", 1), ("de", -1)):
            text = "".join(" ".join(line[::step]) + "\n" for line in lines)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def compare(model_folder: Path, dumped: Path, lines: list[str], **search: Any) -> tuple[float, int]:
    """The largest difference of a logit, and the number of equal translations.

    Args:
        model_folder: of the conversion.
        dumped: NAME.json with the `pairs` of source and decoder input ids and the target `tokens` by id, and NAME.npz
            with the toolkit's logits of pair "0", "1" and so on, each (T, vocabulary).
        lines: the toolkit's translations. **search: of `generate`, where it differs from what was converted.
    """
    model = load_model(model_folder, "cpu").eval()
    content = json.loads(dumped.read_text(encoding="utf-8"))
    expected, special = (
        np.load(dumped.with_suffix(".npz")),
        {model.config.eos_token_id, model.config.pad_token_id},
    )
    largest, same = 0.0, 0
    with torch.inference_mode():
        for number, ((source, target), line) in enumerate(
            zip(content["pairs"], lines, strict=True)
        ):
            given = {"input_ids": torch.tensor([source])}
            logits = model(**given, decoder_input_ids=torch.tensor([target])).logits[0].numpy()
            largest = max(largest, float(np.abs(logits - expected[str(number)]).max()))
            written = model.generate(**given, num_beams=BEAMS, **search)[0, 1:].tolist()
            ours = " ".join(content["tokens"][each] for each in written if each not in special)
            same += ours == line.strip()
    assert len(set(lines)) > SENTENCES // 10, (
        f"{model_folder}: the translations hardly differ from each other"
    )
    return largest, same
