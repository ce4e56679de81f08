"""`python -m tests.interop.real_toolkits WORK [NAME …]` trains with real toolkits and compares their conversions.

Run it by hand, before a release: each toolkit is installed in the folder WORK, with the torch of this environment,
trains 50 updates on reversed letters, and its checkpoint is converted. It prints the largest difference of a logit in
the 50 test pairs, and how many of its translations with 5 beams are the same. It needs PyPI, and minutes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hf_vanilla_transformer.data.tokenizer_training import load_tokenizers
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.markdown import markdown_table

UPDATES, SENTENCES, BEAMS = 50, 50, 5
# What the toolkits import besides torch and themselves; they are installed without their own requirements.
SHARED = [
    *("numpy", "pyyaml", "sentencepiece", "sacremoses", "subword-nmt", "sacrebleu", "packaging", "pandas", "plotly"),
    *("tensorboard", "datasets", "matplotlib", "seaborn", "importlib_metadata"),
]

# JoeyNMT's logits for token ids; its arguments are the configuration, the ids and the result.
JOEYNMT_LOGITS = """
import json, sys, numpy, torch
from joeynmt.config import load_config, parse_global_args
from joeynmt.prediction import prepare
model, *_ = prepare(parse_global_args(load_config(sys.argv[1]), rank=0, mode="test"), rank=0, mode="test")
model.eval()
found = {}
with torch.no_grad():
    for number, (source, target) in enumerate(json.load(open(sys.argv[2]))):
        ids, mask = torch.tensor([source]), torch.ones(1, 1, len(source), dtype=torch.bool)
        states = model(return_type="encode", src=ids, src_length=torch.tensor([len(source)]), src_mask=mask)[0]
        given = dict(encoder_output=states, encoder_hidden=None, src_mask=mask, unroll_steps=None, decoder_hidden=None)
        written = torch.tensor([target])
        trg_mask = torch.ones(1, 1, len(target), dtype=torch.bool)
        found[str(number)] = model(return_type="decode", trg_input=written, trg_mask=trg_mask, **given)[0][0].numpy()
numpy.savez(sys.argv[3], **found)
"""


def run(work: Path, package: str, *command: object) -> None:
    """A command of the environment's Python, with the toolkit on its path."""
    environment = os.environ | {"PYTHONPATH": str(work / package), "OMP_NUM_THREADS": "1"}
    python = work / "environment" / "bin" / "python"
    subprocess.run([python, *map(str, command)], check=True, env=environment, stdout=subprocess.DEVNULL)


def install(work: Path, package: str) -> None:
    """An environment with the torch of this one, and the toolkit in a folder beside it."""
    pip = ("-m", "pip", "install", "-q")
    if not (work / "environment").is_dir():
        subprocess.run([sys.executable, "-m", "venv", work / "environment"], check=True)
        run(work, package, *pip, f"torch=={version('torch').partition('+')[0]}")
        run(work, package, *pip, *SHARED)
    if not (work / package).is_dir():
        run(work, package, *pip, "--no-deps", "--target", work / package, package)


def write_corpus(folder: Path) -> None:
    """Letters and their reverse: train.en, train.de and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for name, count in (("train", 400), ("dev", SENTENCES), ("test", SENTENCES)):
        lines = [[draw.choice("abcdefghij") for _ in range(draw.randint(2, 8))] for _ in range(count)]
        for language, step in (("en", 1), ("de", -1)):
            text = "".join(" ".join(line[::step]) + "\n" for line in lines)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def joeynmt_options(folder: Path, layer_norm: str) -> dict[str, Any]:
    side = {"max_length": 20, "lowercase": False, "normalize": False, "level": "word", "voc_min_freq": 1}
    stack = {"type": "transformer", "num_layers": 2, "num_heads": 4, "hidden_size": 32, "ff_size": 64, "dropout": 0.1}
    stack |= {"embeddings": {"embedding_dim": 32, "scale": True}, "layer_norm": layer_norm}
    corpus = {name: str(folder / name) for name in ("train", "dev", "test")}
    search = {"beam_size": BEAMS, "beam_alpha": 1.0, "max_output_length": 20, "batch_size": 10}
    steps = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 32, "updates": UPDATES, "epochs": 100}
    steps |= {"validation_freq": UPDATES, "logging_freq": UPDATES, "overwrite": True}
    # its others pass arguments that torch no longer has
    steps |= {"scheduling": "noam", "learning_rate_factor": 0.5, "learning_rate_warmup": 20}
    return {
        **{"name": "reverse", "model_dir": str(folder / layer_norm), "use_cuda": False, "random_seed": 1},
        "data": {**corpus, "dataset_type": "plain", "src": {"lang": "en", **side}, "trg": {"lang": "de", **side}},
        "testing": search,
        "training": steps,
        "model": {"tied_softmax": True, "encoder": stack, "decoder": stack},
    }


def compare_joeynmt(work: Path, layer_norm: str) -> tuple[float, int]:
    """The largest difference of a logit, and the number of equal translations."""
    package, folder = "joeynmt==2.3.0", work / "joeynmt"
    install(work, package)
    write_corpus(folder)
    config = folder / f"{layer_norm}.yaml"
    config.write_text(yaml.safe_dump(joeynmt_options(folder, layer_norm)))
    run(work, package, "-m", "joeynmt", "train", config, "--skip-test")
    run(work, package, "-m", "joeynmt", "test", config, "--output-path", folder / f"{layer_norm}.out")
    convert("joeynmt", folder / layer_norm, folder / f"{layer_norm}.model", overwrite=True)
    model = load_model(folder / f"{layer_norm}.model", "cpu").eval()
    source, target = load_tokenizers(folder / f"{layer_norm}.model")
    sides = [(folder / f"test.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
    start = model.config.decoder_start_token_id
    ids = [[source(a)["input_ids"], [start, *target(b)["input_ids"][:-1]]] for a, b in zip(*sides, strict=True)]
    (folder / "ids.json").write_text(json.dumps(ids))
    run(work, package, "-c", JOEYNMT_LOGITS, config, folder / "ids.json", folder / "logits.npz")
    largest, same = 0.0, 0
    expected, lines = np.load(folder / "logits.npz"), (folder / f"{layer_norm}.out.test").read_text().splitlines()
    with torch.inference_mode():
        for number, (each, line) in enumerate(zip(ids, lines, strict=True)):
            given = {"input_ids": torch.tensor([each[0]])}
            logits = model(**given, decoder_input_ids=torch.tensor([each[1]])).logits[0].numpy()
            largest = max(largest, float(np.abs(logits - expected[str(number)]).max()))
            same += target.decode(model.generate(**given)[0], skip_special_tokens=True) == line
    return largest, same


TOOLKITS: dict[str, Callable[[Path], tuple[float, int]]] = {
    "JoeyNMT 2.3.0, post": lambda work: compare_joeynmt(work, "post"),
    "JoeyNMT 2.3.0, pre": lambda work: compare_joeynmt(work, "pre"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for environments and trainings")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(TOOLKITS)}; default: all")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.names or TOOLKITS:
        difference, same = TOOLKITS[name](work)
        rows.append([name, f"{difference:.1e}", f"{same} of {SENTENCES}"])
    print(markdown_table(["toolkit", "logits differ by", f"same translations, {BEAMS} beams"], rows))


if __name__ == "__main__":
    main()
