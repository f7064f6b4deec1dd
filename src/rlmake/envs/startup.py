"""Half of what `import verifiers.v1` costs is two packages that an env server rarely uses: keep them for later.

Measured on two busy cores: 12.8 s for `import verifiers.v1` as it comes, 5.8 s with this; 5,456 modules against
1,892. verifiers takes two classes from `anthropic` (whose package loads some 3,000 modules) and two functions from
`math_verify` (which loads SymPy). Both get an empty package of the same name and path; whatever is asked of it that is
no submodule loads the real one, in place.

A tokenizer costs as much again, for transformers' `AutoTokenizer` imports torch: see `tokens`.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def _shell(name: str, **homes: str) -> ModuleType | None:
    """An unexecuted package in the place of `name`; None when it is loaded already or not installed.

    `homes`: attribute → submodule that defines it, for attributes that need not load the package.
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return None
    module = importlib.util.module_from_spec(spec)

    def load(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__all__":
            raise AttributeError(attribute)
        if attribute in homes:
            return getattr(importlib.import_module(f"{name}.{homes[attribute]}"), attribute)
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        if vars(module).pop("__getattr__", None) is None:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        spec.loader.exec_module(module)
        return getattr(module, attribute)

    module.__getattr__ = load
    sys.modules[name] = module
    return module


def light_imports() -> None:
    """Put the two packages off. Without effect on one that is loaded or not installed."""
    if _shell("anthropic"):
        _shell("anthropic.types", Message="message", Usage="usage")
    if math := _shell("math_verify"):

        def later(name: str):
            def call(*args: Any, **kwargs: Any) -> Any:
                if vars(math).get(name) is call:  # still ours: let the real ones take their places
                    del math.parse, math.verify
                return getattr(math, name)(*args, **kwargs)

            return call

        math.parse, math.verify = later("parse"), later("verify")


def light_tokenizers() -> None:
    """Have `renderers` (and so verifiers) read plain local tokenizers without transformers; see `tokens`."""
    from renderers import base

    from rlmake.envs.tokens import load

    base.load_tokenizer = functools.partial(load, general=base.load_tokenizer)
