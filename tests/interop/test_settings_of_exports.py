"""What an export writes about a search: lengths, penalties, tokens and limits, worked out by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer.interop import exporting, transformers_js
from hf_vanilla_transformer.interop.ctranslate2 import (
    NEVER,
    position_table,
    search_arguments,
    search_note,
)
from hf_vanilla_transformer.interop.joint_tokenizer import SourceIds
from hf_vanilla_transformer.interop.search_settings import (
    banned_tokens,
    check_search,
    ends,
    flat,
    length_penalty,
    longest,
    refuse_fields,
    search_differences,
    shortest,
)
from hf_vanilla_transformer.interop.transformers_js import (
    DTYPES,
    _config,
    _rank,
    generation_settings,
    write,
)
from tests.model_helpers import SPECIAL_TOKENS, error_of, tiny_config, tiny_model, word_tokenizer


def model_of(settings, **fields):
    """A tiny model with these settings of the search and no others."""
    model = tiny_model(**fields)
    model.generation_config = GenerationConfig(**settings)
    return model


# Parts of the settings


@pytest.mark.parametrize(
    ("function", "settings", "found"),
    [
        (shortest, {}, 0),
        (shortest, {"min_length": 5}, 4),  # with the start token
        (shortest, {"min_length": 1}, 0),
        (shortest, {"min_length": 3, "min_new_tokens": 4}, 4),
        (shortest, {"min_length": 6, "min_new_tokens": 4}, 5),
        (longest, {}, None),
        (longest, {"max_length": 9}, 8),
        (longest, {"max_length": 2}, 1),
        (longest, {"max_length": 1}, 1),
        (longest, {"max_length": 9, "max_new_tokens": 3}, 3),
        (length_penalty, {}, 1.0),
        (length_penalty, {"paper_length_penalty": 0.6}, 0.6),
        (length_penalty, {"paper_length_penalty": 0.6, "length_penalty": 0.3}, 0.3),
        (ends, {}, []),
        (ends, {"eos_token_id": 2}, [2]),
        (ends, {"eos_token_id": [2, 3]}, [2, 3]),
        (banned_tokens, {}, []),
        (banned_tokens, {"bad_words_ids": [[7], [5, 6], [2]], "eos_token_id": 2}, [7]),
        (banned_tokens, {"bad_words_ids": [[7]], "suppress_tokens": [9, 3, 7]}, [3, 7, 9]),
        (flat, 7, [7]),
        (flat, [[1, 2], [3]], [1, 2, 3]),
        (flat, [], []),
    ],
)
def test_part_of_the_settings(function, settings, found):
    assert function(settings) == found


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"suppress_tokens": [0, 39]}, None),
        ({"suppress_tokens": [40]}, "suppress_tokens=[40]: the vocabulary has 40 tokens"),
        ({"suppress_tokens": [-1]}, "suppress_tokens=[-1]: the vocabulary has 40 tokens"),
        ({"forced_eos_token_id": 0}, None),
        (
            {"forced_eos_token_id": 40},
            "forced_eos_token_id=40: the vocabulary has 40 tokens",
        ),
        ({"bad_words_ids": [[5]]}, None),
        ({"bad_words_ids": []}, None),
        (
            {"bad_words_ids": [[5], [6, 7]]},
            "bad_words_ids=[[5], [6, 7]]: the ONNX export cannot apply it",
        ),
        ({"eos_token_id": [2, 3]}, None),
        ({"repetition_penalty": 1.0}, None),
        (
            {"repetition_penalty": 1.2},
            "repetition_penalty=1.2: the ONNX export cannot apply it",
        ),
        ({"no_repeat_ngram_size": 0}, None),
        ({"num_beam_groups": 1}, None),
        ({"guidance_scale": 1.0}, None),
        ({"encoder_repetition_penalty": 1.0}, None),
        (
            {"num_beams": 2, "max_length": 5, "no_repeat_ngram_size": 2},
            "no_repeat_ngram_size=2: the ONNX export cannot apply it",
        ),
        ({"min_length": 99}, None),
    ],
)
def test_setting_is_applied_or_refused(settings, refused):
    model = model_of(settings)
    if refused is None:
        assert check_search(model, "the ONNX export") == model.generation_config.to_diff_dict()
    else:
        assert error_of(check_search, model, "the ONNX export").startswith(
            f"generation_config.json: {refused}"
        )


@pytest.mark.parametrize(
    ("settings", "library", "note"),
    [
        ({"num_beams": 1, "length_penalty": 0.3}, "CTranslate2", ""),
        (
            {"num_beams": 1, "length_penalty": 0.3},
            "Argos Translate",
            "num_beams=1, length_penalty=0.3",
        ),
        ({"num_beams": 4, "early_stopping": True}, "CTranslate2", "early_stopping=True"),
        ({"num_beams": 4, "early_stopping": False}, "CTranslate2", ""),
        ({"num_beams": 4, "length_penalty": 0.3}, "MarianMTModel", ""),
    ],
)
def test_note_has_what_a_library_does_not_apply(settings, library, note):
    found = search_differences(model_of(settings), library)
    assert found == (f"; {library} does not apply {note}" if note else "")


def test_first_field_that_is_refused_is_named():
    config = tiny_config(d_model=32)
    refuse_fields(config, "no", d_model=False, vocab_size=0)
    assert (
        error_of(refuse_fields, config, "no", d_model=False, vocab_size=True, dropout=True)
        == "vocab_size=40: no"
    )


# CTranslate2


TOKENS = [f"t{number}" for number in range(40)]


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"beam_size": 1, "min_decoding_length": 0}),
        (
            {"num_beams": 1, "length_penalty": 0.3},
            {"beam_size": 1, "min_decoding_length": 0},
        ),
        (
            {"num_beams": 2, "length_penalty": 0.3},
            {"beam_size": 2, "length_penalty": 0.3, "min_decoding_length": 0},
        ),
        (
            {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5},
            {
                "beam_size": 1,
                "no_repeat_ngram_size": 2,
                "repetition_penalty": 1.5,
                "min_decoding_length": 0,
            },
        ),
        (
            {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0},
            {"beam_size": 1, "min_decoding_length": 0},
        ),
        (
            {"min_new_tokens": 3, "max_new_tokens": 9},
            {"beam_size": 1, "min_decoding_length": 3, "max_decoding_length": 9},
        ),
        (
            {"max_new_tokens": 9, "forced_eos_token_id": 2},
            {"beam_size": 1, "min_decoding_length": 0, "max_decoding_length": 8},
        ),
        (
            {"forced_bos_token_id": 7},
            {"beam_size": 1, "min_decoding_length": 0, "target_prefix": [["t7"]]},
        ),
        (
            {"bad_words_ids": [[5], [6, 7]]},
            {
                "beam_size": 1,
                "min_decoding_length": 0,
                "suppress_sequences": [["t6", "t7"]],
            },
        ),
        (
            {"eos_token_id": [2, 3]},
            {"beam_size": 1, "min_decoding_length": 0, "end_token": ["t2", "t3"]},
        ),
        ({"eos_token_id": [2]}, {"beam_size": 1, "min_decoding_length": 0}),
    ],
)
def test_arguments_of_translate_batch(settings, arguments):
    assert search_arguments(model_of(settings), TOKENS) == arguments


def test_bias_of_a_forbidden_token_is_finite_in_float16():
    assert -65504 < NEVER <= -1e4


# transformers.js


@pytest.mark.parametrize(
    ("settings", "fields", "limit"),
    [
        ({}, {}, 512),
        ({}, {"position_encoding_type": "learned", "max_position_embeddings": 30}, 30),
        ({"max_length": 17}, {}, 17),
        (
            {"max_length": 17},
            {"position_encoding_type": "learned", "max_position_embeddings": 30},
            17,
        ),
    ],
)
def test_search_of_the_web_is_greedy_with_a_limit(settings, fields, limit):
    search = {
        "num_beams": 4,
        "length_penalty": 0.5,
        "max_new_tokens": 8,
        "suppress_tokens": [3],
    }
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    found = generation_settings(
        model_of(search | ids | settings, decoder_start_token_id=0, **fields)
    )
    assert found == {
        "num_beams": 1,
        "max_length": limit,
        "decoder_start_token_id": 0,
        "suppress_tokens": [3],
        "max_new_tokens": 8,
        **ids,
    }
    assert (
        generation_settings(model_of({"decoder_start_token_id": 9}))["decoder_start_token_id"] == 9
    )


@pytest.mark.parametrize(("size", "is_shared"), [(40, True), (71, False)])
def test_configuration_of_the_web_is_that_of_marian(size, is_shared):
    model = tiny_model()
    config = _config(model, SimpleNamespace(vocab_size=size), "q8")
    assert config["model_type"] == "marian"
    assert config["architectures"] == ["MarianMTModel"]
    assert config["is_encoder_decoder"] is True
    assert config["forced_eos_token_id"] is None
    assert config["transformers.js_config"] == {"dtype": "q8"}
    assert (config["vocab_size"], config["decoder_vocab_size"]) == (size, 40)
    assert config["share_encoder_decoder_embeddings"] is is_shared
    assert (config["pad_token_id"], config["eos_token_id"]) == (1, 2)
    assert (
        config["d_model"],
        config["decoder_layers"],
        config["decoder_attention_heads"],
    ) == (32, 2, 4)
    assert config["tie_word_embeddings"] is True
    json.dumps(config)


def test_caches_of_the_web_are_in_the_order_of_optimum():
    """Of each layer the decoder's key and value, then the encoder's. The tenth layer follows the second."""
    expected = ["encoder_attention_mask", "encoder_hidden_states", "input_ids"]
    expected += [
        f"past_key_values.{layer}.{stack}.{part}"
        for layer in (0, 2, 10)
        for stack in ("decoder", "encoder")
        for part in ("key", "value")
    ]
    expected += ["cross_scores.0", "use_cache_branch"]
    values = [SimpleNamespace(name=name) for name in reversed(expected)]
    assert [value.name for value in sorted(values, key=_rank)] == expected
    outputs = [
        SimpleNamespace(name=name) for name in ("decoder_norms", "present.0.decoder.key", "logits")
    ]
    assert [value.name for value in sorted(outputs, key=_rank)] == [
        each.name for each in reversed(outputs)
    ]


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ([], "dtype: none: choose from fp32, q8, fp16"),
        (["fp32", "q4", "x"], "dtype: q4 x: choose from fp32, q8, fp16"),
    ],
)
def test_unknown_dtypes_are_refused(dtypes, message, tmp_path):
    assert error_of(write, tiny_model(), tmp_path, tmp_path / "out", dtypes) == message
    assert list(DTYPES.values()) == [
        "",
        "_quantized",
        "_fp16",
    ]  # transformers.js' ends of names


@pytest.mark.parametrize(("largest", "is_refused"), [(0, True), (4, True), (5, False)])
def test_model_larger_than_a_file_of_onnx_is_refused(largest, is_refused, tmp_path, monkeypatch):
    """ONNX' files hold 2^31 bytes; each parameter has four."""
    assert transformers_js._LARGEST == 2147483648
    model = tiny_model()
    monkeypatch.setattr(transformers_js, "_LARGEST", model.num_parameters() * 4 + largest - 4)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers_js, "load_tokenizers", stop)
    if is_refused:
        message = error_of(write, model, tmp_path, tmp_path / "out")
        assert message == "the model has 0.0 GB: a file of ONNX holds at most 2 GB"
    else:
        with pytest.raises(KeyboardInterrupt):
            write(model, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (SourceIds(5), [0, 1, 2, 3, 4]),
        (SourceIds(5, unknown=2, missing=1), [0, 1, 2, 3, 2]),
        (SourceIds(10, offset=4), [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]),
        (SourceIds(10, offset=4, unknown=3, missing=2), [0, 1, 2, 3, 0, 1, 2, 3, 3, 3]),
    ],
)
def test_ids_of_the_joint_tokenizer_become_those_of_the_source(ids, found):
    assert ids.to_model(torch.arange(ids.vocab_size)).tolist() == found


# The choice of a format


@pytest.mark.parametrize(
    ("target_format", "options", "message"),
    [
        (
            "marian",
            {"quantization": "int8"},
            "quantization=int8: this option is for ctranslate2 and argos only",
        ),
        ("argos", {"vmap": "x"}, "vmap=x: this option is for ctranslate2 only"),
        (
            "onnx",
            {"languages": ["en", "de"]},
            "languages=['en', 'de']: this option is for argos only",
        ),
        (
            "ctranslate2",
            {"dtypes": ["q8"]},
            "dtypes=['q8']: this option is for onnx and web only",
        ),
        ("onnx", {"runtime": "x"}, "runtime=x: this option is for web only"),
    ],
)
def test_option_of_another_format_is_refused(target_format, options, message):
    assert error_of(exporting.refuse_options, target_format, options) == message
    exporting.refuse_options(target_format, dict.fromkeys(options))


def test_unknown_format_is_refused(tmp_path):
    message = error_of(exporting.export, "tflite", tmp_path / "model", tmp_path / "out")
    assert message == "format: 'tflite' is none of argos, ctranslate2, marian, onnx"


def test_file_of_argos_is_new_and_has_its_suffix(tmp_path):
    wanted = tmp_path / "new" / "folder" / "a.argosmodel"
    with exporting._new_file(wanted, False) as file:
        file.write_text("x")
    assert wanted.read_text() == "x"
    assert "exists already" in error_of(exporting._new_file, wanted, False)
    with exporting._new_file(wanted, True) as file:
        file.write_text("y")
    assert wanted.read_text() == "y"
    (tmp_path / "b.argosmodel").mkdir()
    for name in ("a.zip", "b.argosmodel"):
        assert "ends with .argosmodel" in error_of(exporting._new_file, tmp_path / name, True)


@pytest.mark.parametrize(
    ("target_format", "source_mark", "target_mark", "in_text", "reason"),
    [
        ("argos", "target", None, True, "Argos puts no token of a language before a source"),
        ("argos", None, "target", False, None),
        ("onnx", "target", None, True, None),  # the text may have the mark
        ("onnx", "target", None, False, "its search adds no token of a language"),
        ("onnx", "source", None, True, "its search adds no token of a language"),
        ("onnx", "target", "target", True, "its search adds no token of a language"),
        ("ctranslate2", "source", "target", False, None),
        ("marian", "source", "target", False, None),
    ],
)
def test_languages_without_a_place_are_refused(
    target_format, source_mark, target_mark, in_text, reason, monkeypatch
):
    languages = SimpleNamespace(
        source_mark=source_mark, target_mark=target_mark, in_text=in_text, ids={"a": 1, "b": 2}
    )
    directions = SimpleNamespace(source=languages, unmarked=False)
    monkeypatch.setattr(exporting, "Directions", lambda *tokenizers: directions)
    if reason is None:
        exporting.refuse_languages(target_format, ())
    else:
        message = error_of(exporting.refuse_languages, target_format, ())
        assert message == f"{target_format}: the model has 2 languages, and {reason}"
    for each in (
        SimpleNamespace(source=None, unmarked=False),
        SimpleNamespace(source=languages, unmarked=True),
    ):
        monkeypatch.setattr(exporting, "Directions", lambda *_, each=each: each)
        exporting.refuse_languages(target_format, ())


RENORMALISED = (
    "; its beams exclude tokens before the softmax, as `generate` does with renormalize_logits=True"
)


@pytest.mark.parametrize(
    ("settings", "excludes"),
    [
        ({"num_beams": 1}, False),
        ({"num_beams": 1, "suppress_tokens": [5]}, False),
        ({"num_beams": 2}, False),
        ({"num_beams": 2, "suppress_tokens": [5]}, True),
        ({"num_beams": 2, "no_repeat_ngram_size": 2}, True),
        ({"num_beams": 2, "bad_words_ids": [[5, 6]]}, True),
        ({"num_beams": 2, "min_new_tokens": 1}, False),
        ({"num_beams": 2, "min_new_tokens": 2}, True),
        ({"num_beams": 2, "min_new_tokens": 2, "renormalize_logits": True}, False),
    ],
)
def test_note_has_the_arguments_and_how_scores_differ(settings, excludes):
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", *"abc"], **SPECIAL_TOKENS)
    model = model_of(settings)
    tokens = [
        *tokenizer.convert_ids_to_tokens(range(7)),
        *(f"<unused_{number}>" for number in range(7, 40)),
    ]
    listed = ", ".join(f"{name}={value}" for name, value in search_arguments(model, tokens).items())
    expected = f"; its search is an argument of translate_batch: {listed}"
    assert search_note(model, tokenizer) == expected + (RENORMALISED if excludes else "")


@pytest.mark.parametrize(
    ("kind", "most", "rows"),
    [
        ("learned", 30, 30),
        ("sinusoidal", 30, 1024),
        ("sinusoidal", 1025, 1025),
    ],
)
def test_table_of_positions_is_what_the_stack_adds(kind, most, rows):
    stack = tiny_model(position_encoding_type=kind, max_position_embeddings=most).model.encoder
    table = position_table(stack)
    assert table.shape == (rows, 32)
    assert not table.requires_grad
    if kind == "learned":
        torch.testing.assert_close(table, stack.embed_positions.weight.detach())
    else:  # §3.5: sin and cos of pos / 10000^(2i/d)
        angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
        torch.testing.assert_close(table[:, 0::2], angles.sin(), atol=1e-4, rtol=0)
        torch.testing.assert_close(table[:, 1::2], angles.cos(), atol=1e-4, rtol=0)
