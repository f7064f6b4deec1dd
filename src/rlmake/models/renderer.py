"""Renderers (messages ↔ tokens) and tokenizers, as the configuration names them. No torch."""

from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError

CHATML = "rlmake.models.chatml:ChatMLRenderer"
"""The `import_path` of the renderer for models made by `init`."""


def load_tokenizer(source: Any) -> Any:
    """A tokenizer by directory or hub id, or by a `TokenizerConfig` (`name`, `trust_remote_code`, `chat_template`)."""
    from renderers.base import load_tokenizer as load

    name = source if isinstance(source, str | Path) else source.name
    try:
        if not isinstance(source, str | Path) and source.trust_remote_code:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
        else:
            tokenizer = load(str(name))
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"tokenizer '{name}': {(str(error).strip().splitlines() or ['not loadable'])[0]}") from None
    template = getattr(source, "chat_template", None)
    if template:
        tokenizer.chat_template = template_text(template)
    return tokenizer


def template_text(template: str) -> str:
    """A chat template given as Jinja text or as the name of a file that holds it."""
    if "{" in template or "\n" in template:
        return template
    if not Path(template).is_file():
        raise UserError(f"chat_template: no such file: {template}")
    return Path(template).read_text(encoding="utf-8")


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
