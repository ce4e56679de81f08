"""`M2M100ForConditionalGeneration`, of M2M-100 and NLLB-200: converted to ours it gives its logits, ids and beams."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.m2m100 import from_m2m100
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_same_logits,
    converted,
    installed,
    train_sentencepiece,
)
from tests.model_helpers import randomise

PEER = f"`M2M100ForConditionalGeneration`, {installed('transformers')}"


def write_m2m100_folder(folder: Path, tokenizer: bool = True) -> M2M100ForConditionalGeneration:
    """Like facebook/m2m100_418M, but small and with random weights."""
    folder.mkdir(parents=True)
    pieces = train_sentencepiece(folder / "sentencepiece.bpe.model", SOURCES + TARGETS)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>"))]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    files = str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model")
    theirs = M2M100Tokenizer(*files, src_lang="en", tgt_lang="de")
    small = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 8}
    model = randomise(
        M2M100ForConditionalGeneration(
            M2M100Config(**small, **heads, vocab_size=max(theirs.lang_code_to_id.values()) + 9)
        )
    )
    model.generation_config = GenerationConfig(
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        num_beams=5,
        max_length=14,
        early_stopping=True,
    )
    model.save_pretrained(folder)
    if tokenizer:
        theirs.save_pretrained(folder)
    return model.eval()


def test_m2m100_folder_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    theirs = write_m2m100_folder(tmp_path / "m2m", tokenizer=False)
    ours, _, _ = converted("m2m100", tmp_path / "m2m", tmp_path / "ours")
    record_property("logits", (PEER, assert_same_logits(ours, theirs)))
    assert ours.config.layer_norm_position == "pre" and ours.config.position_encoding_type == "sinusoidal_fairseq"
    assert ours.config.share_encoder_decoder_embeddings and ours.config.tie_word_embeddings


def test_m2m100_folder_gives_its_ids_and_beams(tmp_path: Path, record_property: Record) -> None:
    theirs = write_m2m100_folder(tmp_path / "m2m")
    options = {"source_language": "en", "target_language": "de"}
    ours, tokenizer, target = converted("m2m100", tmp_path / "m2m", tmp_path / "ours", **options)
    peer = M2M100Tokenizer.from_pretrained(tmp_path / "m2m", src_lang="en", tgt_lang="de")
    batch, expected = (each(SOURCES, padding=True, return_tensors="pt") for each in (tokenizer, peer))
    assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
    # the language is the first token of source and target
    assert batch["input_ids"][:, 0].tolist() == [peer.get_lang_id("en")] * len(SOURCES)
    assert target(text_target=TARGETS)["input_ids"] == peer(text_target=TARGETS)["input_ids"]
    written = ours.generate(**batch)
    assert written.tolist() == theirs.generate(**expected, forced_bos_token_id=peer.get_lang_id("de")).tolist()
    assert (written[:, 1] == peer.get_lang_id("de")).all()
    texts = target.batch_decode(written, skip_special_tokens=True)
    assert texts == peer.batch_decode(written, skip_special_tokens=True)
    record_property("tokens", "`M2M100Tokenizer`")
    record_property("tokens", "its beam search")


@torch.no_grad()
def test_m2m100_refuses_unknown_languages_and_tokenizers(tmp_path: Path) -> None:
    write_m2m100_folder(tmp_path / "m2m")
    for name in ("source_language", "target_language"):
        with pytest.raises(UserError, match=f"{name}=xx"):
            from_m2m100(tmp_path / "m2m", **{name: "xx"})
    file = tmp_path / "m2m" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(UserError, match="tokenizer_class=LlamaTokenizer"):
        from_m2m100(tmp_path / "m2m")
