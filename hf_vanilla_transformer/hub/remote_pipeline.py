"""What makes `pipeline(model=NAME, trust_remote_code=True)` translate: the pipeline's code beside the model's."""

from pathlib import Path

from .. import pipeline_vanilla_transformer as shipped
from ..damaged_files import read_json_object
from ..pipeline_vanilla_transformer import CUSTOM_PIPELINES
from .model_files import json_bytes

CODE = Path(shipped.__file__)


def pipeline_files(folder: Path) -> dict[str, bytes]:
    """The files that a translator's folder needs besides, or instead of, its own.

    Args:
        folder: a model folder.

    Returns:
        Name -> content of the pipeline's code and of config.json with the entry for it; nothing where the model is
        no translator of this package, or names a pipeline of its own.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    config = read_json_object(path)
    translator = "VanillaTransformerForConditionalGeneration" in (config.get("architectures") or [])
    if not translator or config.get("custom_pipelines", CUSTOM_PIPELINES) != CUSTOM_PIPELINES:
        return {}
    files = {CODE.name: CODE.read_bytes()}
    if "custom_pipelines" not in config:
        files[path.name] = json_bytes(dict(sorted({**config, "custom_pipelines": CUSTOM_PIPELINES}.items())))
    return files
