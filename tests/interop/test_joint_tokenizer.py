"""One tokenizer.json for two vocabularies encodes as the source's, with shifted ids, and decodes as the target's."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.joint_tokenizer import joint_tokenizer
from tests.interop.foreign import ENGLISH, GERMAN, write_two_tokenizers
from tests.model_helpers import tiny_config

TEXTS = [*ENGLISH[:2], "  Größe: 5 €  ", "naïve </s> 東京 \ue000!", "zweihundert"]


def backend(content: dict) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


def test_joint_tokenizer_encodes_as_the_source_and_decodes_as_the_target(tmp_path: Path) -> None:
    source, target = write_two_tokenizers(tmp_path)
    config = tiny_config(vocab_size=310, decoder_vocab_size=330, share_encoder_decoder_embeddings=False)
    content, settings, ids = joint_tokenizer(source, target, config)
    joint = backend(content)
    for text in TEXTS:
        encoded = joint.encode(text)
        if "</s>" not in text:  # which tokenizers takes for the special token where only tokenizer.json is known
            assert ids.to_model(torch.tensor(encoded.ids)).tolist() == source(text)["input_ids"]
        assert joint.decode(target(text)["input_ids"]) == text
    assert ids.vocab_size == 330 + 310 and settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "</s>" and settings["clean_up_tokenization_spaces"] is False


def test_shared_tokenizer_is_unchanged() -> None:
    tokenizer = train_tokenizer([*ENGLISH, *GERMAN], vocab_size=320)
    content, settings, ids = joint_tokenizer(tokenizer, tokenizer, tiny_config(vocab_size=330))
    assert ids.offset == 0 and ids.vocab_size == 330 and settings["split_special_tokens"] is True
    assert backend(content).encode(TEXTS[0]).ids == tokenizer(TEXTS[0])["input_ids"]


def test_special_tokens_with_different_ids_are_refused() -> None:
    source, target = (train_tokenizer(texts, vocab_size=300) for texts in (ENGLISH, GERMAN))
    source.add_special_tokens({"mask_token": "<mask>"})
    config = tiny_config(vocab_size=310, decoder_vocab_size=330, share_encoder_decoder_embeddings=False)
    with pytest.raises(UserError, match="'<mask>'"):
        joint_tokenizer(source, target, config)
