"""`--push_to_hub` in training: the finished model in one commit, with its card and without training state.

Also what the `Seq2SeqTrainer` of transformers uploads, without this package's trainer.
"""

from pathlib import Path

import pytest
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)

import hf_vanilla_transformer
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.hub.loopback_hub import TOKEN
from tests.model_helpers import error_of, tiny_model
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [("one", "eins"), ("two", "zwei"), ("twenty-one", "einundzwanzig")]


def train(folder, **flags):
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "save_steps": 1,
        "push_to_hub": True,
    }
    return run_tiny(
        folder, **settings, **write_pairs(folder.parent, PAIRS, "train", "test"), **flags
    )


def test_run_is_published_at_its_end(hub, tmp_path, capfd, drawn_figures) -> None:
    train(tmp_path / "numbers", hub_private_repo=True)
    repository = hub.repositories["me/numbers"]
    first, only = repository.branches["main"]
    assert repository.private and first.files.keys() == {".gitattributes"}
    files = only.files
    weights = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (
        weights | {"README.md", "all_results.json", "pipeline_vanilla_transformer.py"}
        <= files.keys()
    )
    training = (
        "optimizer",
        "scheduler",
        "rng_state",
        "training_args",
        "trainer_state",
        "checkpoint-",
        "runs/",
    )
    assert [name for name in files if name.startswith(training)] == []
    for name in weights:
        assert files[name] == (tmp_path / "numbers" / name).read_bytes(), name
    card = files["README.md"].decode()
    assert 'name = "me/numbers"' in card and "| test | test.source, test.target | BLEU |" in card
    assert "![Cross-attention](attention.png)" in card and files["attention.png"][1:4] == b"PNG"
    printed, errors = capfd.readouterr()
    assert f"{hub.endpoint}/me/numbers/commit/{only.oid}" in printed
    assert TOKEN not in printed + errors
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)


def test_missing_permissions_stop_the_run_before_training(hub, tmp_path) -> None:
    with pytest.raises(UserError, match="token.* google/numbers"):
        train(tmp_path / "numbers", hub_model_id="google/numbers")
    assert not (tmp_path / "numbers").exists()


def test_failed_upload_keeps_the_model_and_names_the_command(hub, tmp_path) -> None:
    hub.faults["commit"] = [(403, {})]
    run = tmp_path / "numbers"
    assert f"vanilla-transformer publish {run} --repo-id me/numbers" in error_of(train, run)
    assert (run / "model.safetensors").is_file() and (run / "README.md").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"hub_token": TOKEN}, "hub_token"), ({"hub_strategy": "checkpoint"}, "hub_strategy")],
)
def test_token_and_checkpoint_uploads_are_refused(hub, tmp_path, flags, message) -> None:
    with pytest.raises(UserError, match=f"^{message}") as raised:
        train(tmp_path / "numbers", **flags)
    assert TOKEN not in str(raised.value) and hub.requests == []


def test_stock_trainer_uploads_a_model_that_loads(hub, tmp_path) -> None:
    tokenizer = train_tokenizer([text for pair in PAIRS for text in pair] * 3, 280)
    model = tiny_model(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1)
    rows = [dict(tokenizer(en, text_target=de)) for en, de in PAIRS]
    settings = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    settings |= {"push_to_hub": True, "hub_strategy": "end", "save_steps": 1}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(tmp_path / "plain"), **settings),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.push_to_hub(tasks="translation", language="de")
    (_, only) = hub.repositories["me/plain"].branches["main"]
    package = Path(hf_vanilla_transformer.__file__).parent
    for code in package.glob("*_vanilla_transformer.py"):
        assert only.files[code.name] == code.read_bytes(), code.name
    # in addition only its card and its arguments
    files = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    others = (
        only.files.keys() - files - {code.name for code in package.glob("*_vanilla_transformer.py")}
    )
    assert (
        others == {".gitattributes", "README.md", "training_args.bin"}
        and files <= only.files.keys()
    )
    for name, content in only.files.items():
        (tmp_path / "downloaded").mkdir(exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "downloaded")
    translate = pipeline(
        model=str(tmp_path / "downloaded"), trust_remote_code=True, device="cpu", max_new_tokens=4
    )
    ids = model.eval().generate(**tokenizer(["one"], return_tensors="pt"), max_new_tokens=4)
    assert translate("one")[0]["translation_text"] == tokenizer.decode(
        ids[0], skip_special_tokens=True
    )
