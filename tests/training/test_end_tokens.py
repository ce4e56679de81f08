"""Models learn to end their translations with the eos_token of the tokenizer."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    BertTokenizerFast,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hf_vanilla_transformer.text import save_tokenizers
from tests.trainer_helpers import error_of, run_tiny, write_pairs

PAIRS = [("one", "eins"), ("two", "zwei"), ("one two", "eins zwei"), ("two one", "zwei eins")]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert(*words: str) -> PreTrainedTokenizerBase:
    """A tokenizer of BERT, without bos_token and eos_token: `[CLS] words [SEP]`."""
    tokenizer = BertTokenizerFast(
        vocab={word: number for number, word in enumerate([*SPECIAL, *words])}
    )
    assert tokenizer.eos_token_id is None
    return tokenizer


def train(folder: Path, tokenizers: Path, **fields: object) -> None:
    settings = {
        **write_pairs(folder.parent / "text", PAIRS),
        "tokenizer_name": tokenizers,
        "vocab_size": "null",
        "generation_max_length": "null",
        "d_model": 32,
        "dropout": 0.0,
        "per_device_train_batch_size": 4,
        "max_steps": 60,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
    }
    run_tiny(folder, **settings | fields)


def test_model_ends_its_sentences_with_the_separator(tmp_path: Path) -> None:
    tokenizer = bert("one", "two", "eins", "zwei")
    save_tokenizers(tmp_path / "tokenizers", tokenizer)
    refusal = error_of(train, tmp_path / "run", tmp_path / "tokenizers")
    assert "puts no eos_token" in refusal
    assert 'tokenizer.eos_token = "[SEP]"' in refusal
    tokenizer.eos_token = "[SEP]"
    save_tokenizers(tmp_path / "tokenizers", tokenizer)
    train(tmp_path / "run", tmp_path / "tokenizers")
    separator = tokenizer.sep_token_id
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert model.config.target_eos_token_id == separator == model.generation_config.eos_token_id
    sources = tokenizer(
        ["one two", "one"],
        padding=True,
        return_tensors="pt",
        return_token_type_ids=False,
    )
    assert all((row == separator).sum() == 1 for row in model.generate(**sources))


def words_alone(template: str = "", **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts nothing around a sentence, or the tokens of a template."""
    names = ["<pad>", "<unk>", "</s>", "one", "two", "eins", "zwei"]
    model = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


SPECIAL_NAMES = {"pad_token": "<pad>", "eos_token": "</s>"}
NO_END = "puts no eos_token at the end of a sentence"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (words_alone(**SPECIAL_NAMES), NO_END),
        (words_alone(pad_token="<pad>"), NO_END),
        (words_alone("</s> $A", **SPECIAL_NAMES), NO_END),
        (
            words_alone("</s> $A </s>", **SPECIAL_NAMES),
            "starts a sentence with the token that ends",
        ),
        (words_alone(eos_token="</s>"), "has no pad_token"),
    ],
)
def test_tokenizer_without_an_end_is_refused(tmp_path: Path, tokenizer, message: str) -> None:
    save_tokenizers(tmp_path / "tokenizers", tokenizer)
    refusal = error_of(train, tmp_path / "run", tmp_path / "tokenizers")
    assert re.match(rf"(tokenizer_name: )?{re.escape(str(tmp_path))}.*{message}", refusal)
    assert not (tmp_path / "run").exists()
