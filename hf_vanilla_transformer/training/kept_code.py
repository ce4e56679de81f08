"""The code as it was when a run started.

A checkpoint has a copy of the code that trained it. `save_pretrained` reads the files when it saves. If the package is
installed again while a run goes on, the files are gone for a moment, and then they are of a different version. For the
same reason a run imports what it needs at its evaluations before it starts.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from ..utils.atomic_write import report_full_disk

_PACKAGE = __package__.partition(".")[0]
_BUNDLE = "_vanilla_transformer"
_LIBRARIES = ("builtins", "torch", "transformers")
# Modules that a run would otherwise import at its first evaluation, or at its end.
_IMPORTED_LATE = (
    f"{_PACKAGE}.engine.optimize",
    f"{_PACKAGE}.pipeline_vanilla_transformer",
)


class KeptCode:
    """Copies of the code files of a model's classes, and of the files that these import from their folder.

    The modules of this package that a run needs later are imported.
    """

    def __init__(self, model: PreTrainedModel):
        for name in _IMPORTED_LATE:
            importlib.import_module(name)
        self._folder = TemporaryDirectory(prefix="vanilla_transformer_code_")
        self._copies: dict[str, str] = {}  # name of a module -> its copy
        for number, (name, module) in enumerate(_modules_of(model).items()):
            source = Path(str(module.__file__))
            target = Path(self._folder.name) / str(number)
            with report_full_disk(self._folder.name):
                target.mkdir()
                for file in [source, *map(Path, get_relative_import_files(source))]:
                    shutil.copyfile(file, target / file.name)
            self._copies[name] = str(target / source.name)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let `save_pretrained` find the copies in the place of the files."""
        originals = {
            name: sys.modules[name].__file__ for name in self._copies if name in sys.modules
        }
        try:
            for name in originals:
                sys.modules[name].__file__ = self._copies[name]
            yield
        finally:
            for name, file in originals.items():
                sys.modules[name].__file__ = file


def _modules_of(model: PreTrainedModel) -> dict[str, ModuleType]:
    """The modules of this package's bundle, and those of a subclass and its configuration."""
    names = {
        name for name in sys.modules if name.startswith(f"{_PACKAGE}.") and name.endswith(_BUNDLE)
    }
    config = getattr(model, "config", None)  # a module of somebody else has none
    for kind in (*type(model).__mro__, *type(config).__mro__):
        if kind.__module__.partition(".")[0] not in (*_LIBRARIES, _PACKAGE):
            names.add(kind.__module__)
    modules = {name: sys.modules[name] for name in sorted(names) if name in sys.modules}
    return {
        name: module
        for name, module in modules.items()
        if _is_file(getattr(module, "__file__", None))
    }


def _is_file(path: str | None) -> bool:
    return path is not None and path.endswith(".py") and Path(path).is_file()
