"""`MarianMTModel`: exported from ours it gives our logits. Converted to ours it gives its logits, ids and text."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.marian import from_marian, to_marian
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import FFN, D, marian_npz
from tests.interop.conftest import Compare
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    UNSEEN,
    Record,
    assert_fields,
    converted,
    installed,
    spelt,
    write_opus_folder,
)
from tests.interop.two_vocabularies import write_separate_opus_folder
from tests.model_helpers import (
    TYING_MODES,
    assert_near,
    error_of,
    tiny_model,
    translation_batch,
    tying,
)
from tests.paper import paper_position

PEER = f"`MarianMTModel`, {installed('transformers')}"


@pytest.mark.parametrize("positions", ["sinusoidal", "sinusoidal_split"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "d_model": 33,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 11,
            "activation_function": "swish",
        },
    ],
)
@pytest.mark.parametrize(("share", "tie"), TYING_MODES)
@torch.no_grad()
def test_marian_export_gives_our_logits(
    share: bool, tie: bool, fields: dict, positions: str
) -> None:
    tied = tying(share, tie, position_encoding_type=positions, lm_head_bias=True, **fields)
    ours = tiny_model(**tied)
    marian = to_marian(ours)
    batch = translation_batch([7, 3, 5], [4, 6, 2], vocab_size=31)
    target = ours.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    expected, actual = (model(**batch, decoder_input_ids=target).logits for model in (ours, marian))
    assert_near(actual, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"position_encoding_type": "learned"},
        {"attention_bias": False},
        {"final_layer_norm": True},
        {"layer_norm_position": "pre"},
        {"head_dim": 3, "value_head_dim": 8},
        {"head_dim": 7, "value_head_dim": 7, "d_model": 30},  # 7.5
        {"layer_norm_eps": 1e-6},
    ],
)
def test_marian_export_names_unsupported_options(fields: dict, record_property: Record) -> None:
    with pytest.raises(UserError, match=next(iter(fields))):
        to_marian(tiny_model(**fields))
    record_property("not exported", spelt(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 88},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "d_model": 40},
        {"scale_embedding": False, "activation_function": "gelu", "encoder_layers": 1},
    ],
    ids=["opus", "two vocabularies", "nothing tied", "gelu"],
)
def test_marian_folder_gives_its_logits(fields: dict, tmp_path: Path, compared: Compare) -> None:
    theirs = write_opus_folder(tmp_path / "opus", **fields)
    ours, _, _ = compared(PEER, "marian", tmp_path / "opus", theirs)
    assert_fields(ours.config, lm_head_bias=True, position_encoding_type="sinusoidal_split")


def test_marian_folder_gives_its_ids_and_text(tmp_path: Path, record_property: Record) -> None:
    theirs = write_opus_folder(tmp_path / "opus")
    ours, tokenizer, target_tokenizer = converted("marian", tmp_path / "opus", tmp_path / "ours")
    peer = MarianTokenizer.from_pretrained(tmp_path / "opus")
    texts = SOURCES + UNSEEN + [">>de<< a dog runs"]
    expected = peer(texts, padding=True, return_tensors="pt")
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
    assert batch["attention_mask"].tolist() == expected["attention_mask"].tolist()
    assert (batch["input_ids"] == tokenizer.unk_token_id).any()
    targets = tokenizer(text_target=TARGETS)["input_ids"]
    assert targets == peer(text_target=TARGETS)["input_ids"]
    found = target_tokenizer.batch_decode(targets, skip_special_tokens=True)
    assert found == peer.batch_decode(targets, skip_special_tokens=True)
    # with Marian's own beam, length penalty, forced end-of-sentence and suppressed padding
    written = ours.generate(**batch)
    assert written.shape[1] == 12
    assert written.tolist() == theirs.generate(**expected).tolist()
    assert target_tokenizer.batch_decode(written) == peer.batch_decode(written)
    record_property("tokens", "`MarianTokenizer`")
    record_property("tokens", "its beam search")


def test_marian_export_keeps_the_search_of_an_opus_model(tmp_path: Path) -> None:
    theirs = write_opus_folder(tmp_path / "opus")
    with torch.no_grad():
        theirs.final_logits_bias[0, -1] = 9  # the padding, which bad_words_ids forbids
    theirs.save_pretrained(tmp_path / "opus")
    ours, tokenizer, _ = converted("marian", tmp_path / "opus", tmp_path / "ours")
    export("marian", tmp_path / "ours", tmp_path / "back")
    back = MarianMTModel.from_pretrained(tmp_path / "back").eval()
    batch = tokenizer(SOURCES, padding=True, return_tensors="pt")
    written = theirs.generate(**batch).tolist()
    assert ours.generate(**batch).tolist() == written
    assert back.generate(**batch).tolist() == written
    assert_fields(
        back.generation_config,
        bad_words_ids=[[theirs.config.pad_token_id]],
        forced_eos_token_id=0,
    )


def test_marian_folder_keeps_half_precision(tmp_path: Path) -> None:
    write_opus_folder(tmp_path / "opus").half().save_pretrained(tmp_path / "opus")
    ours, _, _ = converted("marian", tmp_path / "opus", tmp_path / "ours")
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float16}


def test_marian_folder_keeps_learned_positions(tmp_path: Path, compared: Compare) -> None:
    # Marian's class has no such option, but loads any table from its files
    theirs = write_opus_folder(tmp_path / "opus", max_position_embeddings=16)
    with torch.no_grad():
        theirs.model.encoder.embed_positions.weight += 0.1
        theirs.model.decoder.embed_positions.weight += 0.2
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(tensors, tmp_path / "opus" / "model.safetensors")
    theirs = MarianMTModel.from_pretrained(tmp_path / "opus").eval()
    ours, _, _ = compared(PEER, "marian", tmp_path / "opus", theirs)
    assert_fields(ours.config, position_encoding_type="learned")


def marian_names(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Marian's own weights under the names of `MarianMTModel`, with a padding of zeros at the end."""
    renames = {
        r"^(encoder|decoder)_l1_": r"model.\1.layers.0.",
        r"^(encoder|decoder)_l2_": r"model.\1.layers.1.",
        "self_Wo_ln": "self_attn_layer_norm",
        "context_Wo_ln": "encoder_attn_layer_norm",
        "ffn_ffn_ln": "final_layer_norm",
        "self_([Wb])o": r"self_attn.out_proj_\1",
        "context_([Wb])o": r"encoder_attn.out_proj_\1",
        "self_([Wb])([qkv])": r"self_attn.\2_proj_\1",
        "context_([Wb])([qkv])": r"encoder_attn.\2_proj_\1",
        "ffn_([Wb])([12])": r"fc\2_\1",
        "_(W|scale)$": ".weight",
        "_(b|bias)$": ".bias",
    }
    found = {"final_logits_bias": np.pad(arrays["decoder_ff_logit_out_b"], ((0, 0), (0, 1)))}
    for name, theirs in (
        ("model.encoder.embed_tokens.weight", "encoder_Wemb"),
        ("model.decoder.embed_tokens.weight", "decoder_Wemb"),
        ("lm_head.weight", "decoder_ff_logit_out_Wt"),
    ):
        found[name] = np.pad(arrays[theirs], ((0, 1), (0, 0)))
    for name, array in arrays.items():
        if "coder_l" in name:
            for pattern, replacement in renames.items():
                name = re.sub(pattern, replacement, name)
            found[name] = array[0] if len(array) == 1 else array.T
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


def test_marian_folder_whose_tied_matrices_differ_gives_the_logits_of_marian(
    tmp_path: Path, compared: Compare
) -> None:
    """As of opus-mt-tc: config.json ties weights that differ in Marian's files. The class would tie it again."""
    arrays = marian_npz.weights((23, 23), "none")
    config = MarianConfig(
        d_model=D,
        encoder_layers=2,
        decoder_layers=1,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        activation_function="swish",
        vocab_size=24,
        pad_token_id=23,
        decoder_start_token_id=23,
        eos_token_id=0,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "tc")
    tensors = marian_names(arrays)
    # transformers 4 wrote it too, with the values of one of them
    tensors["model.shared.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, tmp_path / "tc" / "model.safetensors")
    notes = "; ".join(from_marian(tmp_path / "tc").notes)
    assert (
        "model.encoder.embed_tokens.weight and model.decoder.embed_tokens.weight, which differ"
        in notes
    )
    assert (
        "model.decoder.embed_tokens.weight and lm_head.weight, which differ: each is used as it is"
        in notes
    )

    def position(index: int, _: str) -> np.ndarray:
        """The paper's, sines first, which transformers and CTranslate2 compute for Marian's models."""
        paper = paper_position(index, D)
        return np.concatenate([paper[0::2], paper[1::2]])

    theirs = marian_npz.restated(arrays, position=position, eps=1e-5)
    ours, _, _ = compared(marian_npz.PEER, "marian", tmp_path / "tc", theirs)
    assert_fields(ours.config, share_encoder_decoder_embeddings=False, tie_word_embeddings=False)


def test_marian_folder_with_separate_vocabularies(tmp_path: Path, compared: Compare) -> None:
    theirs, peer = write_separate_opus_folder(tmp_path / "opus")
    ours, tokenizer, target = compared(PEER, "marian", tmp_path / "opus", theirs)
    assert tokenizer(SOURCES)["input_ids"] == peer(SOURCES)["input_ids"]
    expected = peer(text_target=TARGETS)["input_ids"]
    assert target(text_target=TARGETS)["input_ids"] == expected != peer(TARGETS)["input_ids"]
    found = target.batch_decode(expected, skip_special_tokens=True)
    assert found == peer.batch_decode(expected, skip_special_tokens=True)


def test_vocabulary_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    write_opus_folder(tmp_path / "opus")
    file = tmp_path / "opus" / "vocab.json"
    tokens = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(tokens | {"one more": len(tokens)}), encoding="utf-8")
    message = error_of(convert, "marian", tmp_path / "opus", tmp_path / "ours")
    assert f"{len(tokens) + 1} tokens" in message
    assert not (tmp_path / "ours").exists()
