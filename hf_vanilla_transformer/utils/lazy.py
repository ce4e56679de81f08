"""Names of a package that are imported on first use (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package whose names are imported on first use.

    A face that imports everything it names makes each import of a small module pay for the largest one.

    Args:
        package: `__name__` of the package.
        modules: name -> the module that defines it, as a relative import writes it (".translator").
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module: ModuleType = importlib.import_module(modules[name], package)
        return getattr(module, name)

    return get
