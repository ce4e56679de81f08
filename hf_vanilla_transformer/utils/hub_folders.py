"""Folders of models on the Hub, in the cache of `huggingface_hub`."""

from pathlib import Path

from .atomic_write import report_full_disk
from .errors import UserError
from .untrusted import one_line

_MODEL_FILES = ("*.json", "*.txt", "*.spm", "*.model", "*.safetensors")
_OTHER_WEIGHTS = ("pytorch_model*.bin",)


def from_hub(name: str, argument: str = "") -> Path:
    """The folder of a model on the Hub, in the cache of `huggingface_hub`. `argument` is put before messages."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with report_full_disk(constants.HF_HUB_CACHE):
            folder = Path(snapshot_download(name, allow_patterns=list(_MODEL_FILES)))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(name, allow_patterns=list(_OTHER_WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            f"there is no such folder, and the Hub has none that can be fetched ({one_line(error)})"
        )
        raise UserError(f"{argument}{name}: {reason}") from None
    return folder
