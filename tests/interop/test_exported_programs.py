"""Programs of `torch.export` give our logits and tokens, without our package."""

import copy
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.interop import translate_exported
from hf_vanilla_transformer.interop.exported_programs import export_programs
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.translate_exported import Translator
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.exports import CASES, LINES, assert_exported, require_onnx, write_model
from tests.interop.foreign import Record
from tests.model_helpers import WITHOUT_THE_PACKAGE, slow, tiny_model

SLOW = slow(*list(CASES)[1:])


@pytest.mark.parametrize("case", [next(iter(CASES)), *SLOW])
def test_exported_programs_give_our_logits_and_tokens(case: str, tmp_path: Path) -> None:
    assert_exported(tmp_path, "torch", case)


@pytest.mark.slow
@pytest.mark.parametrize("target_format", ["torch", "onnx"])
def test_exported_folder_translates_without_the_package(target_format: str, tmp_path: Path) -> None:
    """Its script runs where the package cannot be imported, and its files hold no paths of this machine."""
    if target_format == "onnx":
        require_onnx()
    model = write_model(tmp_path / "model")
    export(target_format, tmp_path / "model", tmp_path / "out")
    script = f"{WITHOUT_THE_PACKAGE}\nimport runpy\nsys.argv = ['translate.py', '--batch_size', '2']\n"
    script += f"runpy.run_path({str(tmp_path / 'out' / 'translate.py')!r}, run_name='__main__')"
    text = "".join(f"{line}\n" for line in LINES)
    run = subprocess.run([sys.executable, "-c", script], input=text, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    translator = Translator(tmp_path / "out")
    rows = [model.generate(**translator.tokenizer([line], return_tensors="pt"), num_beams=1)[0] for line in LINES]
    assert run.stdout.splitlines() == [translator.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    variants = ["two dogs", "two\u00a0dogs", "\ufefftwo dogs"]
    assert len({tuple(translator.tokenizer(text)["input_ids"]) for text in variants}) == 1
    for path in (tmp_path / "out").rglob("*.*"):
        for local in (Path(__file__).parents[2], tmp_path):
            assert str(local).encode() not in path.read_bytes(), path.name


def test_exported_script_has_lines_of_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any locale, and whatever characters a source or a translation has, each line has its translation."""
    model = SimpleNamespace(translate=lambda lines: [line.upper().replace(" ", "\n") for line in lines])
    monkeypatch.setattr(translate_exported, "Translator", lambda *_: model)
    monkeypatch.setattr(translate_exported, "logging", SimpleNamespace(set_verbosity_error=lambda: None))
    output = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["translate.py", "--batch_size", "1"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ä\rb\nc ß\u2028\n".encode()), "latin-1"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "latin-1"))
    translate_exported.main()
    assert output.getvalue().decode() == "Ä\rB\nC SS\u2028\n"


def test_export_refuses_adapters_and_quantised_weights(record_property: Record) -> None:
    model = tiny_model()
    model.model.encoder.layers[0].self_attn.q_proj = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UserError, match="q_proj.*merge"):
        export_programs(model)
    record_property("not exported", "layers of another class, such as adapters")
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(UserError, match="quantization_config"):
        export_programs(model)
    record_property("not exported", "quantised weights")


class DataDependentActivation(nn.Module):
    """Control flow that depends on values cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.max() > 1 else x.relu()


def test_untraceable_model_is_refused_and_unchanged() -> None:
    model = tiny_model().train()
    model.model.encoder.layers[0].activation = DataDependentActivation()
    with pytest.raises(UserError, match="encoder: [^\\n]*$"):
        export_programs(model)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert torch.isfinite(model(torch.tensor([[5, 6, 2]]), labels=torch.tensor([[7, 8, 2]])).logits).all()


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
def test_exporters_of_transformers_record_the_usual_loop(beams: int) -> None:
    """A decode step of several tokens then gives the logits of the model, whatever the length of the cache."""
    exporters = pytest.importorskip("transformers.exporters")
    model = tiny_model().eval()
    model.generation_config.num_beams = beams
    inputs = {"input_ids": torch.arange(3, 17).view(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    dynamo = exporters.DynamoExporter()
    settings = {"multi_token_decode": True}
    exported = dynamo.export_for_generation(model, inputs, exporters.DynamoConfig(dynamic=True), **settings)
    _, decode = exporters.utils.decompose_for_generation(model, inputs, **settings)["decode"]
    arguments = {name: value for name, value in decode.items() if name not in ("use_cache", "return_dict")}
    for _ in range(3):
        with torch.no_grad():
            expected = model(
                **copy.deepcopy(decode) | {"past_key_values": copy.deepcopy(arguments["past_key_values"])}
            )
        actual = exported.runners["decode"](**copy.deepcopy(arguments))
        assert torch.equal(actual.logits, expected.logits) and len(expected.logits) == 2 * beams
        arguments["past_key_values"] = expected.past_key_values
