"""One update is the same in one process and in two: `Seq2SeqTrainer` through accelerate, and bare DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import two_process_worker as worker
from tests.model_helpers import TYING_MODES
from tests.trainer_helpers import TORCHRUN, consistency_update, launch, relative_error

pytestmark = pytest.mark.slow

Results = dict[Any, Any]


@pytest.fixture(scope="module")
def two_processes(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results that rank 0 wrote. One run for all tests, because starting takes longer than computing."""
    folder = tmp_path_factory.mktemp("two_processes")
    processes = f"--nproc_per_node={worker.PROCESSES}"
    launch(repository, *TORCHRUN, processes, worker.__file__, str(folder))
    results = torch.load(folder / "results.pt", weights_only=False)
    assert results["ranks"] == worker.PROCESSES
    return results


@pytest.mark.parametrize("smoothing", worker.SMOOTHINGS)
def test_update_of_two_processes_equals_that_of_one(
    smoothing: float, two_processes: Results, tmp_path: Path
) -> None:
    expected, losses = worker.trained_update(smoothing, worker.SENTENCES, 1, tmp_path)
    assert expected.norm() > 0.1
    for size, _ in worker.SPLITS:
        update, other_losses = two_processes["trainer", smoothing, size]
        assert relative_error(update, expected) <= 1e-5
        assert other_losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("method", worker.CONSISTENCY)
def test_consistency_update_of_two_processes_equals_that_of_one(method, two_processes, tmp_path):
    expected = consistency_update(method, worker.SENTENCES, 1, tmp_path)
    assert expected.norm() > 0.1
    assert relative_error(two_processes["consistency", method], expected) <= 1e-5


@pytest.mark.parametrize("name", ["everything", "documented"])
def test_update_with_a_users_loss_is_the_same_in_two_processes(name, two_processes, tmp_path):
    """With everything on: see `everything_on`."""
    update = getattr(worker, f"{name}_update")
    expected = update(worker.SENTENCES, 1, tmp_path)
    assert expected.norm() > 0.1
    for size, _ in worker.SPLITS:
        assert relative_error(two_processes[name, size], expected) <= 1e-5


def test_evaluation_in_two_processes_has_the_loss_of_one(
    two_processes: Results, tmp_path: Path
) -> None:
    expected = worker.evaluation_loss(tmp_path)
    assert two_processes["evaluation"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", worker.FORMATS)
@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_ddp_works_without_find_unused_parameters(
    share: bool, tie: bool, name: str, two_processes: Results
) -> None:
    model = worker.tied_model(share, tie)
    expected = worker.descend(model, model, worker.FORMATS[name], slice(0, worker.SENTENCES))
    # bfloat16 has 8 bits of precision, and rounding depends on the batch
    tolerance = 1e-5 if name == "fp32" else 3e-2
    assert expected.norm() > 0.1
    assert relative_error(two_processes["ddp", share, tie, name], expected) <= tolerance
