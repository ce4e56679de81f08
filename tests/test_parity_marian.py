"""The same weights give the same numbers in `MarianMTModel`: encoder output, logits, loss and every gradient."""

import pytest

from tests.model_helpers import PAD, tiny_model
from tests.peers import (
    BACKENDS,
    TOLERANCE,
    MarianPeer,
    assert_parity,
    differences,
    our_numbers,
    parity,
    peer_numbers,
    random_batch,
    random_fields,
)

TYING = [(True, True), (False, True), (False, False)]
SEEDS = range(10, 20)


def compare(seed: int, backend: str) -> dict[str, dict[str, float]]:
    """A random configuration, padded on the right, as Marian's positions need it."""
    fields = random_fields(seed, TYING, lm_head_bias=[True, False], position_encoding_type=["sinusoidal_split"])
    return parity(MarianPeer, backend, seed, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_parity_with_marian(seed: int, backend: str) -> None:
    assert_parity(compare(seed, backend))


def test_parity_with_marian_starting_from_the_pad_token() -> None:
    # So do the published weights. Marian never learns its padding's embedding, even where it is an input token.
    ours = tiny_model(
        decoder_start_token_id=PAD,
        position_encoding_type="sinusoidal_split",
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    )
    batch = random_batch(ours.config, 0)
    theirs, actual = peer_numbers(MarianPeer(ours), batch), our_numbers(ours, batch)
    table = "model.decoder.embed_tokens.weight"
    assert theirs.gradients[table][PAD].eq(0).all()
    assert actual.gradients[table][PAD].ne(0).any()
    actual.gradients[table][PAD] = 0
    assert max(differences(actual, theirs).values()) <= TOLERANCE
