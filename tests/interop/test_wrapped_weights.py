"""Weights under the prefix or the key of a trainer are those of the toolkit's checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_vanilla_transformer.interop.converted import Converted
from hf_vanilla_transformer.interop.eole import from_eole
from hf_vanilla_transformer.interop.fairseq import from_fairseq
from hf_vanilla_transformer.interop.fairseq_folders import from_fsmt, from_m2m100
from hf_vanilla_transformer.interop.joeynmt import from_joeynmt
from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.interop.opennmt import from_opennmt
from tests.interop.checkpoints import eole, fairseq, joeynmt, opennmt
from tests.interop.foreign import write_fsmt_folder, write_m2m100_folder, write_opus_folder
from tests.model_helpers import error_of

Weights = dict[str, Tensor]
Wrap = Callable[[Weights], dict]


def read_fairseq(folder: Path, wrap: Wrap) -> Converted:
    fairseq.save(folder / "model.pt", wrap(fairseq.weights(23, 29)))
    return from_fairseq(folder / "model.pt")


def read_joeynmt(folder: Path, wrap: Wrap) -> Converted:
    joeynmt.save(
        folder,
        wrap(joeynmt.weights((23, 29))),
        (joeynmt.named(19, "a"), joeynmt.named(25, "b")),
    )
    return from_joeynmt(folder)


def read_opennmt(folder: Path, wrap: Wrap) -> Converted:
    model, head = opennmt.weights((6, 7))
    opennmt.save(folder / "model.pt", wrap(model), head)
    return from_opennmt(folder / "model.pt")


def read_eole(folder: Path, wrap: Wrap) -> Converted:
    eole.save(folder, wrap(eole.weights()))
    return from_eole(folder)


def with_prefix(prefix: str, **others: Tensor) -> Wrap:
    return lambda weights: {f"{prefix}{name}": tensor for name, tensor in weights.items()} | others


@pytest.mark.parametrize("prefix", ["module.", "model.", "net._orig_mod.model."])
@pytest.mark.parametrize("read", [read_fairseq, read_joeynmt, read_opennmt, read_eole])
def test_toolkits_weights_are_found_under_a_prefix(
    read: Callable, prefix: str, tmp_path: Path
) -> None:
    plain = read(tmp_path / "a", dict)
    wrapped = read(tmp_path / "b", with_prefix(prefix))
    assert all(
        a.equal(b)
        for a, b in zip(plain.model.parameters(), wrapped.model.parameters(), strict=True)
    )


WRAPPED: dict[str, Wrap] = {
    "prefix": with_prefix("module.net."),
    "Lightning": lambda weights: {
        "state_dict": with_prefix("model.", **{"criterion.weight": torch.ones(3)})(weights),
        "epoch": np.float64(3),
    },
    "average": lambda weights: {
        **with_prefix("model.")(weights),
        **with_prefix("ema.module.")({name: tensor + 1 for name, tensor in weights.items()}),
    },
    "trainer": lambda weights: {"optimizer": {"state": {}}, "model": weights},
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_opus_folder, from_marian),
        (write_fsmt_folder, from_fsmt),
        (write_m2m100_folder, from_m2m100),
    ],
)
def test_weights_of_transformers_classes_are_found(
    write: Callable, read: Callable, wrap: str, tmp_path: Path
) -> None:
    write(tmp_path / "in")
    plain = read(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    torch.save(WRAPPED[wrap](load_file(file)), file.with_name("pytorch_model.bin"))
    file.unlink()
    wrapped = read(tmp_path / "in")
    assert all(
        a.equal(b)
        for a, b in zip(plain.model.parameters(), wrapped.model.parameters(), strict=True)
    )


def test_opennmt_options_in_a_dictionary_are_read(tmp_path: Path) -> None:
    """Without them the number of heads would be the default."""
    opennmt.save(tmp_path / "model.pt", *opennmt.weights((6, 7)))
    state = torch.load(tmp_path / "model.pt", weights_only=False)
    plain = from_opennmt(tmp_path / "model.pt").model.config
    torch.save(state | {"opt": vars(state["opt"])}, tmp_path / "model.pt")
    assert from_opennmt(tmp_path / "model.pt").model.config.to_dict() == plain.to_dict()
    torch.save(state | {"opt": 7}, tmp_path / "model.pt")
    assert "opt" in error_of(from_opennmt, tmp_path / "model.pt")
