"""Generation settings in exports: applied as `generate` does, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import FORMATS, export
from hf_vanilla_transformer.interop.search_settings import (
    APPLIED,
    APPLIED_WITH_SEVERAL,
    ARGOS,
    CTRANSLATE2,
    HARMLESS,
    LIBRARIES,
    OF_HYPOTHESES,
    ONNX,
    PAGE,
    TRANSFORMERS,
    check_search,
    ends,
    search_differences,
)
from hf_vanilla_transformer.interop.transformers_folders import make_savable
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.text.side_tokens import side_tokens
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.exports import LINES, best_token, write_model
from tests.model_helpers import EOS, error_of, tiny_model

# Tokens that the model of these tests writes: the settings change its translations.
SETTINGS: list[dict[str, Any]] = [
    {"min_new_tokens": 1},
    {"min_new_tokens": 4},
    {"min_length": 5},
    {"forced_bos_token_id": 17},
    {"forced_bos_token_id": 0},
    {"forced_eos_token_id": 2},
    {"suppress_tokens": [EOS]},
    {"begin_suppress_tokens": [EOS, 5]},
    {"begin_suppress_tokens": [EOS, 5], "forced_bos_token_id": 17},
    {"bad_words_ids": [[EOS], [5], [8, 9]]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "min_new_tokens": 3},
    {"eos_token_id": [EOS, 11], "min_new_tokens": 2},
    {"num_beams": 4, "length_penalty": 0.2, "early_stopping": True, "temperature": 0.5},
]
UNSUPPORTED: list[dict[str, Any]] = [
    {"encoder_no_repeat_ngram_size": 3},
    {"encoder_repetition_penalty": 1.3},
    {"exponential_decay_length_penalty": (5, 1.1)},
    {"sequence_bias": [[[5], 2.0]]},
    {"do_sample": True},
    {"guidance_scale": 1.5},
    {"stop_strings": ["a"]},
    {"max_time": 3.0},
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    model = write_model(folder / "model")
    with torch.no_grad():  # several tokens are probable, so that a setting can change the choice
        model.lm_head.weight[[5, 8, 9, 11, EOS]] += model.lm_head.weight[[5]] * 0.7
    model.save_pretrained(folder / "model")
    return folder


OF_ONNX = [
    settings
    for settings in SETTINGS
    if all(name in HARMLESS or ONNX in APPLIED[name] for name in settings)
    and all(len(words) == 1 for words in settings.get("bad_words_ids", []))
]


@pytest.mark.parametrize("settings", [*OF_ONNX, {"bad_words_ids": [[EOS], [5], [8]]}], ids=str)
@torch.no_grad()
def test_best_token_applies_settings_like_generate(
    settings: dict[str, Any], exported: Path
) -> None:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(exported / "model").eval()
    source, _ = load_tokenizers(exported / "model")
    applied = {"eos_token_id": EOS} | settings
    for line in LINES:
        batch = source(line, return_tensors="pt")
        tokens: list[int] = []
        while len(tokens) < 8 and not set(ends(applied)) & set(tokens):
            target = torch.tensor([[model.config.decoder_start_token_id, *tokens]])
            logits = model(**batch, decoder_input_ids=target).logits[0, -1].numpy()
            tokens.append(best_token(logits, tokens, 8, applied))
        expected = model.generate(**batch, **{"max_new_tokens": 8} | settings | {"num_beams": 1})[
            0, 1:
        ].tolist()
        assert tokens == expected, line


APPLIED_BY_CTRANSLATE2 = [
    settings
    for settings in SETTINGS
    if all(name in HARMLESS or CTRANSLATE2 in APPLIED[name] for name in settings)
]


def export_with_settings(settings, exported, tmp_path):
    """Export the model with these search settings. Return its line, model, tokenizer and target tokens."""
    folder = shutil.copytree(exported / "model", tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    line = export("ctranslate2", folder, tmp_path / "ct2")
    source, _ = load_tokenizers(folder)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()
    return line, model, source, side_tokens(source, 320, "target")


@pytest.mark.parametrize("settings", [{}, *APPLIED_BY_CTRANSLATE2], ids=str)
def test_ctranslate2_applies_settings_by_the_arguments_that_the_export_names(
    settings, exported, tmp_path
):
    engine = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    settings = settings | {"max_new_tokens": 8, "num_beams": 1}
    line, model, source, tokens = export_with_settings(settings, exported, tmp_path)
    arguments = eval(
        f"dict({line.partition('translate_batch: ')[2].partition(';')[0]})"
    )  # as a user copies them
    translator = engine.Translator(str(tmp_path / "ct2"), "cpu")
    for text in LINES:
        batch = source(text, return_tensors="pt")
        pieces = [tokens[i] for i in batch["input_ids"][0]]
        (result,) = translator.translate_batch([pieces], **arguments)
        expected = model.generate(**batch)[0, 1:].tolist()
        ends = settings.get("eos_token_id", EOS)
        assert result.hypotheses[0] == [
            tokens[i] for i in expected if i not in (ends, *np.ravel(ends))
        ], text


@pytest.mark.parametrize("renormalised", [True, False])
def test_ctranslate2_beams_have_renormalised_scores(renormalised, exported, tmp_path):
    engine = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    settings = {
        "num_beams": 4,
        "early_stopping": True,
        "length_penalty": 1.0,
        "max_new_tokens": 8,
    }
    settings |= {"suppress_tokens": [5, 11], "renormalize_logits": renormalised}
    line, model, source, tokens = export_with_settings(settings, exported, tmp_path)
    assert ("renormalize_logits" in line) is not renormalised
    translator = engine.Translator(str(tmp_path / "ct2"), "cpu")
    for text in LINES:
        batch = source(text, return_tensors="pt")
        pieces = [[tokens[i] for i in batch["input_ids"][0]]]
        (result,) = translator.translate_batch(
            pieces, beam_size=4, max_decoding_length=8, return_scores=True
        )
        output = model.generate(**batch, return_dict_in_generate=True, output_scores=True)
        difference = abs(result.scores[0] - output.sequences_scores[0].item())
        assert (difference < 2e-3) is renormalised, (
            text
        )  # CTranslate2 approximates the exponential function


@pytest.mark.parametrize(
    ("search", "is_applied"),
    [
        ({"num_beams": 1}, True),
        ({"num_beams": 4}, False),  # of log-probabilities in `generate`, of logits in CTranslate2
        ({"num_beams": 1, "decoder_start_token_id": EOS}, False),  # `generate` penalises it too
    ],
)
def test_ctranslate2_has_the_repetition_penalty_of_one_beam(
    search: dict[str, Any], is_applied: bool
) -> None:
    model = tiny_model(vocab_size=320)
    model.generation_config.update(repetition_penalty=1.2, **search)
    if is_applied:
        check_search(model, CTRANSLATE2)
    else:
        assert "repetition_penalty=1.2" in error_of(check_search, model, CTRANSLATE2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS + UNSUPPORTED, ids=str)
@pytest.mark.parametrize("library", [ARGOS, CTRANSLATE2, ONNX])
def test_settings_that_an_export_does_not_apply_are_refused(library: str, settings: dict) -> None:
    model = tiny_model(vocab_size=320)
    model.generation_config.update(**{"num_beams": 1} | settings)
    names = {name for name in settings if name not in HARMLESS}
    several = {"eos_token_id"} if isinstance(settings.get("eos_token_id"), list) else set()
    several |= (
        {"bad_words_ids"}
        if any(len(ids) > 1 for ids in settings.get("bad_words_ids", []))
        else set()
    )
    is_applied = all(library in APPLIED.get(name, ()) for name in names - several) and all(
        library in APPLIED_WITH_SEVERAL[name] for name in several
    )
    names |= several
    if settings in UNSUPPORTED or not is_applied:
        with pytest.raises(UserError, match="|".join(names)):
            check_search(model, library)
    else:
        check_search(model, library)


def test_every_setting_of_transformers_is_harmless_applied_or_refused() -> None:
    """An export that applies none accepts a value that is not the default of the harmless ones only."""
    for name in GenerationConfig().to_dict().keys() - HARMLESS:
        model = tiny_model(vocab_size=320)
        setattr(model.generation_config, name, [5] if name.endswith("_tokens") else 5)
        with pytest.raises(UserError, match=name):
            check_search(model, "nothing")


# Of each setting that chooses between hypotheses, a value that is no default.
OF_A_SEARCH: dict[str, Any] = {
    "num_beams": 3,
    "num_return_sequences": 2,
    "length_penalty": 0.3,
    "paper_length_penalty": 0.7,
    "counted_prefix": 1,
    "beam_search_rule": "opennmt3",
    "early_stopping": True,
    "max_length": 17,
    "max_new_tokens": 9,
    "max_length_over_source": 7,
}


@pytest.mark.parametrize("library", [ARGOS, CTRANSLATE2, ONNX, PAGE, TRANSFORMERS])
def test_note_names_each_setting_of_a_search_that_a_library_does_not_apply(
    library: str,
) -> None:
    assert OF_A_SEARCH.keys() == OF_HYPOTHESES.keys()
    for name, value in OF_A_SEARCH.items():
        model = tiny_model(vocab_size=320)
        model.generation_config = GenerationConfig(**{"num_beams": 3, name: value})
        note = search_differences(model, library)
        assert (f"{name}={value}" in note) is (library not in OF_HYPOTHESES[name])


def test_line_of_an_export_names_what_the_library_does_not_apply(
    exported: Path, tmp_path: Path
) -> None:
    """Also the fields that only this package has are not written for another library."""
    assert LIBRARIES.keys() == FORMATS.keys()
    folder = shutil.copytree(exported / "model", tmp_path / "model")
    path = folder / "generation_config.json"
    search = {
        "num_beams": 3,
        "beam_search_rule": "opennmt3",
        "counted_prefix": 1,
        "length_penalty": 0.5,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | search))
    line = export("marian", folder, tmp_path / "marian")
    assert "MarianMTModel does not apply" in line
    assert "beam_search_rule=opennmt3" in line
    assert "counted_prefix=1" in line
    written = json.loads((tmp_path / "marian" / "generation_config.json").read_text())
    own = {name for name, libraries in OF_HYPOTHESES.items() if TRANSFORMERS not in libraries}
    assert not own & written.keys()
    assert (
        written["num_beams"],
        written["length_penalty"],
    ) == (3, 0.5)


def test_search_that_transformers_does_not_save_is_one_line(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported / "model", tmp_path / "model")
    export("marian", folder, tmp_path / "marian")
    for model in (folder, tmp_path / "marian"):
        path = model / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.7}))
    assert "`temperature`" in error_of(export, "marian", folder, tmp_path / "again")
    assert "`temperature`" in error_of(convert, "marian", tmp_path / "marian", tmp_path / "back")


def test_penalty_of_one_beam_is_no_obstacle(exported: Path, tmp_path: Path) -> None:
    """Eole and fairseq may name one, and transformers does not save it."""
    export("marian", exported / "model", tmp_path / "marian")
    file = tmp_path / "marian" / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "num_beams": 1,
        "length_penalty": 0.0,
        "early_stopping": True,
    }
    file.write_text(json.dumps(settings))
    convert("marian", tmp_path / "marian", tmp_path / "back")
    search = GenerationConfig.from_pretrained(tmp_path / "back")
    assert (search.num_beams, search.length_penalty, bool(search.early_stopping)) == (
        1,
        1.0,
        False,
    )


def test_penalty_of_the_paper_stays_alone_with_one_beam() -> None:
    search = GenerationConfig(num_beams=1, paper_length_penalty=0.6)
    make_savable(search)
    assert (search.length_penalty, search.paper_length_penalty) == (None, 0.6)
