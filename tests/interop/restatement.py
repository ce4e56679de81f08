"""A Transformer restated in NumPy and float64, for toolkits that cannot be installed with the tests.

Each test gives the toolkit's tensor names, positions, activation and epsilon, as the toolkit's source has them. It
shares no code with the converters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tests.model_helpers import assert_near, padded
from tests.paper import ACTIVATIONS, paper_attention

# A matrix W and a vector b: x W + b, or the gain and the bias of a normalisation.
Pair = tuple[np.ndarray, np.ndarray]


@dataclass
class Restatement:
    """The computation of a toolkit.

    Attributes:
        pair: from a name to its arrays. Names are "encoder.0.self.q" (k, v, o), "decoder.1.cross.q",
            "encoder.0.ffn.1" (2), with "norm" for the normalisation after each ("encoder.0.self.norm"),
            "encoder.norm" for one after the stack, "output".
        embedding: from "source" or "target" to a matrix (V, D).
        position: from the index of a token, from 0, and "source" or "target" to a row (D,).
        layers: of the encoder, of the decoder. heads: of both stacks.
        pre_norm: LayerNorm comes before each sub-layer instead of after it.
        starts_from_zero: the decoder starts from a zero vector instead of an embedding (Marian).
    """

    pair: Callable[[str], Pair]
    embedding: Callable[[str], np.ndarray]
    position: Callable[[int, str], np.ndarray]
    layers: tuple[int, int]
    heads: int
    activation: str = "relu"
    eps: float = 1e-5
    scale: bool = True
    final_norm: bool = False
    pre_norm: bool = False
    starts_from_zero: bool = False

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        """(T, V) for decoder inputs (T,)."""
        memory = self.stack("encoder", self.layers[0], self.embed("source", source), None)
        states = self.stack("decoder", self.layers[1], self.embed("target", target), memory)
        return self.linear("output", states)

    def embed(self, side: str, ids: list[int]) -> np.ndarray:
        table = self.embedding(side)
        rows = table[ids] * (math.sqrt(table.shape[1]) if self.scale else 1)
        if side == "target" and self.starts_from_zero:
            rows[0] = 0
        return rows + np.stack([self.position(index, side) for index in range(len(ids))])

    def stack(self, name: str, depth: int, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        causal = None if memory is None else np.tril(np.ones((len(x), len(x)), dtype=bool))
        for i in range(depth):
            layer = f"{name}.{i}"
            x = self.sub_layer(f"{layer}.self", x, lambda y, at: self.attend(at, y, y, causal))
            if memory is not None:
                x = self.sub_layer(
                    f"{layer}.cross", x, lambda y, at: self.attend(at, y, memory, None)
                )
            x = self.sub_layer(f"{layer}.ffn", x, self.feed_forward)
        return self.norm(f"{name}.norm", x) if self.final_norm or self.pre_norm else x

    def sub_layer(
        self, name: str, x: np.ndarray, function: Callable[[np.ndarray, str], np.ndarray]
    ) -> np.ndarray:
        if self.pre_norm:
            return x + function(self.norm(f"{name}.norm", x), name)
        return self.norm(f"{name}.norm", x + function(x, name))

    def feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.linear(f"{name}.2", ACTIVATIONS[self.activation](self.linear(f"{name}.1", x)))

    def attend(
        self, name: str, x: np.ndarray, y: np.ndarray, visible: np.ndarray | None
    ) -> np.ndarray:
        queries = self.linear(f"{name}.q", x)
        keys = self.linear(f"{name}.k", y)
        values = self.linear(f"{name}.v", y)
        parts = [np.split(each, self.heads, axis=1) for each in (queries, keys, values)]
        heads = [paper_attention(*each, visible) for each in zip(*parts, strict=True)]
        return self.linear(f"{name}.o", np.concatenate(heads, axis=1))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        matrix, bias = self.pair(name)
        return x @ matrix + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        gain, bias = self.pair(name)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        return centred / np.sqrt(variance + self.eps) * gain + bias


@torch.no_grad()
def assert_restated(ours: torch.nn.Module, theirs: Restatement, tolerance: float = 1e-5) -> float:
    """Compare logits on a batch of sentences of different lengths. Returns the largest difference."""
    pad = ours.config.pad_token_id
    start = ours.config.decoder_start_token_id
    generator = np.random.default_rng(5)
    of_source, of_target = (len(theirs.embedding(side)) for side in ("source", "target"))
    sources = [drawn(generator, length, of_source, pad) for length in (5, 1, 8)]
    targets = [[start, *drawn(generator, length, of_target, pad)] for length in (6, 3, 2)]
    ids = padded(sources, pad)
    written = padded(targets, pad)
    mask = padded([[1] * len(row) for row in sources], 0)
    logits = ours(input_ids=ids, attention_mask=mask, decoder_input_ids=written).logits
    largest = 0.0
    for row, source, target in zip(logits, sources, targets, strict=True):
        expected = torch.from_numpy(theirs.logits(source, target))
        # the padding that conversion adds to Marian's vocabulary
        actual = row[: len(target), : expected.shape[1]]
        assert_near(actual, expected, tolerance)
        largest = max(largest, (actual.double() - expected).abs().max().item())
    return largest


def drawn(generator: np.random.Generator, length: int, vocabulary: int, pad: int) -> list[int]:
    tokens = [token for token in range(vocabulary) if token != pad]
    return generator.choice(tokens, length).tolist()
