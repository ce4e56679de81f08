"""The exponential moving average of the weights: its formula, and checkpoints without it."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hf_vanilla_transformer import VanillaTransformerTrainer
from hf_vanilla_transformer.training.state.callbacks import EMA_WEIGHTS, WeightAverage
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import tiny_model
from tests.trainer_helpers import DESCENT, SAVING, trained


def run(folder: Path, steps: int, resume: Path | None = None) -> VanillaTransformerTrainer:
    settings = {
        **DESCENT,
        **SAVING,
        "learning_rate": 0.1,
        "ema_decay": 0.4,
        "per_device_train_batch_size": 4,
    }
    return trained(folder, resume=resume, max_steps=steps, **settings)


def test_ema_follows_its_formula(tmp_path: Path) -> None:
    trainer = run(tmp_path, 4)
    expected = tiny_model().state_dict()
    for step in (1, 2, 3, 4):
        weights = type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        decay = min(0.4, (1 + step) / (10 + step))  # 2/11, 3/12, 4/13, 5/14
        expected = {
            name: decay * each + (1 - decay) * weights[name] for name, each in expected.items()
        }
    averages = trainer.ema.average
    assert averages.keys() == dict(trainer.model.named_parameters()).keys()
    for name, average in averages.items():
        assert_close(average, expected[name], rtol=1e-5, atol=1e-6)


def test_loaded_average_moves_to_the_weights() -> None:
    average = WeightAverage(0.5)
    average.average = {"weight": torch.ones(1, 1)}
    average.on_train_begin(model=torch.nn.Linear(1, 1, bias=False, device="meta"))
    assert average.average["weight"].device.type == "meta"


def test_ema_refuses_a_checkpoint_without_it(tmp_path: Path) -> None:
    run(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / EMA_WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"checkpoint-1 .*{EMA_WEIGHTS}.*ema_decay"):
        run(tmp_path, 2, checkpoint)
    (checkpoint / EMA_WEIGHTS).write_bytes(b"cut")
    with pytest.raises(UserError, match=EMA_WEIGHTS):
        run(tmp_path, 2, checkpoint)


def test_ema_with_sharded_weights_of_deepspeed_is_refused(tmp_path: Path) -> None:
    """DeepSpeed itself is not needed: transformers asks the configuration that is registered."""
    zero_3 = Mock(is_zero3=lambda: True)
    set_hf_deepspeed_config(zero_3)
    try:
        with pytest.raises(UserError, match="ema_decay=0.4.*ZeRO-3"):
            run(tmp_path, 1)
    finally:
        unset_hf_deepspeed_config()
    run(tmp_path, 1)
