"""Renderers turn messages into tokens. `renderers` itself is only looked at when its own options are given."""

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, model_validator

from rlmake.config.fields import Config, semantic
from rlmake.config.refused import Refused
from rlmake.core.errors import nearest

NAMES = (
    "auto", "default", "custom", "qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "gemma4",
    "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "minimax-m2", "deepseek-v3", "deepseek-r1", "deepseek-v4", "hy3",
    "inkling", "kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1", "llama-3",
    "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "gpt-oss",
)  # fmt: skip


class RendererConfig(Config):
    """Renderer by name, with that renderer's own options beside it (checked by `renderers` when it is built)."""

    model_config = ConfigDict(extra="allow")

    name: str = semantic("auto", "Renderer; auto only knows models by their hub id.")
    import_path: str | None = semantic(None, "Class of a custom renderer: `package.module.Class` or `file.py:Class`.")

    @model_validator(mode="after")
    def _known(self):
        if self.name not in NAMES:
            raise Refused(("name", f"expected a renderer's name, not '{self.name}'{nearest(self.name, NAMES)}"))
        if (self.name == "custom") != (self.import_path is not None):
            raise Refused(("import_path", "is needed with name 'custom', and only there"))
        if self.name == "auto" and self.options:
            keys = ", ".join(sorted(self.options))
            raise Refused(("name", f"'auto' takes no options; name the renderer that understands {keys}"))
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The renderer's own options."""
        return dict(self.model_extra or {})


@functools.cache
def hub_renderers() -> dict[str, str]:
    """`{hub id: renderer}` that `auto` knows, read from the installed package's source without importing it."""
    spec = importlib.util.find_spec("renderers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = (Path(next(iter(spec.submodule_search_locations))) / "base.py").read_text(encoding="utf-8")
    start = source.find("\nMODEL_RENDERER_MAP")
    end = source.find("\n}", start)
    if start < 0 or end < 0:
        return {}
    literal = source[source.index("{", start) : end + 2]
    return ast.literal_eval(literal)


def resolve_auto(renderer: RendererConfig, model: str) -> str | None:
    """The renderer's name for `model`; None where `auto` cannot know it."""
    return renderer.name if renderer.name != "auto" else hub_renderers().get(model)
