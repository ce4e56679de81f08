"""Every mode of `generate` that transformers has writes what is computed by hand without a cache, at each version.

The modes are read from transformers: a new one fails here until `tests/generation_modes.py` has it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerForCausalLM
from tests import generation_modes
from tests.generation_modes import (
    ASSISTED,
    BEAM,
    BEAM_SAMPLED,
    BEAMS,
    GREEDY,
    LIMIT,
    MODES,
    SAMPLED,
)
from tests.model_helpers import EOS, START, WITHOUT_THE_PACKAGE
from tests.search_helpers import (
    LENGTHS,
    Model,
    naive_greedy_search,
    naive_search,
    source,
    varied_model,
)

Tokens = list[list[int]]


def test_each_mode_of_transformers_is_tested() -> None:
    assert set(MODES) == generation_modes.modes_of_transformers()
    known = GenerationConfig().to_dict()
    for mode, variants in MODES.items():
        for name, settings in variants.items():
            fields = {key: value for key, value in settings.items() if key in known}
            config = GenerationConfig(**{"num_beams": 1, **fields})
            assistant = settings.get("assistant_model")
            assert config.get_generation_mode(assistant) == mode, name


# The models: a translator, its decoder alone, and those without the last decoder layer, which guess for them


def models() -> list[Model]:
    model = varied_model()
    assistant = varied_model(decoder_layers=1)
    assistant.load_state_dict(model.state_dict(), strict=False)
    return [model, assistant]


INPUTS = {
    "translator": source(LENGTHS),
    "decoder": {
        "input_ids": torch.tensor([[START, 7, 11], [START, 9, 8], [START, 5, 20]]),
        "attention_mask": torch.ones(3, 3, dtype=torch.long),
    },
}


def decoder_of(model: Model, folder: Path) -> VanillaTransformerForCausalLM:
    model.save_pretrained(folder)
    return VanillaTransformerForCausalLM.from_pretrained(folder).eval()


# By hand


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The logits of the next token (B, V) after the target (B, T), computed from all its tokens."""
    if model.config.is_encoder_decoder:
        return model(**inputs, decoder_input_ids=target, use_cache=False).logits[:, -1]
    return model(target, use_cache=False).logits[:, -1]


def sampled(model: Any, inputs: dict[str, Tensor], target: Tensor) -> Tokens:
    """Draw each token from the softmax of its logits."""
    torch.manual_seed(0)
    rows = target.tolist()
    for _ in range(LIMIT):
        probabilities = logits_of(model, inputs, target).softmax(dim=-1)
        tokens = torch.multinomial(probabilities, 1)
        target = torch.cat([target, tokens], dim=1)
        for row, (token,) in zip(rows, tokens.tolist(), strict=True):
            if EOS not in row:
                row.append(token)
        if all(EOS in row for row in rows):
            break
    return rows


def by_hand(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tokens]:
    """What each family of modes must write."""
    ids = inputs["input_ids"]
    target = torch.full((len(ids), 1), START)
    masks = inputs["attention_mask"].bool()
    sources = [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]
    if not model.config.is_encoder_decoder:
        target = ids
        sources = [None] * len(ids)
    pairs = list(zip(sources, target.tolist(), strict=True))
    best = [naive_search([model], row, BEAMS, 0.0, LIMIT, prefix) for row, prefix in pairs]
    return {
        "greedy": [naive_greedy_search([model], row, LIMIT, prefix) for row, prefix in pairs],
        "beam": [hypotheses[0][1] for hypotheses in best],
        "sampled": sampled(model, inputs, target),
    }


def assert_as_by_hand(found: dict[str, Tokens], expected: dict[str, Tokens]) -> None:
    different = {tuple(each) for kind in expected.values() for each in kind}
    assert len(different) > len(expected["greedy"])
    best_token, *others = SAMPLED
    kinds = {
        "greedy": [*GREEDY, *ASSISTED, best_token],
        "beam": BEAM,
        "sampled": others,
    }
    for kind, names in kinds.items():
        for name in names:
            assert found[name] == expected[kind], name
    # It draws from the beams of a sentence together. Without a cache it computes each of them anew.
    with_cache, without = (found[name] for name in BEAM_SAMPLED)
    assert with_cache == without != expected["greedy"]


# With the package, and in a process with the code in the checkpoint alone


@pytest.mark.parametrize("kind", INPUTS)
def test_modes_write_what_is_computed_by_hand(kind: str, tmp_path: Path) -> None:
    pair: Any = models()
    if kind == "decoder":
        pair = [decoder_of(each, tmp_path / str(number)) for number, each in enumerate(pair)]
    found = generation_modes.written(*pair, INPUTS[kind])
    assert_as_by_hand(found, by_hand(pair[0], INPUTS[kind]))


@pytest.mark.slow  # a process that imports torch
def test_modes_of_remote_code_write_what_is_computed_by_hand(tmp_path: Path) -> None:
    model, assistant = models()
    decoder = decoder_of(model, tmp_path / "model")
    assistant.save_pretrained(tmp_path / "assistant")
    inputs = {}
    for kind, given in INPUTS.items():
        inputs[kind] = {key: value.tolist() for key, value in given.items()}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    program = WITHOUT_THE_PACKAGE + Path(generation_modes.__file__).read_text(encoding="utf-8")
    (tmp_path / "remote.py").write_text(program, encoding="utf-8")
    # -I: neither the working directory nor PYTHONPATH
    command = [sys.executable, "-I", "remote.py", str(tmp_path), "found.json"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    for kind, of_kind in (("translator", model), ("decoder", decoder)):
        assert_as_by_hand(found[kind], by_hand(of_kind, INPUTS[kind]))
