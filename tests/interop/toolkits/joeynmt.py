"""JoeyNMT, post-norm and pre-norm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop.converting import convert

from .environment import BEAMS, SENTENCES, UPDATES, compare, install, lines_of, run, write_corpus

PACKAGE = "joeynmt==2.3.0"

# Its arguments: the configuration, the source and target text, the result.
LOGITS = """
import json, sys, numpy, torch
from joeynmt.config import load_config, parse_global_args
from joeynmt.prediction import prepare
from joeynmt.search import beam_search
configuration, source, target, result, beams = sys.argv[1:]
model, _, _, test = prepare(parse_global_args(load_config(configuration), rank=0, mode="test"), rank=0, mode="test")
model.eval()
pairs, found, lists = [], {}, []
with torch.no_grad():
    for number, (a, b) in enumerate(zip(open(source), open(target))):
        a = [model.src_vocab.lookup(each) for each in [*a.split(), "</s>"]]
        b = [model.trg_vocab.lookup(each) for each in ["<s>", *b.split()]]
        pairs.append([a, b])
        mask = torch.ones(1, 1, len(a), dtype=torch.bool)
        encoded = dict(src=torch.tensor([a]), src_length=torch.tensor([len(a)]), src_mask=mask)
        states = model(return_type="encode", **encoded)[0]
        given = dict(encoder_output=states, encoder_hidden=None, src_mask=mask, unroll_steps=None, decoder_hidden=None)
        trg_mask = torch.ones(1, 1, len(b), dtype=torch.bool)
        logits = model(return_type="decode", trg_input=torch.tensor([b]), trg_mask=trg_mask, **given)[0]
        found[str(number)] = logits[0].numpy()
        search = dict(beam_size=int(beams), n_best=int(beams), max_output_length=20, alpha=1.0, return_prob="hyp")
        rows, scores, _ = beam_search(model, encoder_output=states, encoder_hidden=None, src_mask=mask, **search)
        lists.append(list(zip(scores[:, 0].tolist(), rows.tolist())))
json.dump({"pairs": pairs, "tokens": model.trg_vocab._itos, "lists": lists}, open(result, "w"))
numpy.savez(result.replace(".json", ".npz"), **found)
"""


def options(folder: Path, layer_norm: str) -> dict[str, Any]:
    side = {
        "max_length": 20,
        "lowercase": False,
        "normalize": False,
        "level": "word",
        "voc_min_freq": 1,
    }
    stack = {
        "type": "transformer",
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 32,
        "ff_size": 64,
        "dropout": 0.1,
    }
    stack |= {"embeddings": {"embedding_dim": 32, "scale": True}, "layer_norm": layer_norm}
    corpus = {name: str(folder / name) for name in ("train", "dev", "test")}
    search = {"beam_size": BEAMS, "beam_alpha": 1.0, "max_output_length": 20, "batch_size": 10}
    steps = {
        "optimizer": "adam",
        "learning_rate": 0.003,
        "batch_size": 32,
        "updates": UPDATES,
        "epochs": 100,
    }
    steps |= {"validation_freq": UPDATES, "logging_freq": UPDATES, "overwrite": True}
    # its others pass arguments that torch no longer has
    steps |= {"scheduling": "noam", "learning_rate_factor": 0.5, "learning_rate_warmup": 20}
    return {
        **{
            "name": "reverse",
            "model_dir": str(folder / "model"),
            "use_cuda": False,
            "random_seed": 1,
        },
        "data": {
            **corpus,
            "dataset_type": "plain",
            "src": {"lang": "en", **side},
            "trg": {"lang": "de", **side},
        },
        "testing": search,
        "training": steps,
        "model": {"tied_softmax": True, "encoder": stack, "decoder": stack},
    }


def compare_joeynmt(work: Path, layer_norm: str) -> tuple[float, int]:
    """See `compare`."""
    install(work, PACKAGE)
    folder = work / f"joeynmt-{layer_norm}"
    write_corpus(folder)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(options(folder, layer_norm)))
    run(work, [PACKAGE], "-m", "joeynmt", "train", config, "--skip-test")
    run(work, [PACKAGE], "-m", "joeynmt", "test", config, "--output-path", folder / "out")
    texts = folder / "test.en", folder / "test.de"
    run(work, [PACKAGE], "-c", LOGITS, config, *texts, folder / "dumped.json", BEAMS)
    convert("joeynmt", folder / "model", folder / "converted", True)
    print(
        f"JoeyNMT, {layer_norm}: {same_lists(folder)} of {SENTENCES} lists of {BEAMS} hypotheses are the same"
    )
    return compare(folder / "converted", folder / "dumped.json", lines_of(folder / "out.test"))


@torch.inference_mode()
def same_lists(folder: Path) -> int:
    """The number of sentences with the same hypotheses in the same order, and scores within 1e-4."""
    model = load_model(folder / "converted", "cpu").eval()
    content = json.loads((folder / "dumped.json").read_text(encoding="utf-8"))
    same = 0
    for (source, _), expected in zip(content["pairs"], content["lists"], strict=True):
        search = {"num_return_sequences": BEAMS, "return_dict_in_generate": True}
        found = model.generate(torch.tensor([source]), **search)
        rows = [without_padding(row[1:]) for row in found.sequences.tolist()]
        scores = np.array([score for score, _ in expected])
        largest = np.abs(found.sequences_scores.numpy() - scores).max()
        same += rows == [without_padding(row) for _, row in expected] and bool(largest < 1e-4)
    return same


def without_padding(row: list[float]) -> list[int]:
    return [int(token) for token in row if token != 1]
