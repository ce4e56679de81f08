"""Uploads by a run are refused. What the `Seq2SeqTrainer` of transformers uploads, without this package's trainer."""

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
from tests.model_helpers import tiny_model
from tests.trainer_helpers import run_tiny, write_pairs

PAIRS = [("one", "eins"), ("two", "zwei"), ("twenty-one", "einundzwanzig")]


@pytest.mark.parametrize(
    ("flags", "message"), [({"hub_token": TOKEN}, "hub_token"), ({"push_to_hub": True}, "vanilla-transformer publish")]
)
def test_uploads_by_a_run_are_refused_with_the_remedy(tmp_path, flags, message) -> None:
    with pytest.raises(UserError, match=message) as raised:
        run_tiny(tmp_path / "numbers", **flags, **write_pairs(tmp_path, PAIRS, "train"))
    assert TOKEN not in str(raised.value) and not (tmp_path / "numbers").exists()


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
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    others = only.files.keys() - files - {code.name for code in package.glob("*_vanilla_transformer.py")}
    assert others == {".gitattributes", "README.md", "training_args.bin"} and files <= only.files.keys()
    for name, content in only.files.items():
        (tmp_path / "downloaded").mkdir(exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "downloaded")
    translate = pipeline(model=str(tmp_path / "downloaded"), trust_remote_code=True, device="cpu", max_new_tokens=4)
    ids = model.eval().generate(**tokenizer(["one"], return_tensors="pt"), max_new_tokens=4)
    assert translate("one")[0]["translation_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
