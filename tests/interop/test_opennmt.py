"""OpenNMT-py's checkpoints are refused, with the reason."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.opennmt import from_opennmt
from tests.interop.foreign import Record


@pytest.mark.parametrize(
    ("encoder", "message"), [("transformer", "pre-norm.*§3.1"), ("brnn", "encoder_type=brnn: only a Transformer")]
)
def test_opennmt_checkpoint_is_refused(encoder: str, message: str, tmp_path: Path, record_property: Record) -> None:
    opt = Namespace(encoder_type=encoder, decoder_type="transformer", layer_norm="standard", heads=8)
    weights = {"encoder.transformer.0.layer_norm.weight": torch.ones(4)}
    vocab = {"src": ["<unk>"], "tgt": ["<unk>"]}
    torch.save({"model": weights, "generator": {}, "opt": opt, "vocab": vocab}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=message) as raised:
        from_opennmt(tmp_path / "model.pt")
    record_property("refused", str(raised.value).removeprefix(f"{tmp_path / 'model.pt'}: "))


def test_opennmt_refuses_other_files(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="no checkpoint of OpenNMT-py"):
        from_opennmt(tmp_path / "model.pt")
