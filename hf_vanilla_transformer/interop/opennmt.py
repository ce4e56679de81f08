"""OpenNMT-py: all of its Transformers are pre-norm, so none can be converted.

Its option `layer_norm` chooses a formula, "standard" or "rms"; no option chooses post-norm (versions 0.1 to 3.5).
"""

from collections.abc import Mapping
from pathlib import Path

from ..errors import UserError
from .converting import Converted
from .state_dicts import PRE_NORM, read_torch_file


def from_opennmt(checkpoint: str | Path) -> Converted:
    """Refuse a checkpoint of OpenNMT-py with the reason, always as a UserError."""
    found = read_torch_file(checkpoint)
    if not isinstance(found, Mapping) or not {"model", "generator", "opt"} <= found.keys():
        raise UserError(f"{checkpoint}: no checkpoint of OpenNMT-py: 'model', 'generator' and 'opt' are needed")
    kind = getattr(found["opt"], "encoder_type", None)
    if kind != "transformer":
        raise UserError(f"{checkpoint}: encoder_type={kind}: only a Transformer could be converted")
    raise UserError(f"{checkpoint}: encoder_type=transformer: OpenNMT-py's Transformer always {PRE_NORM}")
