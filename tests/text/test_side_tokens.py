"""Tokens by id, of tokenizers with two vocabularies or with tokens that `get_vocab()` lacks."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import FSMTTokenizer, M2M100Tokenizer, MarianTokenizer, PreTrainedTokenizerBase

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation import cross_attention
from hf_vanilla_transformer.inference.alignment import word_ranges
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.side_tokens import side_decoder, side_tokens
from hf_vanilla_transformer.text.tokenizer_files import tokenizer_digest
from tests.interop.foreign import SOURCES, TARGETS, write_fsmt_tokenizer, write_m2m100_folder
from tests.interop.two_vocabularies import MODELS, write_separate_opus_folder
from tests.model_helpers import error_of, tiny_model


def by_id(file: Path) -> dict[int, str]:
    return {number: token for token, number in json.loads(file.read_text()).items()}


def marian(folder: Path) -> tuple[PreTrainedTokenizerBase, dict[int, str], dict[int, str]]:
    write_separate_opus_folder(folder / "opus", (50, 57))
    sides = (by_id(folder / "opus" / name) for name in ("vocab.json", "target_vocab.json"))
    return MarianTokenizer.from_pretrained(folder / "opus"), *sides


def fsmt(folder: Path) -> tuple[PreTrainedTokenizerBase, dict[int, str], dict[int, str]]:
    write_fsmt_tokenizer(folder / "fsmt")
    sides = (by_id(folder / "fsmt" / name) for name in ("vocab-src.json", "vocab-tgt.json"))
    return FSMTTokenizer.from_pretrained(folder / "fsmt"), *sides


def m2m100(folder: Path) -> tuple[PreTrainedTokenizerBase, dict[int, str], dict[int, str]]:
    write_m2m100_folder(folder / "m2m")
    tokenizer = M2M100Tokenizer.from_pretrained(folder / "m2m")
    tokens = by_id(folder / "m2m" / "vocab.json")
    tokens |= {number: f"__{code}__" for code, number in tokenizer.lang_code_to_id.items()}
    return tokenizer, tokens, tokens


def fast(folder: Path) -> tuple[PreTrainedTokenizerBase, dict[int, str], dict[int, str]]:
    tokenizer = train_tokenizer(SOURCES, 300)
    tokenizer.add_tokens(["<unused_301>", "added"])
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    return tokenizer, tokens, tokens


@pytest.mark.parametrize("write", [marian, fsmt, m2m100, fast])
def test_side_tokens_are_those_of_the_files(write: Any, tmp_path: Path) -> None:
    tokenizer, *sides = write(tmp_path)
    for side, expected in zip(("source", "target"), sides, strict=True):
        size = max(expected) + 5  # rows of padding
        tokens = side_tokens(tokenizer, size, side)
        assert {
            number: token for number, token in enumerate(tokens) if number in expected
        } == expected
        assert len(set(tokens)) == len(tokens) == size
        assert all(
            number in expected or token.startswith("<unused_")
            for number, token in enumerate(tokens)
        )


@pytest.mark.parametrize("write", [marian, fsmt])
def test_source_ids_have_the_text_and_the_words_of_the_source(write: Any, tmp_path: Path) -> None:
    tokenizer, *_ = write(tmp_path)
    ids = tokenizer("a dog in the snow")["input_ids"]
    decode = side_decoder(tokenizer, "source")
    assert decode(ids[:-1]).split() == ["a", "dog", "in", "the", "snow"]
    assert max(number for words in word_ranges(tokenizer, ids, "source") for number in words) == 4


def test_models_with_another_target_vocabulary_are_no_ensemble(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write_separate_opus_folder(folder / "opus")
        ids = {
            "eos_token_id": 0,
            "unk_token_id": 1,
            "pad_token_id": 52,
            "decoder_start_token_id": 52,
        }
        sizes = {
            "vocab_size": 53,
            "decoder_vocab_size": 53,
            "share_encoder_decoder_embeddings": False,
        }
        tiny_model(**sizes, **ids, bos_token_id=None).save_pretrained(folder)
        save_tokenizers(folder, MarianTokenizer.from_pretrained(folder / "opus"))
    assert len(Translator.from_pretrained(folders[0], ensemble=folders[1:]).models) == 2
    tokens = by_id(folders[1] / "target_vocab.json")
    tokens[9], tokens[8] = tokens[8], tokens[9]
    (folders[1] / "target_vocab.json").write_text(
        json.dumps({token: number for number, token in tokens.items()})
    )
    digests = {tokenizer_digest([MarianTokenizer.from_pretrained(folder)]) for folder in folders}
    assert len(digests) == 2
    assert "ensemble" in error_of(
        lambda: Translator.from_pretrained(folders[0], ensemble=folders[1:])
    )


@pytest.mark.parametrize("name", ["marian", "fairseq-codes"])
def test_attention_labels_and_targets_are_those_of_each_side(name: str, tmp_path: Path) -> None:
    translator = Translator.from_pretrained(MODELS[name](tmp_path))
    source, target = translator.source_tokenizer, translator.target_tokenizer
    labels, target_labels, weights = cross_attention(
        translator.model, source, target, SOURCES[0], TARGETS[0]
    )
    expected = [
        token if token in source.get_vocab() else "<unk>" for token in source.tokenize(SOURCES[0])
    ]
    assert labels[:-1] == expected
    ids = target(text_target=TARGETS[0])["input_ids"]
    assert target_labels == [target.decoder[i] for i in ids] and weights.shape[2:] == (
        len(ids),
        len(labels),
    )
