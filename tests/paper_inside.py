"""Scores, residual streams and positions of `tests/paper.py`, in the form of the page's view of the inside."""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests import paper


def paper_inside(model: torch.nn.Module, source: list[int], target: list[int]) -> dict[str, Any]:
    """`inside` of web/README.md for one pair. Scores of the future are -inf."""
    config, w, softmax, add_and_norm = (
        model.config,
        paper.weights_of(model),
        paper.paper_softmax,
        paper.paper_add_and_norm,
    )
    scores: list[np.ndarray] = []
    states: list[np.ndarray] = []
    inputs = [config.decoder_start_token_id, *target[:-1]]
    with (
        patch.object(paper, "paper_softmax", lambda x: (scores.append(x), softmax(x))[1]),
        patch.object(paper, "paper_add_and_norm", lambda *a: (states.append(add_and_norm(*a)), states[-1])[1]),
    ):
        paper.paper_translation(model, source, target)
    encoder_layers, heads = config.encoder_layers, config.encoder_attention_heads
    own, rest = scores[: encoder_layers * heads], scores[encoder_layers * heads : -1]  # the last one is of the output
    shape = config.decoder_layers, 2, config.decoder_attention_heads
    layers = [
        rest[i : i + shape[2]] for i in range(0, len(rest), shape[2])
    ]  # self-attention and cross-attention in turn

    def stack(name: str, scores: Any, tokens: list[int], states: list[np.ndarray]) -> dict[str, np.ndarray]:
        first = paper.paper_embedding(w, f"model.{name}", tokens, config)
        positions = first - w[f"model.{name}.embed_tokens.weight"][tokens] * (
            config.d_model**0.5 if config.scale_embedding else 1
        )
        norms = np.linalg.norm([first, *states], axis=-1)  # (layers + 1, T)
        return {"scores": np.array(scores), "norms": norms, "positions": positions}

    by_layer = [own[i : i + heads] for i in range(0, len(own), heads)]
    return {
        "cross": np.array(layers[1::2]),
        "encoder": stack("encoder", by_layer, source, states[1 : 2 * encoder_layers : 2]),
        "decoder": stack("decoder", layers[::2], inputs, states[2 * encoder_layers + 2 :: 3]),
    }


def assert_is_inside(found: dict[str, Any], model: torch.nn.Module, source: list[int], target: list[int]) -> None:
    """Compare with the paper and, for what it returns, with a plain call of the model."""
    expected = paper_inside(model, source, target)
    pairs = [(found["cross"], expected["cross"])]
    model.set_attn_implementation("eager")
    inputs = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
    with torch.no_grad():
        arguments = {"output_attentions": True, "output_hidden_states": True}
        output = model(torch.tensor([source]), decoder_input_ids=inputs, **arguments)
    for name in ("encoder", "decoder"):
        assert found[name].keys() == expected[name].keys()
        pairs += [(found[name][key], expected[name][key]) for key in expected[name]]
        scores = np.array(found[name]["scores"])
        if name == "decoder":
            scores = np.where(np.tril(np.ones(scores.shape[-2:])), scores, -np.inf)
        pairs.append((paper.paper_softmax(scores), torch.cat(output[f"{name}_attentions"]).numpy()))
        norms = [state[0].norm(dim=-1).numpy() for state in output[f"{name}_hidden_states"]]
        pairs.append((found[name]["norms"][:-1], norms[:-1]))  # the last one may be after a final normalisation
    for here, there in pairs:
        here, there = np.array(here), np.array(there)
        assert here.shape == there.shape
        visible = np.isfinite(there)
        assert np.abs(here[visible] - there[visible]).max() < 1e-5
