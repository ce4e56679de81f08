"""The passes in C against torch's operators. Those of int8 are in test_int8.py."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer.engine.c_kernels import View, attend, best, library
from tests.model_helpers import assert_near

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C functions")

SCALE = 0.3


class Widths(NamedTuple):
    """Of the attention of a layer."""

    heads: int
    key: int
    value: int

    @property
    def query_columns(self) -> int:
        return self.heads * self.key

    @property
    def cache_columns(self) -> int:
        return self.heads * (self.key + self.value)


def random_visible(
    batch: int,
    beams: int,
    size: int,
    share: float,
) -> Tensor:
    """Which of `size` slots each beam sees. One beam sees all, and one none."""
    visible = torch.rand(batch, beams, size) < share
    visible[0, 0] = True
    visible[1, 1] = False
    return visible


def view_of(visible: Tensor, room: int) -> View:
    """Caches with `room` slots for each sentence."""
    batch, beams, size = visible.shape
    rows = torch.arange(batch * beams)
    return View(rows // beams * room, visible, rows * size)


def attention_by_torch(
    query: Tensor,
    cache: Tensor,
    visible: Tensor,
    widths: Widths,
) -> Tensor:
    """In float64, a row for each beam. A beam that sees nothing gets zeros."""
    batch, beams, size = visible.shape

    def heads_of(columns: Tensor) -> Tensor:
        """(B, H, rows, d)"""
        return columns.double().unflatten(2, (widths.heads, -1)).transpose(1, 2)

    slots = cache[:, :size]
    queries = heads_of(query.view(batch, beams, -1))
    keys = heads_of(slots[..., : widths.query_columns])
    values = heads_of(slots[..., widths.query_columns :])
    scores = queries @ keys.transpose(2, 3) * SCALE
    scores.masked_fill_(~visible[:, None], -torch.inf)
    found = scores.softmax(dim=-1).nan_to_num() @ values
    return found.transpose(1, 2).reshape(batch * beams, -1).float()


def assert_best(
    values: Tensor,
    tokens: Tensor,
    scores: Tensor,
    count: int,
) -> None:
    """The greatest scores of each row in their order, each of another token."""
    assert_near(values, scores.sort(dim=1, descending=True).values[:, :count], 1e-5)
    assert_near(values, scores.gather(1, tokens), 1e-5)
    assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("widths", [(4, 32, 32), (8, 64, 64), (2, 6, 10), (3, 16, 8)])
@pytest.mark.parametrize("size", [5, 64, 203])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_a_row_sees(
    widths: tuple[int, int, int],
    size: int,
    dtype: torch.dtype,
) -> None:
    sizes = Widths(*widths)
    room = size + 7  # more than the masks have
    product = torch.randn(3 * 9, sizes.query_columns + sizes.cache_columns).to(dtype)
    query = product[:, : sizes.query_columns].float()  # rows that lie apart
    cache = torch.randn(3, room, sizes.cache_columns).to(dtype)
    visible = random_visible(3, 9, size, share=0.1)
    found = attend(query, widths, SCALE, cache, view_of(visible, room))
    assert found.dtype == torch.float32
    assert_near(found, attention_by_torch(query, cache, visible, sizes), 1e-6)


@pytest.mark.parametrize("size", [5, 64, 1000])
@pytest.mark.parametrize("normalize", [True, False])
def test_best_tokens_of_bfloat16_logits_are_those_of_a_float32_log_softmax(
    size: int, normalize: bool
) -> None:
    logits = torch.randn(6, size).bfloat16()
    kept = logits.clone()
    values, tokens = best(logits, 4, normalize)
    scores = logits.float()
    if normalize:
        scores = scores.log_softmax(dim=1)
    assert_best(values, tokens, scores, count=4)
    assert logits.equal(kept)
