"""The version of this package, and those of the libraries that it was tested with."""

import importlib.metadata
import logging
import multiprocessing

from packaging.version import Version

# A source tree on PYTHONPATH has no metadata that would tell it.
__version__ = "0.1.0"

#: Name of a library -> its oldest version, and the newest minor version that the tests have passed with. They are the
#: ranges of pyproject.toml, but for torch, which has no upper bound there: pip would replace the build for a GPU.
TESTED = {
    "accelerate": ("1.15", "1.15"),
    "datasets": ("4.4", "5.2"),
    "huggingface_hub": ("1.5", "2.4"),
    "peft": ("0.21", "0.21"),
    "tokenizers": ("0.23.3", "0.23"),
    "torch": ("2.9", "2.15"),
    "transformers": ("5.17", "5.24"),
}


def warn_of_untested_versions() -> None:
    """Log one line with the installed libraries outside `TESTED`. Worker processes leave it to the main process."""
    if multiprocessing.parent_process() is not None:
        return
    untested = []
    for name, (oldest, newest) in TESTED.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        release = Version(installed).release
        if release < Version(oldest).release or release[:2] > Version(newest).release:
            untested.append(f"{name} {installed} (tested: {oldest} to {newest})")
    if untested:
        logging.getLogger(__name__).warning(
            "hf_vanilla_transformer was not tested with %s", ", ".join(untested)
        )
