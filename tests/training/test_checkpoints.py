"""Complete and incomplete checkpoints, and their average."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.training.state.checkpoints import (
    average_weights,
    complete_checkpoints,
    remove_staging_folder,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import TYING_MODES, tiny_model


def checkpoint(run, name, state='{"global_step": 1}', weights=b"x"):
    folder = run / name
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_incomplete_and_pruned_checkpoints_are_ignored_and_stay(tmp_path):
    second, tenth, ninth = (checkpoint(tmp_path, f"checkpoint-{step}") for step in (2, 10, 9))
    checkpoint(tmp_path, "checkpoint-11", state=None)
    checkpoint(tmp_path, "checkpoint-12", state='{"global_st')
    checkpoint(tmp_path, "checkpoint-13", state="")
    checkpoint(tmp_path, "checkpoint-14", weights=None)
    checkpoint(tmp_path, "checkpoint-best")
    checkpoint(tmp_path, "my-checkpoint-3")
    assert complete_checkpoints(tmp_path) == [second, ninth, tenth]
    before = sorted(tmp_path.rglob("*"))
    checkpoint(tmp_path / ".saving", "checkpoint-15")
    remove_staging_folder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def saved(path, **tensors):
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("dtype", "numbers", "expected"),
    [
        # in a float32 sum, the ones would be lost next to 1e8
        (torch.float32, [1e8, 1.0, 1.0, -1e8], 0.5),
        # 1 + 2^-7 is bfloat16's next number after 1
        (torch.bfloat16, [1.0, 1 + 2**-6], 1 + 2**-7),
    ],
)
def test_average_is_computed_in_float64(tmp_path, dtype, numbers, expected):
    files = [
        saved(tmp_path / f"{i}", a=torch.tensor([[x, 3.0]], dtype=dtype))
        for i, x in enumerate(numbers)
    ]
    average_weights(files, tmp_path / "mean.safetensors")
    found = load_file(tmp_path / "mean.safetensors")["a"]
    assert found.dtype == dtype
    assert found.tolist() == [[expected, 3.0]]


@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
def test_average_stores_tied_weights_once_and_loads(tmp_path, share, tie):
    models = [
        tiny_model(seed, share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
        for seed in (1, 2)
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    mean = tmp_path / "mean"
    for model, folder in zip([*models, models[0]], (first, second, mean), strict=True):
        model.save_pretrained(folder)
    average_weights([first, second], mean / "model.safetensors")
    assert (
        load_file(mean / "model.safetensors").keys()
        == load_file(first / "model.safetensors").keys()
    )
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(mean).state_dict()
    weights = [model.state_dict() for model in models]
    expected = {name: (tensor + weights[1][name]) / 2 for name, tensor in weights[0].items()}
    torch.testing.assert_close(dict(loaded), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"a": torch.ones(2)}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "c"),
        ({"a": torch.ones(2), "b": torch.ones(1, 3)}, "b"),
        ({"a": torch.ones(2, dtype=torch.float16), "b": torch.ones(3)}, "a"),
    ],
)
def test_average_refuses_different_tensors(tmp_path, tensors, name):
    first = saved(tmp_path / "first.safetensors", a=torch.ones(2), b=torch.ones(3))
    other = saved(tmp_path / "other.safetensors", **tensors)
    with pytest.raises(UserError, match=rf"other\.safetensors .*{name}"):
        average_weights([first, other], tmp_path / "mean.safetensors")
    assert not (tmp_path / "mean.safetensors").exists()
