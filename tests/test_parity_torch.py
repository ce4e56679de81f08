"""The same weights give the same numbers in `torch.nn.Transformer`: encoder output, logits, loss, every gradient."""

import pytest

from tests.peers import BACKENDS, TorchPeer, assert_parity, parity, random_fields

SEEDS = range(10)


def compare(seed: int, backend: str) -> dict[str, dict[str, float]]:
    """A random configuration; in half of them the sources are padded on the left."""
    position = ("post", "pre")[seed % 2]
    fields = random_fields(
        seed,
        layer_norm_position=[position],
        position_encoding_type=["sinusoidal", "sinusoidal_split", "sinusoidal_fairseq"],
        final_layer_norm=[True, position == "pre"],
        lm_head_bias=[True, False],
        layer_norm_eps=[1e-5, 1e-3],
    )
    return parity(TorchPeer, backend, seed, left=seed % 4 > 1, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_parity_with_torch_transformer(seed: int, backend: str) -> None:
    assert_parity(compare(seed, backend))
