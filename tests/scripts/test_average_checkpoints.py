"""`vanilla-transformer average`: several checkpoints in, one model that loads and translates out."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import tiny_model

TRAINING_STATE = "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with separate vocabularies and three checkpoints, as `Trainer` saves them."""
    run = tmp_path_factory.mktemp("run")
    source, target = (
        train_tokenizer(["one two"] * 3, 262),
        train_tokenizer(["eins zwei drei"] * 3, 265),
    )
    sizes = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": False,
    }
    for seed, step in enumerate((2, 4, 10)):
        folder = run / f"checkpoint-{step}"
        tiny_model(seed, **sizes).save_pretrained(folder)
        save_tokenizers(folder, source)
        for name in TRAINING_STATE:
            (folder / name).write_bytes(b"x")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_tokenizers(run, source, target)
    return run


def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def test_average_of_a_run_is_a_model_that_translates(command, finished, tmp_path):
    output = tmp_path / "new" / "averaged"
    status, printed, _ = command("average", "--run", finished, "--last", 2, "--output", output)
    assert status == 0 and str(output) in printed
    first, second, found = (
        weights(path) for path in (finished / "checkpoint-4", finished / "checkpoint-10", output)
    )
    assert found.keys() == first.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(output)
    assert model.config.target_vocab_size == 265
    translator = Translator.from_pretrained(output, device="cpu")
    assert len(translator.source_tokenizer) == 262 and len(translator.target_tokenizer) == 265
    assert len(list(translator.translate(["one", "two"], max_new_tokens=3))) == 2
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "target_tokenizer"} <= names
    assert not {"trainer_state.json", *TRAINING_STATE} & names
    assert [path.name for path in output.parent.iterdir()] == ["averaged"]


def test_average_of_named_checkpoints_into_a_file(command, finished, tmp_path):
    named = [finished / "checkpoint-2" / "model.safetensors", finished / "checkpoint-10"]
    assert command("average", *named, "--output", tmp_path / "mean.safetensors")[0] == 0
    first, second = weights(finished / "checkpoint-2"), weights(finished / "checkpoint-10")
    for name, tensor in load_file(tmp_path / "mean.safetensors").items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    assert [path.name for path in tmp_path.iterdir()] == ["mean.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "RUN", "--last", "4"], "last"),
        (["--run", "RUN", "--last", "0"], "last: "),
        (["--run", "nowhere", "--last", "1"], "nowhere"),
        (["nowhere/checkpoint-1"], "nowhere/checkpoint-1"),
        (["RUN/checkpoint-2", "other.safetensors"], "other.safetensors"),
        (["RUN/checkpoint-2", "broken.safetensors"], "broken.safetensors"),
    ],
)
def test_user_errors_are_one_line_and_leave_no_files(
    command, finished, tmp_path, in_tmp_path, arguments, message
):
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\x00")
    status, printed, errors = command(
        "average", *(each.replace("RUN", str(finished)) for each in arguments), "--output", "out"
    )
    assert (status, printed) == (2, "")
    assert errors.startswith("error: ") and message in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken.safetensors",
        "other.safetensors",
    ]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("output", ["mean", "mean.safetensors"])
def test_checkpoints_of_other_tokenizers_are_refused(command, finished, tmp_path, side, output):
    """The tensors have the same sizes, but an id is another token."""
    other = tmp_path / "other" / "checkpoint-4"
    shutil.copytree(finished / "checkpoint-4", other)
    shutil.copytree(finished / "target_tokenizer", other.parent / "target_tokenizer")
    first = finished / "checkpoint-2"
    assert command("average", first, other, "--output", tmp_path / "same")[0] == 0
    if side == "source":
        save_tokenizers(other, train_tokenizer(["six ten"] * 3, 262))
    else:
        tokenizer = train_tokenizer(["zwei zehn"] * 3, 265)
        save_tokenizers(other.parent / "target_tokenizer", tokenizer)
    status, _, errors = command("average", first, other, "--output", tmp_path / output)
    message = f"error: {other}: its tokenizer differs from that of {first}; an average shares one\n"
    assert (status, errors) == (2, message)
    assert not (tmp_path / output).exists()


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_output_is_never_overwritten(command, finished, tmp_path, name):
    there = tmp_path / "model" / "config.json" if name == "model" else tmp_path / name
    there.parent.mkdir(exist_ok=True)
    there.write_text("mine")
    status, _, errors = command(
        "average", "--run", finished, "--last", 2, "--output", tmp_path / name
    )
    assert status == 2 and str(tmp_path / name) in errors
    assert there.read_text() == "mine" and len(list(there.parent.iterdir())) == 1
