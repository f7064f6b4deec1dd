"""Tokenizers and the text of tokens. No torch, and no `renderers`: the inference server starts without it."""

from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError


def load_tokenizer(source: Any) -> Any:
    """A tokenizer by directory or hub id, or by a `TokenizerConfig` (`name`, `trust_remote_code`, `chat_template`)."""
    from transformers import AutoTokenizer

    plain = isinstance(source, str | Path)
    name = source if plain else source.name
    try:
        trust = not plain and bool(source.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust)
    except Exception as error:  # of transformers' making, and of any kind
        raise UserError(f"tokenizer '{name}': {(str(error).strip().splitlines() or ['not loadable'])[0]}") from None
    if not plain and source.chat_template:
        tokenizer.chat_template = template_text(source.chat_template)
    return tokenizer


def template_text(template: str) -> str:
    """A chat template given as Jinja text or as the name of a file that holds it."""
    if "{" in template or "\n" in template:
        return template
    if not Path(template).is_file():
        raise UserError(f"chat_template: no such file: {template}")
    return Path(template).read_text(encoding="utf-8")


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of ids as it stands; ids beyond the tokenizer (padded embedding rows) become `<unused_…>` placeholders."""
    known = len(tokenizer)
    if max(ids, default=0) < known:
        return tokenizer.decode(ids, skip_special_tokens=False)
    text: list[str] = []
    run: list[int] = []
    for token in ids:
        if token < known:
            run.append(token)
            continue
        text += [tokenizer.decode(run, skip_special_tokens=False), f"<unused_{token}>"]
        run = []
    return "".join([*text, tokenizer.decode(run, skip_special_tokens=False)])
