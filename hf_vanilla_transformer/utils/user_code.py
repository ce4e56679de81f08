"""Import functions and classes that a user names."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import UserError
from .untrusted import one_line


def import_object(name: str) -> Any:
    """Import MODULE:NAME, also from the working directory. Raises any error of that module."""
    module, _, attribute = name.partition(":")
    working = os.getcwd()
    if working not in sys.path:
        sys.path.insert(0, working)
    return getattr(importlib.import_module(module), attribute)


def import_function(name: str, field: str) -> Callable[..., Any]:
    """Import MODULE:FUNCTION. `field` is the argument that names it, for the UserError."""
    try:
        function: Callable[..., Any] = import_object(name)
    except Exception as error:  # the code of the user
        raise UserError(f"{field}: {name}: {one_line(error)}; give MODULE:FUNCTION") from error
    if not callable(function):
        raise UserError(f"{field}: {name} is no function; give MODULE:FUNCTION")
    return function
