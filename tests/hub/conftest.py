"""A Hub on loopback with the real client, and a model folder that also has private files."""

import json
import time
from pathlib import Path
from typing import NamedTuple

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from huggingface_hub.utils import close_session

from hf_vanilla_transformer.hub import CardFacts, write_model_card
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.model_helpers import tiny_model

PRIVATE = {
    "optimizer.pt": b"state",
    "scheduler.pt": b"state",
    "rng_state.pth": b"state",
    "training_args.bin": b"state",
    "trainer_state.json": b"{}",
    "train.en": b"the training text",
    ".env": b"PASSWORD=1",
    ".git/config": b"[core]",
    "pytorch_model.bin": b"pickle",
    "checkpoint-5/model.safetensors": b"older weights",
    "checkpoint-5/optimizer.pt": b"state",
    "runs/events.out": b"log",
    "notes/README.md": b"notes",
    "target_tokenizer/notes.txt": b"notes",
}


class Model(NamedTuple):
    """A model folder, and its model and tokenizers."""

    folder: Path
    model: object
    source: object
    target: object


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Model:
    """A model with two vocabularies and a card, among files that a run or its owner leaves there."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    source, target = (
        train_tokenizer(["one two three"] * 3, 262),
        train_tokenizer(["eins zwei drei"] * 3, 265),
    )
    sizes = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": False,
    }
    model = tiny_model(d_model=16, encoder_layers=1, decoder_layers=1, **sizes)
    model.save_pretrained(folder)
    save_tokenizers(folder, source, target)
    results = {"test_bleu": 12.3, "test_bleu_signature": "BLEU|nrefs:1"}
    (folder / "all_results.json").write_text(json.dumps(results), encoding="utf-8")
    (folder / "curve.png").write_bytes(b"a plot")
    write_model_card(
        folder, CardFacts("run", languages=("en", "de"), metrics=results, example="one two")
    )
    for name, content in PRIVATE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return Model(folder, model, source, target)


@pytest.fixture
def hub(monkeypatch):
    """A Hub for one test. The client of this process is logged in there and never sleeps."""
    with LoopbackHub() as running:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = f"{running.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # it uses other servers
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # caches the endpoint
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        running.slept = []
        monkeypatch.setattr(time, "sleep", running.slept.append)
        yield running
        close_session()
        transformers.utils.hub._hf_api = None
