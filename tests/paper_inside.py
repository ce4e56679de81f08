"""Scores, residual streams and positions of `tests/paper.py`, in the form of the page's view of the inside."""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests import paper
from tests.paper import Array


def paper_inside(model: torch.nn.Module, source: list[int], target: list[int]) -> dict[str, Any]:
    """`inside` of web/README.md for one pair. Scores of the future are -inf."""
    config = model.config
    w = paper.weights_of(model)
    softmax = paper.paper_softmax
    add_and_norm = paper.paper_add_and_norm
    scores: list[Array] = []
    states: list[Array] = []

    def kept_softmax(x: Array) -> Array:
        scores.append(x)
        return softmax(x)

    def kept_add_and_norm(*arguments: Any) -> Array:
        states.append(add_and_norm(*arguments))
        return states[-1]

    with (
        patch.object(paper, "paper_softmax", kept_softmax),
        patch.object(paper, "paper_add_and_norm", kept_add_and_norm),
    ):
        paper.paper_translation(model, source, target)

    def stack(name: str, scores: Any, tokens: list[int], states: list[Array]) -> dict[str, Array]:
        first = paper.paper_embedding(w, f"model.{name}", tokens, config)
        scale = config.d_model**0.5 if config.scale_embedding else 1
        return {
            "scores": np.array(scores),
            "norms": np.linalg.norm([first, *states], axis=-1),  # (layers + 1, T)
            "positions": first - w[f"model.{name}.embed_tokens.weight"][tokens] * scale,
        }

    *of_attention, _ = scores  # the last ones are of the output
    in_encoder = config.encoder_layers * config.encoder_attention_heads
    encoder = by_heads(of_attention[:in_encoder], config.encoder_attention_heads)
    decoder = by_heads(
        of_attention[in_encoder:], config.decoder_attention_heads
    )  # of the target and source in turn
    sublayers = 2 * config.encoder_layers
    inputs = [config.decoder_start_token_id, *target[:-1]]
    return {
        "cross": np.array(decoder[1::2]),
        "encoder": stack("encoder", encoder, source, states[1:sublayers:2]),
        "decoder": stack("decoder", decoder[::2], inputs, states[sublayers + 2 :: 3]),
    }


def by_heads(scores: list[Array], heads: int) -> list[list[Array]]:
    return [scores[i : i + heads] for i in range(0, len(scores), heads)]


def assert_is_inside(
    found: dict[str, Any], model: torch.nn.Module, source: list[int], target: list[int]
) -> None:
    """Compare with the paper and, for what it returns, with a plain call of the model."""
    expected = paper_inside(model, source, target)
    pairs = [(found["cross"], expected["cross"])]
    model.set_attn_implementation("eager")
    inputs = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
    with torch.no_grad():
        output = model(
            torch.tensor([source]),
            decoder_input_ids=inputs,
            output_attentions=True,
            output_hidden_states=True,
        )
    for name in ("encoder", "decoder"):
        assert found[name].keys() == expected[name].keys()
        pairs += [(found[name][key], expected[name][key]) for key in expected[name]]
        scores = np.array(found[name]["scores"])
        if name == "decoder":
            past = np.tril(np.ones(scores.shape[-2:]))
            scores = np.where(past, scores, -np.inf)
        attentions = torch.cat(output[f"{name}_attentions"]).numpy()
        pairs.append((paper.paper_softmax(scores), attentions))
        norms = [state[0].norm(dim=-1).numpy() for state in output[f"{name}_hidden_states"]]
        pairs.append(
            (found[name]["norms"][:-1], norms[:-1])
        )  # the last one may be after a final normalisation
    for here, there in ((np.array(here), np.array(there)) for here, there in pairs):
        assert here.shape == there.shape
        visible = np.isfinite(there)
        assert np.abs(here[visible] - there[visible]).max() < 1e-5
