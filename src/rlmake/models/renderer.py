"""Renderers (messages ↔ tokens), as the configuration names them. No torch."""

from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.models.text import load_tokenizer

__all__ = ["CHATML", "load_tokenizer", "make_renderer", "typed_config"]

CHATML = "rlmake.models.chatml:ChatMLRenderer"
"""The `import_path` of the renderer for models made by `init`."""


def typed_config(renderer: Any) -> Any:
    """The configuration in the form of the `renderers` package (also what verifiers' clients take).

    `renderer` has `name`, `import_path` and `options`. Raises `UserError` for an option that the renderer lacks.
    """
    import pydantic
    import renderers

    table = {"name": renderer.name, **renderer.options}
    if renderer.import_path is not None:
        table["import_path"] = renderer.import_path
    try:
        return pydantic.TypeAdapter(renderers.RendererConfig).validate_python(table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != renderer.name)
        raise UserError(f"renderer{'.' + key if key else ''}: {first['msg']}") from None
    except (ValueError, TypeError, ImportError, FileNotFoundError) as error:
        raise UserError(f"renderer.import_path: {error}") from None


def make_renderer(tokenizer: Any, renderer: Any) -> Any:
    """The renderer that a configuration names over a tokenizer (an object, a directory or a hub id).

    `auto` knows models by their hub id only; for others it would fall back to the chat template and give no loss mask,
    so that is refused.
    """
    from renderers import create_renderer

    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    made = create_renderer(tokenizer, typed_config(renderer))
    if renderer.name == "auto" and type(made).__name__ == "DefaultRenderer":
        raise UserError(
            f"renderer.name: 'auto' does not know '{tokenizer.name_or_path}'; name its renderer "
            f"(qwen3, llama-3, …; name = 'custom' with import_path = '{CHATML}' for models made by init)"
        )
    return made
