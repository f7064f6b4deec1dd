"""Conversations through every renderer that ships, over one local tokenizer; `python mask_samples.py` writes the golden
file `masks.json`. The tokenizer is byte-level and has each special token that a renderer asks for."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from renderers import create_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlmake.config.renderer import NAMES
from rlmake.config.sft import Columns, LossMask
from rlmake.core.errors import UserError
from rlmake.models.renderer import typed_config
from rlmake.trainer.data.rows import resolve
from rlmake.trainer.data.tokens import Tokeniser

GOLDEN = Path(__file__).with_name("masks.json")
UNDRIVEN = {"auto", "custom", "default", "gpt-oss"}  # gpt-oss brings a vocabulary of its own, from the network
TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add_numbers", "arguments": {"a": 1}}}
TALKS = {
    "plain": {"messages": [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]},
    "unicode": {"messages": [
        {"role": "user", "content": "naïve 🧪"}, {"role": "assistant", "content": "→ 👩‍🚀 ok é e\u0301"},
        {"role": "user", "content": "more"}, {"role": "assistant", "content": "🙂"},
    ]},
    "reasoning": {"messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "reasoning_content": "first thought", "content": "answer one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "reasoning_content": "second thought", "content": "answer two"},
    ]},
    "tools": {"tools": [TOOL], "messages": [
        {"role": "user", "content": "1?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "add_numbers"},
        {"role": "assistant", "content": "two"},
    ]},
    "empty": {"messages": [
        {"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""},
        {"role": "user", "content": ""}, {"role": "assistant", "content": "x"},
    ]},
}  # fmt: skip


def tokenizer_of(specials: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def driven(name: str):
    """(tokenizer, renderer) of a name: tokens are added until the renderer has all that it asks for."""
    specials: list[str] = []
    while True:
        tokenizer = tokenizer_of(specials)
        try:
            made = create_renderer(tokenizer, typed_config(SimpleNamespace(name=name, import_path=None, options={})))
            made.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
            return tokenizer, made
        except (AssertionError, ValueError, KeyError) as error:
            missing = re.search(r"'([^']+)'", str(error))
            if missing is None or missing[1] in specials:
                raise
            specials.append(missing[1])


def shown(name: str, seq_len: int = 4096) -> dict[str, str]:
    """Each conversation as text, what trains between ⟦ and ⟧; or why it is refused."""
    tokenizer, renderer = driven(name)
    tokenise = Tokeniser(lambda options: renderer, LossMask(), seq_len)
    found = {}
    for key, row in TALKS.items():
        try:
            tokens = tokenise(resolve(row, Columns()))
        except UserError as error:
            found[key] = f"refused: {error}"
            continue
        found[key] = tokens if isinstance(tokens, str) else marked(tokens, tokenizer)
    return found


def marked(tokens, tokenizer) -> str:
    ids, mask = [int(tokens.ids[0]), *tokens.targets.tolist()], [False, *tokens.mask.tolist()]
    text, run = "", []
    for index, token in enumerate(ids):
        run.append(token)
        if index + 1 == len(ids) or mask[index + 1] != mask[index]:
            part = tokenizer.decode(run, skip_special_tokens=False)
            text, run = text + (f"⟦{part}⟧" if mask[index] else part), []
    return text


def names() -> list[str]:
    return [name for name in NAMES if name not in UNDRIVEN]


if __name__ == "__main__":
    golden = {name: shown(name) for name in names()}
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
