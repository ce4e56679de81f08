"""The models that this package contains."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "models"


def shipped_models() -> list[str]:
    """The names of the models, such as `g2p_en`."""
    return sorted(file.parent.name for file in _FOLDER.glob("*/config.json"))


def model_folder(name: str) -> str:
    """The folder of a model of this package. A path that exists, and any other name, is returned unchanged.

    AutoModelForSeq2SeqLM.from_pretrained(model_folder("g2p_en"))
    """
    if os.path.exists(name) or name not in shipped_models():
        return name
    return str(_FOLDER / name)
