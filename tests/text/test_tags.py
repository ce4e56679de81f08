"""Tags such as `<2de>` that are added to a trained tokenizer."""

import pytest
from datasets import Dataset
from tokenizers import AddedToken
from transformers import AutoTokenizer

from hf_vanilla_transformer import (
    Translator,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
)
from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.tokenizer_training import train_sentencepiece_tokenizer
from tests.model_helpers import tiny_model
from tests.trainer_helpers import QUIET

OLD = ["the old words and the new words of a language", "a language of words"] * 3


def added_as_special(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>", "<2en>"]})
    return tokenizer


def added(tokenizer):
    tokenizer.add_tokens(
        [AddedToken(tag, rstrip=True, normalized=False) for tag in ("<2de>", "<2en>")]
    )
    return tokenizer


@pytest.mark.parametrize("add", [added, added_as_special])
@pytest.mark.parametrize("lowercase", [False, True])
def test_tags_are_recognised_and_special_tokens_in_a_text_are_text(add, lowercase, tmp_path):
    save_tokenizers(tmp_path / "old", train_tokenizer(OLD, 290, lowercase=lowercase))
    new = add(AutoTokenizer.from_pretrained(tmp_path / "old"))
    save_tokenizers(tmp_path / "new", new)
    for tokenizer in (
        AutoTokenizer.from_pretrained(tmp_path / "new"),
        *load_tokenizers(tmp_path / "new"),
    ):
        for tag in ("<2de>", "<2en>"):
            ids = tokenizer(f"{tag} the old </s> <s> words")["input_ids"]
            assert ids[0] == tokenizer.convert_tokens_to_ids(tag) >= 280
            assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.bos_token_id not in ids
            assert (
                tokenizer.decode(ids[1:], skip_special_tokens=True).strip()
                == "the old </s> <s> words"
            )
        assert len(tokenizer) == len(new) == max(tokenizer.get_vocab().values()) + 1


def test_tags_saved_as_special_tokens_by_others_are_recognised_when_loaded(tmp_path):
    """Files that transformers wrote have `split_special_tokens` and the tag as a special token."""
    added_as_special(train_tokenizer(OLD, 290)).save_pretrained(tmp_path)
    assert load_tokenizers(tmp_path)[0].tokenize("<2de> words")[0] == "<2de>"


def test_tags_of_others_are_recognised_wherever_this_package_reads_text():
    tokenizer = added_as_special(train_tokenizer(OLD, 290))
    tags = dict(
        zip(
            ("input_ids", "labels"),
            tokenizer.convert_tokens_to_ids(["<2de>", "<2en>"]),
            strict=True,
        )
    )
    rows = {"source": ["<2de> the old </s> words"] * 9, "target": ["<2en> a <2en> language"] * 9}
    encoded, _ = encode_pairs(Dataset.from_dict(rows), tokenizer, drop_too_long=False)
    for row in encoded:
        for side, text in (("input_ids", rows["source"][0]), ("labels", rows["target"][0])):
            assert row[side][0] == tags[side] and row[side].count(tags[side]) == text.count("<2")
            assert row[side].count(tokenizer.eos_token_id) == 1
            assert tokenizer.decode(row[side][:-1]).replace(" ", "") == text.replace(" ", "")
    ids = Translator(tiny_model(vocab_size=len(tokenizer)), tokenizer).encode(rows["source"][0], 1)
    assert ids == encoded[0]["input_ids"]


def test_tag_of_a_slow_tokenizer_is_said_to_be_text(caplog):
    pytest.importorskip("sentencepiece", reason="the extra `convert` is not installed")
    rows = Dataset.from_dict({"source": ["<2de> words"], "target": ["words"]})
    for add, said in ((lambda tokenizer: tokenizer, False), (added_as_special, True)):
        encode_pairs(rows, add(train_sentencepiece_tokenizer(OLD, 290)), drop_too_long=False)
        assert any("<2de>" in record.message for record in caplog.records) is said


def test_trainer_names_tags_that_are_read_as_text(tmp_path, capsys):
    for add, count in ((added_as_special, 1), (added, 0)):
        tokenizer = add(train_tokenizer(OLD, 290))
        args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **QUIET)
        VanillaTransformerTrainer(tiny_model(vocab_size=300), args, processing_class=tokenizer)
        assert capsys.readouterr().out.count("<2de>") == count
