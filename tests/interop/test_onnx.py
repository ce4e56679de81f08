"""ONNX graphs in onnxruntime give our logits and tokens. (An export takes about ten seconds.)"""

from pathlib import Path

import numpy as np
import pytest

from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.translate_exported import Translator
from tests.interop.exports import CASES, assert_exported, require_onnx, write_model

require_onnx()
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_onnx_graphs_give_our_logits_and_tokens(case: str, tmp_path: Path) -> None:
    from onnx import checker

    model = assert_exported(tmp_path, "onnx", case)
    for name in ("encoder", "decoder"):
        checker.check_model(str(tmp_path / "out" / f"{name}.onnx"))
    assert_matrices_are_stored_once(tmp_path / "out", model)


def assert_matrices_are_stored_once(folder: Path, model) -> None:
    """The file of weights is as large as the matrices of the model, plus the alignment to pages."""
    matrices = [p.numel() * 4 for p in model.parameters() if p.ndim == 2]
    size = (folder / "weights.bin").stat().st_size
    assert 0.9 * sum(matrices) <= size <= sum(matrices) + 4096 * (len(matrices) + 2)


def test_onnx_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    write_model(tmp_path / "model", decoder_layers=1)
    export("onnx", tmp_path / "model", tmp_path / "out")
    graphs = Translator(tmp_path / "out").backend
    assert [given.name for given in graphs.encoder.get_inputs()] == ["input_ids", "attention_mask"]
    pairs = [f"0.{stack}.{part}" for stack in ("encoder", "decoder") for part in ("key", "value")]
    inputs = {given.name: given for given in graphs.decoder.get_inputs()}
    assert list(inputs) == ["input_ids", "encoder_attention_mask", *(f"past_key_values.{pair}" for pair in pairs)]
    assert [given.name for given in graphs.decoder.get_outputs()] == ["logits", *(f"present.{p}" for p in pairs[2:])]
    batch, heads, past, width = inputs["past_key_values.0.decoder.key"].shape
    assert (heads, width) == (4, 8) and isinstance(batch, str) and isinstance(past, str)  # names: dynamic
    states = graphs.encoder.run(
        ["last_hidden_state"], dict.fromkeys(("input_ids", "attention_mask"), np.ones((1, 2), np.int64))
    )
    assert states[0].shape == (1, 2, 32)
