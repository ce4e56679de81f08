"""Short runs on batches of tokens, and whether they resume to the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import trainer_helpers
from tests.model_helpers import tiny_model
from tests.trainer_helpers import assert_same_model, random_pairs


def trained(
    folder: Path,
    steps: int = 2,
    resume: Path | None = None,
    dropout: float = 0.3,
    layers: int = 2,
    **settings: Any,
) -> Any:
    """A trainer after these updates."""
    given = {
        "max_steps": steps,
        "max_tokens_per_batch": 60,
        "learning_rate": 0.01,
        "seed": 3,
    }
    model = tiny_model(
        dropout=dropout,
        label_smoothing=0.1,
        encoder_layers=layers,
        decoder_layers=layers,
    )
    return trainer_helpers.trained(
        folder, random_pairs(64), model, resume=resume, **given | settings
    )


def check_resume(train: Callable[..., Any], folder: Path, **settings: Any) -> None:
    """Four updates give the same weights, whether or not they are interrupted after two."""
    settings |= {"save_strategy": "steps", "save_steps": 2}
    train(folder / "whole", 4, **settings)
    torch._dynamo.reset()
    train(folder / "resumed", 4, folder / "whole" / "checkpoint-2", **settings)
    assert_same_model(folder / "whole" / "checkpoint-4", folder / "resumed" / "checkpoint-4")
