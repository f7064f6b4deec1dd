"""Functions of the user's, named in a configuration by where they are."""

import functools
import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError


def import_function(path: str, key: str, kwargs: Mapping[str, Any]) -> Callable:
    """`package.module.function` or `file.py:function`, with its `kwargs`, to be called with one more argument.

    `UserError` naming the configuration `key` when there is none, or when it can't be called like that.
    """
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
    except Exception as error:  # a user's code may raise anything while it is imported
        raise UserError(f"{key}: cannot import '{path}': {_told(error)}") from error
    if not callable(function):
        raise UserError(f"{key}: '{path}' is not a function")
    try:
        inspect.signature(function).bind(None, **kwargs)
    except TypeError as error:
        given = ", ".join(("one argument", *kwargs))
        raise UserError(f"{key}: '{path}' cannot be called with {given}: {error}") from None
    except ValueError:  # one that does not tell what it takes
        pass
    return functools.partial(function, **kwargs)


def _told(error: Exception) -> str:
    """An error of the user's own code in one line, with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"
