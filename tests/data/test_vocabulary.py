"""Vocabulary extension: old ids and logits stay, and new text takes fewer tokens."""

import json
from collections import Counter

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from hf_vanilla_transformer import Translator, VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from hf_vanilla_transformer.data import encode_pairs, load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.data.tokenizer_training import train_sentencepiece_tokenizer
from hf_vanilla_transformer.data.vocabulary import extend_embeddings, extend_tokenizer
from tests.model_helpers import TYING_MODES, assert_near, error_of, tiny_model
from tests.trainer_helpers import QUIET

OLD = ["the old words and the new words of a language", "a language of words"] * 3
NEW = ["les mots nouveaux de la langue française", "encore des mots français, et puis d'autres"] * 3
SETTINGS = ["padding_side", "model_input_names", "split_special_tokens", "special_tokens_map"]


@pytest.fixture(scope="module")
def tokenizers():
    old = train_tokenizer(OLD, 290)
    return old, extend_tokenizer(old, NEW, 30)


def length(tokenizer, texts):
    return sum(len(ids) for ids in tokenizer(texts)["input_ids"])


def test_old_tokens_keep_their_ids_and_new_text_gets_shorter(tokenizers):
    old, new = tokenizers
    assert len(new) == len(old) + 30
    assert all(new.get_vocab()[token] == index for token, index in old.get_vocab().items())
    assert sorted(new.get_vocab().values()) == list(range(len(new)))
    assert length(new, NEW) < 0.6 * length(old, NEW)
    assert length(new, OLD) <= length(old, OLD)
    assert all(getattr(new, name) == getattr(old, name) for name in SETTINGS)


@pytest.mark.parametrize("text", [*NEW[:2], *OLD[:2], " déjà  vu\n", "日本 </s> 🙂", ""])
def test_extended_tokenizer_restores_every_text(text, tokenizers):
    for tokenizer in tokenizers:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_extended_tokenizer_is_saved_and_loaded(tokenizers, tmp_path):
    _, new = tokenizers
    save_tokenizers(tmp_path, new)
    assert AutoTokenizer.from_pretrained(tmp_path)(NEW + OLD)["input_ids"] == new(NEW + OLD)["input_ids"]


@pytest.mark.parametrize("tied", TYING_MODES)
@torch.no_grad()
def test_logits_of_old_tokens_stay(tied, tokenizers, tmp_path):
    old, new = tokenizers
    shared, tie = tied
    sizes = {} if shared else {"decoder_vocab_size": 50}
    model = tiny_model(
        vocab_size=len(old),
        share_encoder_decoder_embeddings=shared,
        tie_word_embeddings=tie,
        lm_head_bias=True,
        **sizes,
    )
    ids = old(OLD[:2], padding=True, return_tensors="pt")
    batch = {**ids, "decoder_input_ids": torch.tensor([[0, 7, 45], [0, 9, 4]])}
    before = model(**batch).logits
    extend_embeddings(model, old, new)
    after = model(**batch).logits
    assert_near(after[..., : before.shape[-1]], before, 1e-6)
    assert model.config.vocab_size == len(new)
    assert after.shape[-1] == (len(new) if shared else 50)
    # a new token is the mean of the old tokens that it replaces
    (token, _), parts = new("mots")["input_ids"], old("mots")["input_ids"][:-1]
    assert token >= len(old) and len(parts) > 1
    matrices = [model.get_encoder().embed_tokens.weight]
    if shared:
        matrices += [model.get_decoder().embed_tokens.weight, model.lm_head.weight, model.lm_head.bias]
    for matrix in matrices:
        assert_near(matrix[token], matrix[parts].mean(dim=0), 1e-6)
    assert (model.lm_head.weight is model.get_decoder().embed_tokens.weight) == tie
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again(**batch).logits.equal(after)


@torch.no_grad()
def test_separate_target_vocabulary_is_extended_alone(tokenizers):
    old, new = tokenizers
    sizes = {"vocab_size": 40, "decoder_vocab_size": len(old), "share_encoder_decoder_embeddings": False}
    model = tiny_model(lm_head_bias=True, tie_word_embeddings=False, **sizes)
    batch = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[0, 200, 250]])}
    before = model(**batch).logits
    extend_embeddings(model, old, new, side="target")
    after = model(**batch).logits
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (40, len(new))
    assert_near(after[..., : len(old)], before, 1e-6)
    assert torch.isfinite(after).all() and after.shape[-1] == len(new)


def test_merges_are_those_of_the_algorithm():
    # Sennrich et al. 2016: merge the most frequent pair of adjacent tokens; here without an index
    old = train_tokenizer(OLD, 270)
    found = extend_tokenizer(old, NEW, 12)
    merges = json.loads(found.backend_tokenizer.to_str())["model"]["merges"]
    added = merges[len(json.loads(old.backend_tokenizer.to_str())["model"]["merges"]) :]
    lines = [old.convert_ids_to_tokens(old(text)["input_ids"][:-1]) for text in NEW]
    for left, right in added:
        pairs = Counter(
            pair for line in lines for pair in zip(line, line[1:], strict=False) if not pair[1].startswith("Ġ")
        )
        # pairs do not cross words: in these texts a word begins with a space, a comma is one word, and "'" begins one
        pairs = Counter({pair: n for pair, n in pairs.items() if pair[1] not in (",", "'") and pair[0] != "'"})
        assert pairs[left, right] == max(pairs.values())
        for line in lines:
            index = 0
            while index < len(line) - 1:
                if (line[index], line[index + 1]) == (left, right):
                    line[index : index + 2] = [left + right]
                index += 1


def test_invalid_arguments_are_one_line_errors(tokenizers):
    old, new = tokenizers
    assert "more" in error_of(extend_tokenizer, old, NEW, 0)
    assert "byte-pair" in error_of(lambda: extend_tokenizer(object(), NEW, 5))
    model = tiny_model(vocab_size=len(old))
    assert "side='both'" in error_of(extend_embeddings, model, old, new, side="both")
    assert "token" in error_of(lambda: extend_embeddings(model, old, train_tokenizer(NEW, 300)))
    assert "old" in error_of(lambda: extend_embeddings(tiny_model(vocab_size=40), old, new))


# Tags


def added_as_special(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>", "<2en>"]})
    return tokenizer


@pytest.mark.parametrize(
    "add",
    [
        lambda old: extend_tokenizer(old, tags=["<2de>", "<2en>"]),
        lambda old: extend_tokenizer(old, NEW, 9, 2, ["<2de>", "<2en>"]),
        added_as_special,
    ],
)
@pytest.mark.parametrize("lowercase", [False, True])
def test_tags_are_recognised_and_special_tokens_in_a_text_are_text(add, lowercase, tmp_path):
    save_tokenizers(tmp_path / "old", train_tokenizer(OLD, 290, lowercase=lowercase))
    new = add(AutoTokenizer.from_pretrained(tmp_path / "old"))
    save_tokenizers(tmp_path / "new", new)
    for tokenizer in (AutoTokenizer.from_pretrained(tmp_path / "new"), *load_tokenizers(tmp_path / "new")):
        for tag in ("<2de>", "<2en>"):
            ids = tokenizer(f"{tag} the old </s> <s> words")["input_ids"]
            assert ids[0] == tokenizer.convert_tokens_to_ids(tag) >= 280
            assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.bos_token_id not in ids
            assert tokenizer.decode(ids[1:], skip_special_tokens=True).strip() == "the old </s> <s> words"
        assert len(tokenizer) == len(new) == max(tokenizer.get_vocab().values()) + 1


def test_tags_saved_as_special_tokens_by_others_are_recognised_when_loaded(tmp_path):
    """Files that transformers wrote have `split_special_tokens` and the tag as a special token."""
    added_as_special(train_tokenizer(OLD, 290)).save_pretrained(tmp_path)
    assert load_tokenizers(tmp_path)[0].tokenize("<2de> words")[0] == "<2de>"


def test_tags_of_others_are_recognised_wherever_this_package_reads_text():
    tokenizer = added_as_special(train_tokenizer(OLD, 290))
    tags = dict(zip(("input_ids", "labels"), tokenizer.convert_tokens_to_ids(["<2de>", "<2en>"]), strict=True))
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


def test_row_of_a_tag_starts_as_the_mean_of_its_characters(tokenizers):
    old, _ = tokenizers
    new = extend_tokenizer(old, tags=["<2de>"])
    model = tiny_model(vocab_size=len(old))
    extend_embeddings(model, old, new)
    parts = old("<2de>", add_special_tokens=False)["input_ids"]
    matrix = model.get_input_embeddings().weight
    assert_near(matrix[-1], matrix[parts].mean(dim=0), 1e-6)


def test_trainer_names_tags_that_are_read_as_text(tokenizers, tmp_path, capsys):
    for tokenizer, count in (
        (added_as_special(train_tokenizer(OLD, 290)), 1),
        (extend_tokenizer(tokenizers[0], tags=["<2de>"]), 0),
    ):
        args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **QUIET)
        VanillaTransformerTrainer(tiny_model(vocab_size=300), args, processing_class=tokenizer)
        assert capsys.readouterr().out.count("<2de>") == count
