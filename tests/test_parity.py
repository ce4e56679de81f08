"""The same weights give the same numbers in other implementations: encoder output, logits, loss and every gradient."""

from typing import Any

import pytest

from tests.model_helpers import PAD, tiny_model
from tests.peers import (
    BACKENDS,
    TOLERANCE,
    FSMTPeer,
    M2M100Peer,
    MarianPeer,
    TorchPeer,
    assert_parity,
    differences,
    our_numbers,
    parity,
    peer_numbers,
    random_batch,
    random_fields,
)


def torch_fields(seed: int) -> dict[str, Any]:
    position = ("post", "pre")[seed % 2]
    return random_fields(
        seed,
        layer_norm_position=[position],
        position_encoding_type=["sinusoidal", "sinusoidal_split", "sinusoidal_fairseq"],
        final_layer_norm=[True, position == "pre"],
        lm_head_bias=[True, False],
        layer_norm_eps=[1e-5, 1e-3],
    )


def marian_fields(seed: int) -> dict[str, Any]:
    return random_fields(
        seed,
        [(True, True), (False, True), (False, False)],
        lm_head_bias=[True, False],
        position_encoding_type=["sinusoidal_split"],
    )


def fsmt_fields(seed: int) -> dict[str, Any]:
    return random_fields(
        seed, [(True, True), (False, False)], position_encoding_type=["sinusoidal_fairseq"]
    )


def m2m_100_fields(seed: int) -> dict[str, Any]:
    return random_fields(
        seed,
        [(True, True)],
        position_encoding_type=["sinusoidal_fairseq"],
        layer_norm_position=["pre"],
    )


PEERS = {  # the peer, the seeds, and the random configuration of a seed
    "torch.nn.Transformer": (TorchPeer, range(10), torch_fields),
    "MarianMTModel": (MarianPeer, range(10, 20), marian_fields),
    "FSMTForConditionalGeneration": (FSMTPeer, range(20, 30), fsmt_fields),
    "M2M100ForConditionalGeneration": (M2M100Peer, range(40, 50), m2m_100_fields),
}


def compare(name: str, seed: int, backend: str) -> dict[str, dict[str, float]]:
    """A random configuration. Half of the sources are padded on the left, except for Marian's positions."""
    peer, _, fields = PEERS[name]
    return parity(peer, backend, seed, left=seed % 4 > 1 and peer is not MarianPeer, **fields(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, (_, seeds, _) in PEERS.items() for seed in seeds]
)
def test_parity_with_other_implementations(name: str, seed: int, backend: str) -> None:
    assert_parity(compare(name, seed, backend))


def test_parity_with_marian_starting_from_the_pad_token() -> None:
    # So do the published weights. Marian never learns its padding's embedding, even where it is an input token.
    ours = tiny_model(
        decoder_start_token_id=PAD,
        position_encoding_type="sinusoidal_split",
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    )
    batch = random_batch(ours.config, 0)
    theirs = peer_numbers(MarianPeer(ours), batch)
    actual = our_numbers(ours, batch)
    table = "model.decoder.embed_tokens.weight"
    assert theirs.gradients[table][PAD].eq(0).all()
    assert actual.gradients[table][PAD].ne(0).any()
    actual.gradients[table][PAD] = 0
    assert max(differences(actual, theirs).values()) <= TOLERANCE
