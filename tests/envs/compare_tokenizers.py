"""Run in a process of its own: the light tokenizer of argv[1] against transformers', by ids, text and renderers."""

import sys

from renderers import Qwen3RendererConfig, base, create_renderer

import rlmake.envs  # noqa: F401  (first, as in an env server)
from rlmake.envs.startup import light_tokenizers
from rlmake.models.chatml import ChatMLRenderer

TEXTS = ["", "a", "<|im_start|>user\nnaïve 🧪<|im_end|> <think>", " 👩‍🚀 e\u0301\n\n", "<|endoftext|>x<tool_call>"]
TURNS = [
    {"role": "system", "content": "be brief 🧪"},
    {"role": "user", "content": " naïve \n"},
    {"role": "assistant", "content": "ok é"},
    {"role": "user", "content": "?"},
]


def rendered(tokenizer):
    """Everything that a renderer says about the conversation and about a reply."""
    renderers = [create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False)), ChatMLRenderer(tokenizer)]
    reply = tokenizer.encode(" naïve 🧪<|im_end|>")
    return [
        (one.render(TURNS, add_generation_prompt=True), one.get_stop_token_ids(), one.parse_response(reply))
        for one in renderers
    ]


general = base.load_tokenizer
light_tokenizers()
light = base.load_tokenizer(sys.argv[1])
first = rendered(light)
assert "torch" not in sys.modules and "transformers" not in sys.modules
full = general(sys.argv[1])
assert type(full) is not type(light)
assert repr(first) == repr(rendered(full))
for text in TEXTS:
    for special in (True, False):
        a, b = (one(text, add_special_tokens=special, return_offsets_mapping=True) for one in (light, full))
        assert (a["input_ids"], a["offset_mapping"]) == (b["input_ids"], b["offset_mapping"]), text
        assert light.encode(text, add_special_tokens=special) == full.encode(text, add_special_tokens=special)
    ids = light.encode(text)
    for skip in (True, False):
        assert light.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert [light.decode(one) for one in ids] == [full.decode(one) for one in ids]
for name in ("eos_token_id", "unk_token_id", "pad_token_id", "chat_template"):
    assert getattr(light, name) == getattr(full, name), name
assert light.convert_tokens_to_ids(["<think>", "nope"]) == full.convert_tokens_to_ids(["<think>", "nope"])
assert len(light) == len(full)
print("equal")
