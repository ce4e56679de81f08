"""A CTranslate2 export generates our tokens."""

from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.inference import Translator
from hf_vanilla_transformer.interop.ctranslate2 import write_ctranslate2
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.symbol_tokenizers import train_any_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.foreign import SOURCES, converted, spelt, write_opus_folder
from tests.model_helpers import PAD, error_of, padded, tiny_model

ctranslate2 = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")

CORPUS = [
    "two hundred and thirty-four",
    "zweihundertvierunddreißig",
    "a dog runs , a cat sleeps .",
] * 9
SENTENCES = [
    "two hundred",
    "a dog sleeps .",
    "thirty-four cats and a dog run , two hundred sleep",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocab_size=320)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "position_encoding_type": "sinusoidal_split",
            "activation_function": "swish",
            "scale_embedding": False,
        },
        {"position_encoding_type": "sinusoidal_fairseq"},
        {
            "position_encoding_type": "learned",
            "attention_bias": False,
            "layer_norm_eps": 1e-3,
        },
        {
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 330,
            "vocab_size": 333,
        },
        {"layer_norm_position": "pre"},
    ],
    ids=["paper", "split", "fairseq", "learned", "separate", "pre-norm"],
)
def test_ctranslate2_export_generates_our_tokens(fields: dict, beams: int, tokenizer, tmp_path: Path) -> None:
    fields = {
        "vocab_size": 320,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
        **fields,
    }
    model = tiny_model(**fields)
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.lm_head.bias[[0, PAD, 3]] = -1e4
    model.save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    engine = ctranslate2.Translator(str(write_ctranslate2(tmp_path / "model", tmp_path / "ct2")), "cpu")
    rows = tokenizer(SENTENCES)["input_ids"]
    results = engine.translate_batch(
        [tokenizer.convert_ids_to_tokens(row) for row in rows],
        beam_size=beams,
        length_penalty=1.0,
        max_decoding_length=9,
        min_decoding_length=9,
        return_end_token=True,
    )
    ids = padded(rows)
    settings = {
        "num_beams": beams,
        "length_penalty": 1.0,
        "max_new_tokens": 9,
        "min_new_tokens": 9,
    }
    expected = model.generate(ids, attention_mask=ids.ne(PAD).long(), **settings)
    for row, result in zip(expected[:, 1:].tolist(), results, strict=True):
        ids = [engine_id(token, tokenizer) for token in result.hypotheses[0]]
        assert ids[:8] == row[:8]


SETTINGS = {
    "several translations": {"num_return_sequences": 2, "num_beams": 2},
    "start of the search": {"decoder_start_token_id": 9},
    "end of the search": {"eos_token_id": 20},
    "list with one token": {"forced_bos_token_id": [7]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_ctranslate2_export_translates_with_the_settings_of_the_search(settings, tokenizer, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=320, eos_token_id=[2, 30]).double()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    assert "; checked with" in export("ctranslate2", tmp_path / "model", tmp_path / "ct2")


def test_export_of_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer, tmp_path: Path) -> None:
    tiny_model(vocab_size=len(tokenizer) - 1).save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    assert "tokenizer" in error_of(export, "ctranslate2", tmp_path / "model", tmp_path / "ct2")


# transformers forbids the padding after the softmax and CTranslate2 before it: beams are compared with its share
@pytest.mark.parametrize(("beams", "padding"), [(1, 9.0), (4, -9.0)])
def test_ctranslate2_export_of_a_converted_opus_model(beams: int, padding: float, tmp_path: Path) -> None:
    """It has no start token besides the padding, and must never generate it."""
    theirs = write_opus_folder(tmp_path / "opus", decoder_attention_heads=4)
    with torch.no_grad():
        theirs.final_logits_bias[0, -1] = padding
    theirs.save_pretrained(tmp_path / "opus")
    ours, tokenizer, _ = converted("marian", tmp_path / "opus", tmp_path / "ours")
    line = export("ctranslate2", tmp_path / "ours", tmp_path / "ct2")
    assert "beam_size=4, length_penalty=1.0" in line
    engine = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu")
    rows = tokenizer(SOURCES)["input_ids"]
    options = {"length_penalty": 1.0, "max_decoding_length": 11, "min_decoding_length": 11}
    results = engine.translate_batch(
        [tokenizer.convert_ids_to_tokens(row) for row in rows], beam_size=beams, **options
    )
    batch = tokenizer(SOURCES, padding=True, return_tensors="pt")
    settings = {"length_penalty": 1.0, "early_stopping": False} if beams > 1 else {}
    expected = ours.generate(**batch, num_beams=beams, max_new_tokens=12, min_new_tokens=11, **settings)[:, 1:12]
    assert [result.hypotheses[0] for result in results] == [tokenizer.convert_ids_to_tokens(row) for row in expected]


def test_ctranslate2_export_with_a_vocabulary_mapping(tokenizer, tmp_path: Path) -> None:
    tiny_model(vocab_size=320, decoder_layers=1).save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    allowed = tokenizer.convert_ids_to_tokens([9, 10, 11])
    source = tokenizer.convert_ids_to_tokens(tokenizer("two")["input_ids"])
    lines = ["\t" + " ".join(allowed), *(f"{token}\t{allowed[0]}" for token in source)]
    (tmp_path / "vmap.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    export("ctranslate2", tmp_path / "model", tmp_path / "ct2", vmap=tmp_path / "vmap.txt")
    engine = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu")
    settings = {
        "use_vmap": True,
        "beam_size": 1,
        "max_decoding_length": 6,
        "min_decoding_length": 6,
    }
    found = set(engine.translate_batch([source], **settings)[0].hypotheses[0])
    assert found and found <= {*allowed, "<s>", "</s>", "<unk>", "<pad>"}
    translator = Translator.from_pretrained(tmp_path / "model", shortlist=tmp_path / "vmap.txt")
    sources = [tokenizer.convert_ids_to_tokens(translator.encode(text, 1)) for text in SOURCES]
    for beams in (1, 3):
        options = settings | {
            "beam_size": beams,
            "length_penalty": 1.0,
            "max_batch_size": 1,
        }
        theirs = [tokens for one in engine.translate_batch(sources, **options) for tokens in one.hypotheses]
        limits = {
            "max_new_tokens": 6,
            "min_new_tokens": 6,
            "length_penalty": 1.0,
            "num_beams": beams,
        }
        ours = translator.translate_nbest(SOURCES, probabilities=True, **limits)
        assert [hypotheses[0].tokens for hypotheses in ours] == theirs
    with pytest.raises(UserError, match=r"missing\.txt"):
        export(
            "ctranslate2",
            tmp_path / "model",
            tmp_path / "other",
            vmap=tmp_path / "missing.txt",
        )
    with pytest.raises(UserError, match="ctranslate2"):
        export("marian", tmp_path / "model", tmp_path / "other", vmap=tmp_path / "vmap.txt")


def engine_id(token: str, tokenizer) -> int:
    """The id of a token of the engine's vocabulary, including embedding rows without a token."""
    return int(token[8:-1]) if token.startswith("<unused_") else tokenizer.convert_tokens_to_ids(token)


@pytest.mark.parametrize(
    "fields",
    [
        {"final_layer_norm": True},
        {"decoder_attention_heads": 2},
        {"head_dim": 3, "value_head_dim": 8},
    ],
)
def test_ctranslate2_export_names_unsupported_options(fields, tokenizer, tmp_path, record_property):
    tiny_model(vocab_size=320, **fields).save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    assert "CTranslate2" in error_of(write_ctranslate2, tmp_path / "model", tmp_path / "ct2")
    assert not (tmp_path / "ct2").exists()
    record_property("not exported", spelt(fields))


@pytest.mark.parametrize("tokens", ["chars", "words", "smiles", "bytes", r"[A-Z][a-z]?|."])
def test_ctranslate2_export_gives_our_text_of_any_tokens(tokens: str, tmp_path: Path) -> None:
    texts = ["CC(=O)OBr", "c1ccccc1 ", "[nH]", "C [C@@H] Cl"] if tokens == "chars" else ["C ( O ) Br", "c 1 c c"]
    texts = ["CC(=O)OBr", "c1cc[nH]c1", "C[C@@H](N)Cl"] if tokens == "smiles" else texts
    tokenizer = train_any_tokenizer([(text, 1) for text in texts], tokens, vocab_size=400)
    model = tiny_model(vocab_size=len(tokenizer), tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.lm_head.bias[[0, PAD, 3]] = -1e4
    model.save_pretrained(tmp_path / "model")
    save_tokenizers(tmp_path / "model", tokenizer)
    engine = ctranslate2.Translator(str(write_ctranslate2(tmp_path / "model", tmp_path / "ct2")), "cpu")
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    results = engine.translate_batch(rows, beam_size=4, length_penalty=1.0, max_decoding_length=9)
    settings = {
        "num_beams": 4,
        "length_penalty": 1.0,
        "max_new_tokens": 9,
        "early_stopping": True,
    }
    expected = list(Translator(model, tokenizer).translate(texts, **settings))
    written = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in written] == expected
    assert all(expected)
