"""Import functions and classes that a user names."""

import importlib
import os
import sys
from typing import Any


def import_object(name: str) -> Any:
    """Import MODULE:NAME, also from the working directory. Raises any error of that module."""
    module, _, attribute = name.partition(":")
    working = os.getcwd()
    if working not in sys.path:
        sys.path.insert(0, working)
    return getattr(importlib.import_module(module), attribute)
