"""`vanilla-transformer export`: from a model folder to another library's."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from hf_vanilla_transformer.interop.exporting import FORMATS
from hf_vanilla_transformer.interop.translate_exported import Translator
from tests.interop.exports import LINES, write_model
from tests.model_helpers import assert_near


@pytest.fixture
def run(command):
    """Run the subcommand. Return exit status, standard output and standard error."""
    return partial(command, "export")


@pytest.mark.slow
@pytest.mark.parametrize(
    "target_format", sorted(FORMATS.keys() - {"argos", "marian-npz"})
)  # a file: tests/interop/test_argos.py
def test_exported_folder_is_complete(run, target_format, tmp_path):
    pytest.importorskip({"onnx": "onnxscript", "ctranslate2": "ctranslate2"}.get(target_format, "torch"))
    write_model(tmp_path / "model")
    status, out, err = run("--to", target_format, tmp_path / "model", tmp_path / "out")
    assert (status, err) == (0, "") and out.startswith(f"{tmp_path / 'out'}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    own = {"onnx": {"encoder.onnx", "decoder.onnx", "weights.bin"}, "torch": {"encoder.pt2", "decoder.pt2"}}
    own |= {"marian": {"model.safetensors"}, "ctranslate2": {"model.bin"}}
    assert own[target_format] <= names


@pytest.mark.parametrize("beams", [1, 3])
def test_exported_marian_generates_our_tokens(run, tmp_path, beams):
    model = write_model(tmp_path / "model")
    model.generation_config.num_beams = beams
    model.generation_config.save_pretrained(tmp_path / "model")
    status, _, err = run("--to", "marian", tmp_path / "model", tmp_path / "out")
    assert (status, err) == (0, "")
    marian, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert isinstance(marian, MarianMTModel)
    assert marian.generation_config.num_beams == beams
    assert marian.generation_config.length_penalty == (0.6 if beams > 1 else None)
    batch = tokenizer(LINES, return_tensors="pt", padding=True)
    with torch.no_grad():
        target = batch["input_ids"]
        logits = (each.eval()(**batch, decoder_input_ids=target).logits for each in (marian, model))
    assert_near(*logits, 1e-5)
    limit = {"max_new_tokens": 12} | ({"length_penalty": 0.6} if beams > 1 else {})
    assert marian.generate(**batch, **limit).equal(model.generate(**batch, **limit))


def test_export_overwrites_only_when_asked(run, tmp_path):
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    command = ("--to", "ctranslate2", tmp_path / "model", tmp_path / "out")
    status, out, err = run(*command)
    assert (status, out, err.count("\n")) == (2, "", 1) and "--overwrite" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert run(*command, "--overwrite")[0] == 0
    assert not (tmp_path / "out" / "thesis.tex").exists() and (tmp_path / "out" / "model.bin").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "onnx", "--quantization", "int8"), "quantization=int8: only ctranslate2"),
        (("--to", "ctranslate2", "--quantization", "int7"), "quantization=int7: CTranslate2 has int8"),
    ],
)
def test_export_reports_wrong_options_in_one_line(run, tmp_path, arguments, message):
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    write_model(tmp_path / "model")
    status, _, err = run(*arguments, tmp_path / "model", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1) and message in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("target_format", FORMATS)
def test_export_reports_missing_or_damaged_model_in_one_line(run, tmp_path, target_format):
    status, _, err = run("--to", target_format, tmp_path / "no", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1) and str(tmp_path / "no") in err
    write_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    status, _, err = run("--to", target_format, tmp_path / "model", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1) and str(tmp_path / "model") in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_does_not_replace_the_model(run, tmp_path):
    write_model(tmp_path / "runs" / "model")
    for output in (tmp_path / "runs" / "model", tmp_path / "runs"):
        status, _, err = run("--to", "torch", tmp_path / "runs" / "model", output, "--overwrite")
        assert (status, err.count("\n")) == (2, 1) and str(output) in err
    assert (tmp_path / "runs" / "model" / "model.safetensors").is_file()


def test_export_refuses_quantised_weights_before_reading_them(run, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    for target_format in FORMATS:
        status, _, err = run("--to", target_format, tmp_path / "model", tmp_path / "out")
        assert (status, err.count("\n")) == (2, 1) and "quantization_config" in err


def test_export_help_names_every_format(run):
    status, out, _ = run("--help")
    assert status == 0 and all(f"\n  {name} " in out for name in FORMATS)


@pytest.mark.parametrize(
    "settings", [{"encoder_no_repeat_ngram_size": 3}, {"bad_words_ids": [[4, 9]]}, {"do_sample": True}], ids=str
)
def test_exported_translator_names_unsupported_settings(settings, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=next(iter(settings))):
        Translator(tmp_path)
