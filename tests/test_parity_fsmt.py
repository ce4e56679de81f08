"""The same weights give the same numbers in `FSMTForConditionalGeneration`, transformers' port of fairseq's model:
encoder output, logits, loss and every gradient.
"""

import pytest

from tests.peers import BACKENDS, FSMTPeer, assert_parity, parity, random_fields

TYING = [(True, True), (False, False)]
SEEDS = range(20, 30)


def compare(seed: int, backend: str) -> dict[str, dict[str, float]]:
    """A random configuration; in half of them the sources are padded on the left."""
    fields = random_fields(seed, TYING, position_encoding_type=["sinusoidal_fairseq"])
    return parity(FSMTPeer, backend, seed, left=seed % 4 > 1, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_parity_with_fsmt(seed: int, backend: str) -> None:
    assert_parity(compare(seed, backend))
