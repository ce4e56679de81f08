"""Freed memory goes back to the system during a run on a CPU."""

import pytest

from hf_vanilla_transformer.training.state import callbacks

MEGABYTE = 1e6


def test_free_memory_between_used_blocks_is_released():
    psutil = pytest.importorskip("psutil", reason="reads the resident memory")
    process = psutil.Process()
    blocks = [bytearray(100_000) for _ in range(3000)]  # too small for a mapping of their own
    full = process.memory_info().rss
    kept = blocks[::50]
    del blocks
    if not callbacks.release_free_memory():
        pytest.skip("this C library has no malloc_trim")
    assert full - process.memory_info().rss > 200 * MEGABYTE
    assert len(kept) == 60
