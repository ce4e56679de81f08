"""eole, OpenNMT-py's successor, whose decoders are pre-norm: sinusoids and learned positions."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from hf_vanilla_transformer.interop.converting import convert

from .environment import BEAMS, compare, install, lines_of, run, write_corpus

PACKAGE = "eole==0.6.4"
COMMAND = ("-m", "eole.bin.main")

# For each comparison, the fields of `model` that differ from the smallest configuration.
MODELS: dict[str, dict[str, Any]] = {
    "sinusoids": {},
    "learned positions, tied, gelu": {
        **{
            "share_decoder_embeddings": True,
            "mlp_activation_fn": "gelu",
            "add_qkvbias": True,
            "add_ffnbias": True,
        },
        # otherwise eole trains the encoder without this bias, and loads it with one that the file does not have
        "add_final_linear_bias": True,
        "embeddings": {"position_encoding_type": "Learned", "n_positions": 64},
    },
}

# Its search without a length penalty prefers short translations until a model is good.
UPDATES = {"sinusoids": 300, "learned positions, tied, gelu": 1000}

# Its arguments: the model, the source and target text, the result.
LOGITS = """
import json, sys, numpy, torch
from eole.config.run import PredictConfig
from eole.models.model import get_model_class
folder, source, target, result = sys.argv[1:]
config = PredictConfig(model_path=folder, src=source, gpu_ranks=[])
model, vocabularies, _ = get_model_class(config.model).for_inference(config)
model.eval()
sides = [vocabularies[side].ids_to_tokens for side in ("src", "tgt")]
ids = [{token: number for number, token in enumerate(side)} for side in sides]
pairs, found = [], {}
with torch.no_grad():
    for number, (a, b) in enumerate(zip(open(source), open(target))):
        a, b = [ids[0][each] for each in a.split()], [ids[1][each] for each in ["<s>", *b.split(), "</s>"]]
        states = model(torch.tensor([a]), torch.tensor([b]), torch.tensor([len(a)]))[0]
        pairs.append([a, b[:-1]])
        found[str(number)] = model.generator(states)[0].numpy()
json.dump({"pairs": pairs, "tokens": sides[1]}, open(result, "w"))
numpy.savez(result.replace(".json", ".npz"), **found)
"""


def options(folder: Path, name: str) -> dict[str, Any]:
    model, updates = MODELS[name], UPDATES[name]
    corpora = {
        name: {
            "path_src": str(folder / f"{part}.en"),
            "path_tgt": str(folder / f"{part}.de"),
            "transforms": [],
        }
        for name, part in (("corpus", "train"), ("valid", "dev"))
    }
    vocabularies = {f"{side}_vocab": str(folder / f"vocab.{side}") for side in ("src", "tgt")}
    sizes = {"layers": 2, "heads": 4, "hidden_size": 32, "transformer_ff": 64}
    embeddings = {"word_vec_size": 32, **model.get("embeddings", {})}
    steps = {
        "train_steps": updates,
        "save_checkpoint_steps": updates,
        "valid_steps": 10 * updates,
        "batch_size": 64,
    }
    rate = {
        "optim": "adam",
        "learning_rate": 2,
        "decay_method": "noam",
        "warmup_steps": 60,
        "dropout": [0.1],
    }
    return {
        **{
            "data": corpora,
            **vocabularies,
            "save_data": str(folder / "data"),
            "overwrite": True,
            "seed": 1,
        },
        "model": {"architecture": "transformer", **sizes, **model, "embeddings": embeddings},
        "training": {
            **steps,
            **rate,
            "num_workers": 0,
            "bucket_size": 400,
            "model_path": str(folder / "model"),
        },
    }


def compare_eole(work: Path, name: str) -> tuple[float, int]:
    """See `compare`."""
    install(work, PACKAGE)
    folder = work / f"eole, {name}"
    shutil.rmtree(folder, ignore_errors=True)
    write_corpus(folder)
    config, recipe = folder / "config.yaml", options(folder, name)
    vocabulary = {key: value for key, value in recipe.items() if key not in ("model", "training")}
    config.write_text(yaml.safe_dump({**vocabulary, "n_sample": -1}))
    run(work, [PACKAGE], *COMMAND, "build_vocab", "--config", config)
    config.write_text(yaml.safe_dump(recipe))
    run(work, [PACKAGE], *COMMAND, "train", "--config", config)
    model, texts = folder / "model", (folder / "test.en", folder / "test.de")
    given = ("-model_path", model, "-src", texts[0], "-output", folder / "out", "-beam_size", BEAMS)
    given += ("-max_length_ratio", 0)  # of a batch
    run(work, [PACKAGE], *COMMAND, "predict", *given)
    run(work, [PACKAGE], "-c", LOGITS, model, *texts, folder / "dumped.json")
    convert("eole", model, folder / "converted", True)
    return compare(folder / "converted", folder / "dumped.json", lines_of(folder / "out"))
