"""The passes in C against torch's operators. Those of int8 are in test_int8.py."""

import pytest
import torch

from hf_vanilla_transformer.engine.c_kernels import View, attend, best, library
from tests.model_helpers import assert_near

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C functions")


@pytest.mark.parametrize("widths", [(4, 32, 32), (8, 64, 64), (2, 6, 10), (3, 16, 8)])
@pytest.mark.parametrize("size", [5, 64, 203])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_a_row_sees(
    widths: tuple[int, int, int],
    size: int,
    dtype: torch.dtype,
) -> None:
    heads, key, value = widths
    batch = 3
    beams = 9
    room = size + 7  # more than the masks have
    draw = torch.Generator().manual_seed(size)
    product = torch.randn(batch * beams, heads * (2 * key + value), generator=draw).to(dtype)
    query = product[:, : heads * key]  # rows that lie apart
    cache = torch.randn(batch, room, heads * (key + value), generator=draw).to(dtype)
    visible = torch.rand(batch, beams, size, generator=draw) < 0.1
    visible[0, 0] = True
    visible[1, 1] = False
    rows = torch.arange(batch * beams)
    sentences = rows // beams
    view = View(sentences * room, visible, rows * size)
    found = attend(query.float(), widths, 0.3, cache, view)

    queries = query.double().reshape(batch, beams, heads, key).transpose(1, 2)  # (B, H, K, d_k)
    keys, values = (
        part.double().unflatten(2, (heads, -1)).transpose(1, 2)
        for part in cache[:, :size].split([heads * key, heads * value], dim=2)
    )
    scores = queries @ keys.transpose(2, 3) * 0.3
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1).nan_to_num()
    expected = (weights @ values).transpose(1, 2).reshape(batch * beams, -1)
    assert found.dtype == torch.float32
    assert_near(found, expected.float(), 1e-6)


@pytest.mark.parametrize("size", [5, 64, 1000])
@pytest.mark.parametrize("normalize", [True, False])
def test_best_tokens_of_bfloat16_logits_are_those_of_a_float32_log_softmax(size: int, normalize: bool) -> None:
    draw = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=draw).bfloat16()
    kept = logits.clone()
    values, tokens = best(logits, 4, normalize)
    scores = logits.float()
    if normalize:
        scores = scores.log_softmax(dim=1)
    assert_near(values, scores.topk(4).values, 1e-5)
    assert_near(values, scores.gather(1, tokens), 1e-5)
    assert torch.equal(logits, kept)
