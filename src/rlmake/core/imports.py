"""Functions of the user's, named in a configuration by where they are."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from rlmake.core.errors import UserError


def import_function(path: str, key: str) -> Callable:
    """`package.module.function` or `file.py:function`; `UserError` naming the configuration `key` otherwise."""
    where, colon, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    try:
        if colon == ":" and where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{key}: cannot import '{path}': {error}") from None
    if not callable(function):
        raise UserError(f"{key}: '{path}' is not a function")
    return function
