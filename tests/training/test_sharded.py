"""FSDP2 over two processes: the same updates, both kinds of checkpoints, and `run_training`."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.training.state.checkpoints import average_weights, complete_checkpoints
from tests.model_helpers import TYING_MODES, tiny_model
from tests.trainer_helpers import TORCHRUN, launch
from tests.training import several_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sharded(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    launch(
        repository,
        *TORCHRUN,
        "--nproc_per_node=2",
        str(repository / "tests" / "training" / "sharded_processes.py"),
        str(folder),
        str(repository / "scripts" / "recipes" / "numbers_en_de.yaml"),
        *several_processes.FLAGS,
    )
    return folder, torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_sharded_updates_equal_those_of_one_process(sharded, share, tie, tmp_path):
    part, weights = sharded[1][share, tie]
    assert part < 0.6
    tying = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
    _, _, model = several_processes.train(
        tmp_path,
        40,
        tying=tying,
        max_steps=2,
        **several_processes.BATCHES,
    )
    start = dict(tiny_model(label_smoothing=0.1, **tying).named_parameters())
    for name, parameter in model.named_parameters():
        moved = (parameter - start[name]).norm()
        assert (weights[name] - parameter).norm() <= 1e-5 * moved + 1e-7, name


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "packed"])
def test_sharded_run_resumes_exactly(sharded, kind):
    folder, results = sharded
    _, weights = results[kind]
    _, resumed = results[kind, "resumed"]
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)
    assert [path.name for path in complete_checkpoints(folder / kind)] == [
        "checkpoint-2",
        "checkpoint-4",
    ]


def test_full_state_dict_checkpoint_loads_unsharded(sharded, tmp_path):
    folder, results = sharded
    checkpoint = folder / "FULL" / "checkpoint-4"
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    assert model.config.architectures == ["VanillaTransformerForConditionalGeneration"]
    for name, tensor in results["FULL"][1].items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert (checkpoint / "modeling_vanilla_transformer.py").is_file()
    assert not list(checkpoint.glob("_fsdp*"))
    average = tmp_path / "average.safetensors"
    average_weights([folder / "FULL" / "checkpoint-2", checkpoint], average)
    assert load_file(average).keys() == load_file(checkpoint / "model.safetensors").keys()


def test_sharded_run_ends_in_a_model_folder(sharded):
    run = sharded[0] / "run"
    results = json.loads((run / "all_results.json").read_text())
    assert results["train_updates"] == 4
    assert results["test_sentences"] == 16
    assert results["averaged_checkpoints"] in (0, 2)
    assert "test_chrf" in results
    model = VanillaTransformerForConditionalGeneration.from_pretrained(run)
    weights = load_file(run / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert "lm_head.weight" not in weights
    assert model.lm_head.weight is model.get_input_embeddings().weight
