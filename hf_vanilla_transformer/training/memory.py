"""Memory of a long run on a CPU: few shapes of products, and freed blocks go back to the system.

In bfloat16 oneDNN compiles and keeps kernels for every shape of a matrix product. Most token batches have a shape of
their own, so that the trainer rounds B · S and B · T to multiples of the loss's `ROW_UNIT`, 64: the products of
multi30k_en_de_tiny_tokens.yaml then have 26 distinct row counts instead of 84, with 7.8 % more padding (32: 36
and 5.0 %). The largest temporary tensors are below glibc's limit for blocks of their own (32 MiB), so they lie on its
heap, with gaps between the kernels. glibc reuses gaps but does not return them.
"""

import ctypes
import sys
from typing import Any

from transformers import TrainerCallback

#: Updates between two returns. One takes 0.07 s with the model and batches of multi30k_en_de_tiny_tokens.yaml, 20
#: updates of which take 11 s on one core.
UPDATES = 20


def release_free_memory() -> bool:
    """Return the free pages of the C library's heap to the system; whether the library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return False
    trim(0)
    return True


class ReleaseFreeMemory(TrainerCallback):
    """Calls `release_free_memory` every 20 updates of a run on a CPU."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an update, whose temporary tensors are freed."""
        if args.device.type == "cpu" and state.global_step % UPDATES == 0:
            release_free_memory()
