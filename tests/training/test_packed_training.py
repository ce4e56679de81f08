"""Training on packed rows: exact updates, exact resumes, and the objectives."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.batches.packing import PLAN_VERSION
from hf_vanilla_transformer.training.state.fingerprint import PACKING
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, tiny_model
from tests.trainer_helpers import DESCENT, flat
from tests.training import short_runs

trained = partial(short_runs.trained, pack=True)


@pytest.mark.parametrize("objective", ["none", "r_drop", "teacher"])
def test_packed_update_of_all_pairs_is_that_of_padded_batches(
    objective: str, tmp_path: Path
) -> None:
    tiny_model(seed=5).save_pretrained(tmp_path / "teacher")
    whole = {"tokens_per_update": 100_000, **DESCENT}  # all pairs
    objectives = {
        "none": {},
        "r_drop": {"r_drop_alpha": 5.0},
        "teacher": {"teacher": [str(tmp_path / "teacher")]},
    }

    def weights(**settings: Any) -> torch.Tensor:
        return flat(trained(tmp_path / "run", **whole, **settings, dropout=0.0).model)

    settings = objectives[objective]
    padded = weights(pack=False, **settings)
    assert torch.allclose(padded, weights(**settings), atol=1e-5)
    other = weights(steps=1) if objective == "none" else weights()
    assert not torch.allclose(padded, other, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"simcut_alpha": 3.0}, {"muon": True, "ema_decay": 0.9}], ids=str
)
def test_packed_run_resumes_to_the_same_bytes(settings: dict[str, Any], tmp_path: Path) -> None:
    short_runs.check_resume(trained, tmp_path, **settings)


def test_packed_run_of_an_earlier_plan_starts_its_epoch_again(tmp_path: Path) -> None:
    trained(tmp_path, 2, save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "checkpoint-2"
    file = checkpoint / "run_state.json"
    state = json.loads(file.read_text())
    del state["data"][PACKING]  # as before there was a second plan
    file.write_text(json.dumps(state))
    message = error_of(trained, tmp_path, 3, checkpoint)
    assert message.startswith(f"{PACKING}: {PLAN_VERSION}, but {checkpoint} was trained with 1: ")
    assert "the version of the code" in message
    assert "ignore_data_skip=True" in message
    assert "pack: False" in error_of(trained, tmp_path, 3, checkpoint, pack=False)
    assert trained(tmp_path, 3, checkpoint, ignore_data_skip=True).state.global_step == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_tokens_per_batch": None}, "pack=True needs max_tokens_per_batch"),
        ({"crossconst_alpha": 1.0}, "pack=True does not go with crossconst_alpha"),
        ({"teacher": ["x"], "teacher_top": 4}, "pack=True does not go with teacher_top=4"),
    ],
)
def test_packing_is_refused_where_it_cannot_be(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises((UserError, ValueError), match=reason):
        trained(tmp_path, **settings)


def test_packing_is_the_default_of_gpus_only(tmp_path: Path) -> None:
    trainer = trained(tmp_path, pack=None)
    assert not trainer.packs
    assert trainer.args.pack is None, "arguments of the caller stay as they are"


def test_losses_of_a_gpu_are_read_when_one_is_logged(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.losses.add(0, 0, torch.tensor(1.0))
    trainer.losses.add(trainer._epoch_start, 0, torch.tensor(float("nan")))
    with pytest.raises(
        UserError, match=r"the loss of update \d+ is nan; its batch contains the lines \d+"
    ):
        trainer.log({"loss": 1.0})
    trainer.log({"loss": 1.0})  # they have been read
