"""`M2M100ForConditionalGeneration`, of M2M-100 and NLLB-200: converted to ours it gives its logits, ids and beams."""

import json
from pathlib import Path

import pytest
import torch
from transformers import M2M100Tokenizer

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.m2m100 import from_m2m100
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_same_logits,
    converted,
    installed,
    write_m2m100_folder,
)

PEER = f"`M2M100ForConditionalGeneration`, {installed('transformers')}"


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
