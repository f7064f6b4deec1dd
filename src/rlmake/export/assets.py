"""The files of a model directory that are not tensors: configuration, tokenizer, chat template, processor, code."""

import shutil
from pathlib import Path
from typing import Any

from rlmake.core.jsonio import read_json, write_bytes, write_json

# Names that Hugging Face tokenizers, processors, generation and remote code use.
PATTERNS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "vocab.txt", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "*.py",
)  # fmt: skip


def resolve(assets: str) -> Path:
    """The folder of a model or tokenizer: a local one, or a hub id's snapshot (small files only)."""
    folder = Path(assets)
    if folder.is_dir():
        return folder
    from rlmake.models.loading import locate

    return locate(assets, weights=False)


def copy(source: Path, out: Path, chat_template: str | None = None) -> list[str]:
    """Copy what `PATTERNS` names; a configured chat template replaces the tokenizer's. Returns the names copied."""
    names = sorted({path.relative_to(source).as_posix() for pattern in PATTERNS for path in source.glob(pattern)})
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)
    if chat_template is not None:
        write_bytes(out / "chat_template.jinja", chat_template.encode())
        (out / "chat_template.json").unlink(missing_ok=True)
        settings = out / "tokenizer_config.json"
        if settings.is_file() and "chat_template" in (table := read_json(settings)):
            del table["chat_template"]
            write_json(settings, table)
    return names


# What a converted directory has of its own, and what says something about the source alone.
OWN = ("*.safetensors", "*.safetensors.index.json", "config.json", "README.md", "card.json", "manifest.json")


def copy_all(source: Path, out: Path) -> None:
    """Copy every other file of a model directory (links are followed, hidden files are not copied)."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        foreign = any(path.match(pattern) for pattern in OWN) or any(part.startswith(".") for part in name.parts)
        if path.is_file() and not foreign:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out / name)


def write_config(out: Path, config: dict[str, Any], **changes: Any) -> None:
    """`config.json` that states bfloat16 (as do nested tables that state a type), with `changes` on top."""
    table = _state_bf16(config)
    table.pop("torch_dtype", None)
    table.pop("_name_or_path", None)  # where the model was loaded from: nothing of a machine goes into an artefact
    write_json(out / "config.json", {**table, "dtype": "bfloat16", **changes})


def _state_bf16(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _state_bf16(value) if isinstance(value, dict) else "bfloat16" if key in ("dtype", "torch_dtype") else value
        for key, value in table.items()
    }
