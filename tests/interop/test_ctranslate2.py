"""A CTranslate2 export generates our tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.inference import Translator
from hf_vanilla_transformer.interop.ctranslate2 import write_ctranslate2
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.symbol_tokenizers import train_any_tokenizer
from tests.interop.exports import CORPUS, LINES
from tests.interop.foreign import SOURCES, Record, converted, spelt, write_opus_folder
from tests.model_helpers import PAD, error_of, padded, tiny_model

ctranslate2 = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(CORPUS, vocab_size=320)


def saved(
    folder: Path, model: VanillaTransformerForConditionalGeneration, tokenizer: Any
) -> VanillaTransformerForConditionalGeneration:
    model.save_pretrained(folder / "model")
    save_tokenizers(folder / "model", tokenizer)
    return model


def engine_of(folder: Path) -> Any:
    """The engine with the model that is saved in this folder."""
    return ctranslate2.Translator(str(write_ctranslate2(folder / "model", folder / "ct2")), "cpu")


def talkative(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A model that writes no special token but the end."""
    model = tiny_model(tie_word_embeddings=False, lm_head_bias=True, **fields)
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.lm_head.bias[[0, PAD, 3]] = -1e4
    return model


def pieces_of(tokenizer: Any, texts: list[str]) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]


FIELDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "split": {
        "position_encoding_type": "sinusoidal_split",
        "activation_function": "swish",
        "scale_embedding": False,
    },
    "fairseq": {"position_encoding_type": "sinusoidal_fairseq"},
    "learned": {
        "position_encoding_type": "learned",
        "attention_bias": False,
        "layer_norm_eps": 1e-3,
    },
    "separate": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 330,
        "vocab_size": 333,
    },
    "pre-norm": {"layer_norm_position": "pre"},
}


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_ctranslate2_export_generates_our_tokens(
    fields: dict, beams: int, tokenizer: Any, tmp_path: Path
) -> None:
    model = saved(tmp_path, talkative(**{"vocab_size": 320, **fields}), tokenizer)
    results = engine_of(tmp_path).translate_batch(
        pieces_of(tokenizer, LINES),
        beam_size=beams,
        length_penalty=1.0,
        max_decoding_length=9,
        min_decoding_length=9,
        return_end_token=True,
    )
    ids = padded(tokenizer(LINES)["input_ids"])
    expected = model.generate(
        ids,
        attention_mask=ids.ne(PAD).long(),
        num_beams=beams,
        length_penalty=1.0,
        max_new_tokens=9,
        min_new_tokens=9,
    )
    for row, result in zip(expected[:, 1:].tolist(), results, strict=True):
        found = [engine_id(token, tokenizer) for token in result.hypotheses[0]]
        assert found[:8] == row[:8]


def engine_id(token: str, tokenizer: Any) -> int:
    """The id of a token of the engine's vocabulary, including embedding rows without a token."""
    return (
        int(token[8:-1]) if token.startswith("<unused_") else tokenizer.convert_tokens_to_ids(token)
    )


SETTINGS = {
    "several translations": {"num_return_sequences": 2, "num_beams": 2},
    "start of the search": {"decoder_start_token_id": 9},
    "end of the search": {"eos_token_id": 20},
    "list with one token": {"forced_bos_token_id": [7]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_ctranslate2_export_translates_with_the_settings_of_the_search(
    settings: dict, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny_model(vocab_size=320, eos_token_id=[2, 30]).double()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    saved(tmp_path, model, tokenizer)
    assert "; checked with" in export("ctranslate2", tmp_path / "model", tmp_path / "ct2")


def test_export_of_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    saved(tmp_path, tiny_model(vocab_size=len(tokenizer) - 1), tokenizer)
    assert "tokenizer" in error_of(export, "ctranslate2", tmp_path / "model", tmp_path / "ct2")


# transformers forbids the padding after the softmax and CTranslate2 before it: beams are compared with its share
@pytest.mark.parametrize(("beams", "padding"), [(1, 9.0), (4, -9.0)])
def test_ctranslate2_export_of_a_converted_opus_model(
    beams: int, padding: float, tmp_path: Path
) -> None:
    """It has no start token besides the padding, and must never generate it."""
    theirs = write_opus_folder(tmp_path / "opus", decoder_attention_heads=4)
    with torch.no_grad():
        theirs.final_logits_bias[0, -1] = padding
    theirs.save_pretrained(tmp_path / "opus")
    ours, tokenizer, _ = converted("marian", tmp_path / "opus", tmp_path / "ours")
    line = export("ctranslate2", tmp_path / "ours", tmp_path / "ct2")
    assert "beam_size=4, length_penalty=1.0" in line
    results = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu").translate_batch(
        pieces_of(tokenizer, SOURCES),
        beam_size=beams,
        length_penalty=1.0,
        max_decoding_length=11,
        min_decoding_length=11,
    )
    settings = {"length_penalty": 1.0, "early_stopping": False} if beams > 1 else {}
    expected = ours.generate(
        **tokenizer(SOURCES, padding=True, return_tensors="pt"),
        num_beams=beams,
        max_new_tokens=12,
        min_new_tokens=11,
        **settings,
    )
    assert [result.hypotheses[0] for result in results] == [
        tokenizer.convert_ids_to_tokens(row) for row in expected[:, 1:12]
    ]


@pytest.fixture
def with_mapping(tokenizer: Any, tmp_path: Path) -> list[str]:
    """The words that the vocabulary mapping `vmap.txt` of a saved model allows. Returns them."""
    saved(tmp_path, tiny_model(vocab_size=320, decoder_layers=1), tokenizer)
    allowed = tokenizer.convert_ids_to_tokens([9, 10, 11])
    (source,) = pieces_of(tokenizer, ["two"])
    lines = ["\t" + " ".join(allowed), *(f"{token}\t{allowed[0]}" for token in source)]
    (tmp_path / "vmap.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return allowed


def test_ctranslate2_export_with_a_vocabulary_mapping(
    with_mapping: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    export("ctranslate2", tmp_path / "model", tmp_path / "ct2", vmap=tmp_path / "vmap.txt")
    engine = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu")
    lengths = {"max_decoding_length": 6, "min_decoding_length": 6}
    (result,) = engine.translate_batch(
        pieces_of(tokenizer, ["two"]), use_vmap=True, beam_size=1, **lengths
    )
    found = set(result.hypotheses[0])
    assert found
    assert found <= {*with_mapping, "<s>", "</s>", "<unk>", "<pad>"}
    translator = Translator.from_pretrained(tmp_path / "model", shortlist=tmp_path / "vmap.txt")
    sources = [tokenizer.convert_ids_to_tokens(translator.encode(text, 1)) for text in SOURCES]
    for beams in (1, 3):
        theirs = engine.translate_batch(
            sources,
            use_vmap=True,
            beam_size=beams,
            length_penalty=1.0,
            max_batch_size=1,
            **lengths,
        )
        ours = translator.translate_nbest(
            SOURCES,
            probabilities=True,
            max_new_tokens=6,
            min_new_tokens=6,
            length_penalty=1.0,
            num_beams=beams,
        )
        assert [best.tokens for best, *_ in ours] == [result.hypotheses[0] for result in theirs]


@pytest.mark.parametrize(
    ("target_format", "name", "message"),
    [("ctranslate2", "missing.txt", "missing.txt"), ("marian", "vmap.txt", "ctranslate2")],
)
def test_mapping_that_is_missing_or_of_another_format_is_refused(
    target_format: str, name: str, message: str, with_mapping: list[str], tmp_path: Path
) -> None:
    assert message in error_of(
        export, target_format, tmp_path / "model", tmp_path / "other", vmap=tmp_path / name
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"final_layer_norm": True},
        {"decoder_attention_heads": 2},
        {"head_dim": 3, "value_head_dim": 8},
    ],
)
def test_ctranslate2_export_names_unsupported_options(
    fields: dict, tokenizer: Any, tmp_path: Path, record_property: Record
) -> None:
    saved(tmp_path, tiny_model(vocab_size=320, **fields), tokenizer)
    message = error_of(write_ctranslate2, tmp_path / "model", tmp_path / "ct2")
    assert message.startswith(f"{next(iter(fields))}=")
    assert "CTranslate2" in message
    assert not (tmp_path / "ct2").exists()
    record_property("not exported", spelt(fields))


TEXTS = {
    "chars": ["CC(=O)OBr", "c1ccccc1 ", "[nH]", "C [C@@H] Cl"],
    "words": ["C ( O ) Br", "c 1 c c"],
    "smiles": ["CC(=O)OBr", "c1cc[nH]c1", "C[C@@H](N)Cl"],
    "bytes": ["C ( O ) Br", "c 1 c c"],
    r"[A-Z][a-z]?|.": ["C ( O ) Br", "c 1 c c"],
}


@pytest.mark.parametrize(("tokens", "texts"), TEXTS.items(), ids=TEXTS)
def test_ctranslate2_export_gives_our_text_of_any_tokens(
    tokens: str, texts: list[str], tmp_path: Path
) -> None:
    tokenizer = train_any_tokenizer([(text, 1) for text in texts], tokens, vocab_size=400)
    model = saved(tmp_path, talkative(vocab_size=len(tokenizer)), tokenizer)
    results = engine_of(tmp_path).translate_batch(
        pieces_of(tokenizer, texts),
        beam_size=4,
        length_penalty=1.0,
        max_decoding_length=9,
    )
    expected = list(
        Translator(model, tokenizer).translate(
            texts,
            num_beams=4,
            length_penalty=1.0,
            max_new_tokens=9,
            early_stopping=True,
        )
    )
    written = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in written] == expected
    assert all(expected)
