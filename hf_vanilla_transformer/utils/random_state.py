"""The random state of a process and of its device."""

from contextlib import AbstractContextManager

import torch


def kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the random state of the CPU and of a device at its end."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
