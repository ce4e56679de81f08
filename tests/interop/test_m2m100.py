"""`M2M100ForConditionalGeneration`, of M2M-100 and NLLB-200: converted to ours it gives its logits, ids and beams."""

import json
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

from hf_vanilla_transformer.interop.fairseq_folders import from_m2m100
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_same_logits,
    converted,
    installed,
    train_sentencepiece,
    write_m2m100_folder,
)
from tests.model_helpers import error_of

PEER = f"`M2M100ForConditionalGeneration`, {installed('transformers')}"


def test_m2m100_folder_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    theirs = write_m2m100_folder(tmp_path / "m2m", tokenizer=False)
    ours, _, _ = converted("m2m100", tmp_path / "m2m", tmp_path / "ours")
    record_property("logits", (PEER, assert_same_logits(ours, theirs)))
    assert ours.config.layer_norm_position == "pre"
    assert ours.config.position_encoding_type == "sinusoidal_fairseq"
    assert ours.config.share_encoder_decoder_embeddings
    assert ours.config.tie_word_embeddings


def test_m2m100_folder_gives_its_ids_and_beams(tmp_path: Path, record_property: Record) -> None:
    theirs = write_m2m100_folder(tmp_path / "m2m")
    options = {"source_language": "en", "target_language": "de"}
    ours, tokenizer, target = converted("m2m100", tmp_path / "m2m", tmp_path / "ours", **options)
    peer = M2M100Tokenizer.from_pretrained(tmp_path / "m2m", src_lang="en", tgt_lang="de")
    batch, expected = (
        each(SOURCES, padding=True, return_tensors="pt") for each in (tokenizer, peer)
    )
    assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
    # the language is the first token of source and target
    assert batch["input_ids"][:, 0].tolist() == [peer.get_lang_id("en")] * len(SOURCES)
    assert target(text_target=TARGETS)["input_ids"] == peer(text_target=TARGETS)["input_ids"]
    written = ours.generate(**batch)
    assert (
        written.tolist()
        == theirs.generate(**expected, forced_bos_token_id=peer.get_lang_id("de")).tolist()
    )
    assert (written[:, 1] == peer.get_lang_id("de")).all()
    texts = target.batch_decode(written, skip_special_tokens=True)
    assert texts == peer.batch_decode(written, skip_special_tokens=True)
    record_property("tokens", "`M2M100Tokenizer`")
    record_property("tokens", "its beam search")


@pytest.mark.parametrize("change", ["no class", "no settings", "wrapped weights"])
def test_m2m100_folder_of_an_older_version_has_its_tokenizer(change: str, tmp_path: Path) -> None:
    write_m2m100_folder(tmp_path / "m2m")
    settings = tmp_path / "m2m" / "tokenizer_config.json"
    if change == "no class":
        values = json.loads(settings.read_text())
        del values["tokenizer_class"]
        settings.write_text(json.dumps(values))
    elif change == "no settings":
        settings.unlink()
    else:
        weights = tmp_path / "m2m" / "model.safetensors"
        save_file(
            {f"module._orig_mod.{name}": each for name, each in load_file(weights).items()},
            weights,
        )
    _, tokenizer, _ = converted("m2m100", tmp_path / "m2m", tmp_path / "ours", source_language="en")
    peer = M2M100Tokenizer.from_pretrained(tmp_path / "m2m", src_lang="en")
    assert tokenizer(SOURCES)["input_ids"] == peer(SOURCES)["input_ids"]


def test_nllb_folder_with_only_a_sentencepiece_model_has_its_ids(tmp_path: Path) -> None:
    """The pieces follow four special tokens. The languages in alphabetical order and a mask follow the pieces."""
    write_m2m100_folder(tmp_path / "nllb", tokenizer=False)
    (tmp_path / "nllb" / "vocab.json").unlink()
    file = tmp_path / "nllb" / "sentencepiece.bpe.model"
    size = len(train_sentencepiece(file, SOURCES + TARGETS, model_type="bpe"))
    config = json.loads((tmp_path / "nllb" / "config.json").read_text()) | {
        "vocab_size": size + 204
    }
    M2M100ForConditionalGeneration(M2M100Config.from_dict(config)).save_pretrained(
        tmp_path / "nllb"
    )
    languages = {"source_language": "ace_Arab", "target_language": "zul_Latn"}
    ours, tokenizer, target = converted("m2m100", tmp_path / "nllb", tmp_path / "ours", **languages)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in SOURCES:
        ids = [3 if piece == pieces.unk_id() else piece + 1 for piece in pieces.encode(text)]
        assert tokenizer(text)["input_ids"] == [size + 1, *ids, 2]
    assert target.convert_tokens_to_ids("<mask>") == size + 203
    assert ours.generation_config.forced_bos_token_id == size + 202


@torch.no_grad()
def test_m2m100_refuses_unknown_languages_and_tokenizers(tmp_path: Path) -> None:
    write_m2m100_folder(tmp_path / "m2m")
    for name in ("source_language", "target_language"):
        assert f"{name}=xx" in error_of(from_m2m100, tmp_path / "m2m", **{name: "xx"})
    file = tmp_path / "m2m" / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
    )
    assert "tokenizer_class=LlamaTokenizer" in error_of(from_m2m100, tmp_path / "m2m")
