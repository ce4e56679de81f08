"""`--push_to_hub` in training: the finished model in one commit, with our card, and nothing of the training."""

import pytest

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.training.recipes import parse_recipe
from hf_vanilla_transformer.training.run import run_training
from tests.hub.loopback_hub import TOKEN

FLAGS = {
    **dict.fromkeys(["d_model", "encoder_ffn_dim", "decoder_ffn_dim"], 16),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **{"vocab_size": 280, "per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1, "save_strategy": "steps"},
    **{"generation_max_length": 5, "use_cpu": True, "disable_tqdm": True, "push_to_hub": True},
}
TEXT = {"source": ["one", "two", "twenty-one"], "target": ["eins", "zwei", "einundzwanzig"]}


def train(folder, **flags):
    for side, lines in TEXT.items():
        file = folder.parent / f"text.{side}"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        flags |= {f"{split}_{side}_file": file for split in ("train", "test")}
    words = [word for name, value in {**FLAGS, **flags}.items() for word in (f"--{name}", str(value))]
    return run_training(*parse_recipe(["--output_dir", str(folder), *words]), command="train --push_to_hub true")


def test_a_run_ends_on_the_hub(hub, tmp_path, capfd) -> None:
    train(tmp_path / "numbers", hub_private_repo=True)
    repository = hub.repositories["me/numbers"]
    first, only = repository.branches["main"]
    assert repository.private and first.files.keys() == {".gitattributes"}
    files = only.files
    weights = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert weights | {"README.md", "all_results.json", "pipeline_vanilla_transformer.py"} <= files.keys()
    training = ("optimizer", "scheduler", "rng_state", "training_args", "trainer_state", "checkpoint-", "runs/")
    assert [name for name in files if name.startswith(training)] == []
    for name in weights:
        assert files[name] == (tmp_path / "numbers" / name).read_bytes(), name
    card = files["README.md"].decode()
    assert 'name = "me/numbers"' in card and "| test | text.source, text.target | BLEU |" in card
    assert "![Cross-attention](attention.png)" in card and files["attention.png"][1:4] == b"PNG"
    printed, errors = capfd.readouterr()
    assert f"{hub.endpoint}/me/numbers/commit/{only.oid}" in printed
    assert TOKEN not in printed + errors
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)


def test_missing_rights_are_known_before_the_training(hub, tmp_path) -> None:
    with pytest.raises(UserError, match="^the token may not write to google/numbers"):
        train(tmp_path / "numbers", hub_model_id="google/numbers")
    assert not (tmp_path / "numbers").exists()


def test_a_failure_at_the_end_loses_nothing_and_says_how_to_go_on(hub, tmp_path) -> None:
    hub.faults["commit"] = [(403, {})]
    run = tmp_path / "numbers"
    with pytest.raises(UserError, match=rf"^the model is in {run}, .*push_to_hub.py {run} --repo-id me/numbers$"):
        train(run)
    assert (run / "model.safetensors").is_file() and (run / "README.md").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"hub_token": TOKEN}, "hub_token: arguments end up"), ({"hub_strategy": "checkpoint"}, "hub_strategy=checkp")],
)
def test_what_would_give_something_away_is_refused(hub, tmp_path, flags, message) -> None:
    with pytest.raises(UserError, match=f"^{message}") as raised:
        train(tmp_path / "numbers", **flags)
    assert TOKEN not in str(raised.value) and hub.requests == []
