"""A hook of hatchling: build the C functions of the engine into the wheel, or next to their source if it is editable.

Without a compiler the wheel is the same for all machines, and the engine computes with torch's operators.
"""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENGINE = "hf_vanilla_transformer/engine"


class KernelsHook(BuildHookInterface):
    """Adds `c_kernels-*.so` for the platform that builds."""

    _folder: tempfile.TemporaryDirectory | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        engine = Path(self.root) / ENGINE
        compiler = _load(engine / "c_compiler.py")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        try:
            library = compiler.build(Path(self._folder.name), compiler.instruction_sets())
        except compiler.BuildError as error:
            self.app.display_warning(
                f"decoding on a CPU takes up to twice the time, because the C functions are not built: {error}"
            )
            return
        name = compiler.library_name()
        if version == "editable":
            _put(library, engine / name)
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(library)] = f"{ENGINE}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _load(file: Path) -> ModuleType:
    """Import a file without its package, which needs torch."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _put(library: Path, target: Path) -> None:
    """Replace the library at once, because processes may have it open, and remove those of older sources."""
    platform = target.name.rpartition("-")[0]
    for old in target.parent.glob(f"{platform}-*.so"):
        if old != target:
            old.unlink()
    temporary = target.with_suffix(".so.new")
    shutil.copyfile(library, temporary)
    os.replace(temporary, target)
