"""The same weights give the same numbers in `M2M100ForConditionalGeneration`, the class of M2M-100 and NLLB: encoder
output, logits, loss and every gradient.
"""

import pytest

from tests.peers import BACKENDS, M2M100Peer, assert_parity, parity, random_fields

SEEDS = range(40, 50)


def compare(seed: int, backend: str) -> dict[str, dict[str, float]]:
    """A random configuration; in half of them the sources are padded on the left."""
    only = {"position_encoding_type": ["sinusoidal_fairseq"], "layer_norm_position": ["pre"]}
    return parity(M2M100Peer, backend, seed, left=seed % 4 > 1, **random_fields(seed, [(True, True)], **only))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_parity_with_m2m_100(seed: int, backend: str) -> None:
    assert_parity(compare(seed, backend))
