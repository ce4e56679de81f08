"""The options with which a toolkit builds another model than this one: each is refused by its name.

The tables were compared with fairseq 0.12.2 (`TransformerConfig`), Marian 1.12 (`modelFeatures_`), OpenNMT-py 3.5
(`model_opts`) and eole 0.6 (`TransformerConfig` and its siblings). The other options there are mapped, have no effect
on a trained model, or change the names and sizes of tensors, of which each is used exactly once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.interop import eole, fairseq, marian_npz, opennmt
from hf_vanilla_transformer.interop.options import Unsupported
from tests.interop.checkpoints import eole as eole_files
from tests.interop.checkpoints import fairseq as fairseq_files
from tests.interop.checkpoints import marian_npz as marian_files
from tests.interop.checkpoints import opennmt as opennmt_files
from tests.model_helpers import error_of

REFUSED: dict[str, dict[str, Unsupported]] = {
    "fairseq": {"": {**fairseq.REFUSED, **fairseq.REFUSED_TASKS}},
    "marian-npz": {"": marian_npz.REFUSED},
    "opennmt": {"": opennmt.REFUSED},
    "eole": eole.REFUSED,
}


def cases() -> Iterator[tuple[str, str, str, Any]]:
    """Each refused option, with a value that the converter does not support."""
    for toolkit, sections in REFUSED.items():
        for section, table in sections.items():
            for name, (supported, _) in table.items():
                values = ("other", 7) if isinstance(supported[0], str) else (True, False, 7, ["x"])
                yield (
                    toolkit,
                    section,
                    name,
                    next(value for value in values if value not in supported),
                )


def is_named(toolkit: str, section: str, name: str, value: Any, tmp_path: Path) -> bool:
    """Whether the refusal of a checkpoint with this option names it."""
    if toolkit == "fairseq":
        fairseq_files.save(tmp_path / "model.pt", fairseq_files.weights(9, 8), **{name: value})
        error = error_of(fairseq.from_fairseq, tmp_path / "model.pt")
    elif toolkit == "marian-npz":
        marian_files.save(tmp_path / "model.npz", marian_files.weights((9, 9)), **{name: value})
        error = error_of(marian_npz.from_marian_npz, tmp_path / "model.npz")
    elif toolkit == "opennmt":
        opennmt_files.save(tmp_path / "model.pt", *opennmt_files.weights((9, 8)), **{name: value})
        error = error_of(opennmt.from_opennmt, tmp_path / "model.pt")
    else:
        path = f"{section}.{name}".lstrip(".")
        eole_files.save(tmp_path, eole_files.weights(), {path: value})
        error = error_of(eole.from_eole, tmp_path)
    return f"{name.replace('_', '-')}=" in error.replace("_", "-")


@pytest.mark.parametrize(("toolkit", "section", "name", "value"), list(cases()))
def test_every_option_of_another_architecture_is_refused_by_name(
    toolkit: str, section: str, name: str, value: Any, tmp_path: Path
) -> None:
    assert is_named(toolkit, section, name, value, tmp_path)


@pytest.mark.parametrize("value", [-0.5, float("nan"), "0.1", True])
@pytest.mark.parametrize(
    ("toolkit", "section", "name"),
    [
        *(("fairseq", "", f"{name}dropout") for name in ("", "attention_", "activation_", "relu_")),
        *(("marian-npz", "", f"transformer-dropout{name}") for name in ("", "-attention", "-ffn")),
        *(("opennmt", "", name) for name in ("dropout", "attention_dropout")),
    ],
)
def test_dropout_that_is_no_probability_is_refused_by_name(
    toolkit: str, section: str, name: str, value: Any, tmp_path: Path
) -> None:
    assert is_named(toolkit, section, name, value, tmp_path)
