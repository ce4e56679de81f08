"""`vanilla-transformer export`: from a model folder to another library's."""

import pytest

from hf_vanilla_transformer.interop.exporting import FORMATS, OPTIONS
from tests.interop.exports import write_model


@pytest.mark.slow
@pytest.mark.parametrize(
    "target_format", sorted(FORMATS.keys() - {"argos"})
)  # a file: tests/interop/test_argos.py
def test_exported_folder_is_complete(command, target_format, tmp_path):
    pytest.importorskip(
        {"onnx": "onnxscript", "ctranslate2": "ctranslate2"}.get(target_format, "torch")
    )
    write_model(tmp_path / "model")
    status, out, err = command(
        "export", "--to", target_format, tmp_path / "model", tmp_path / "out"
    )
    assert (status, err) == (0, "") and out.startswith(f"{tmp_path / 'out'}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    own = {
        "onnx": {"onnx", "generation_config.json"},
        "marian": {"model.safetensors"},
        "ctranslate2": {"model.bin"},
    }
    assert own[target_format] <= names


def test_export_does_not_replace_the_model(command, tmp_path):
    write_model(tmp_path / "runs" / "model")
    for output in (tmp_path / "runs" / "model", tmp_path / "runs"):
        status, _, err = command(
            "export", "--to", "marian", tmp_path / "runs" / "model", output, "--overwrite"
        )
        assert (status, err.count("\n")) == (2, 1) and str(output) in err
    assert (tmp_path / "runs" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("target_format", [*FORMATS, "web"])
def test_option_of_another_format_is_refused(command, target_format, name, tmp_path):
    if target_format in OPTIONS[name]:
        return
    flag = {"dtypes": "dtype", "examples": "example"}.get(name, name)
    values = ["en", "de"] if name == "languages" else ["x"]
    status, _, err = command(
        "export", "--to", target_format, tmp_path / "in", tmp_path / "out", f"--{flag}", *values
    )
    assert (status, err.count("\n")) == (2, 1) and name in err and OPTIONS[name][0] in err
