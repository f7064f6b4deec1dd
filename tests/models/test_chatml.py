"""The ChatML renderer against its chat template, and what of a conversation is trained (faults S02, S07, S10)."""

import pytest
from renderers import create_renderer
from renderers.base import build_training_sample

from rlmake.config.renderer import RendererConfig
from rlmake.core.errors import UserError
from rlmake.models import chatml
from rlmake.models.renderer import CHATML, load_tokenizer, make_renderer, typed_config
from rlmake.models.text import decode

TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "naïve → ok", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "move", "parameters": {"properties": {"dx": {"type": "integer"}}}}},
]
CALL = {"type": "function", "function": {"name": "move", "arguments": {"dx": 3, "why": "ünï"}}}
CONVERSATIONS = {
    "plain": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
    "system": [
        {"role": "system", "content": "Write the user's text backwards."},
        {"role": "user", "content": "hello <|x|> world"},
        {"role": "assistant", "content": "dlrow olleh"},
        {"role": "user", "content": "  spaces \n\n kept  "},
        {"role": "assistant", "content": "yes"},
    ],
    "tools": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "calling", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "done again"},
        {"role": "assistant", "content": "good", "reasoning_content": "it\nmoved"},
    ],
    "system tools": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
    "nulls": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"a": 1}'}}]},
    ],
}


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return make_renderer(tokenizer, RendererConfig(name="custom", import_path=CHATML))


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("generate", [False, True])
def test_text_is_that_of_the_chat_template(renderer, tokenizer, name, generate):
    tools = TOOLS if "tools" in name else None
    ids = renderer.render_ids(CONVERSATIONS[name], tools=tools, add_generation_prompt=generate)
    text = tokenizer.apply_chat_template(
        CONVERSATIONS[name], tools=tools, add_generation_prompt=generate, tokenize=False
    )
    assert decode(tokenizer, ids) == text
    if tools:
        assert chatml.TOOLS_BEFORE in text and "naïve → ok" in text


def trained(renderer, messages, **options):
    sample = build_training_sample(renderer, messages, ensure_final_stop=True, **options)
    return sample.token_ids, [t for t, keep in zip(sample.token_ids, sample.loss_mask, strict=True) if keep]


def test_only_reply_and_end_are_trained(renderer, tokenizer):
    ids, kept = trained(renderer, CONVERSATIONS["plain"])
    assert kept == [*tokenizer.encode("yo"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompt = renderer.render_ids(CONVERSATIONS["plain"][:1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt, "what is trained follows exactly the prompt of a generation"
    assert ids[len(prompt) : len(prompt) + len(kept)] == kept


def test_every_byte_of_multibyte_text_is_trained(renderer, tokenizer):
    replies = ["→ 👩‍🚀 ok é e\u0301", "🙂"]
    messages = [
        {"role": "user", "content": "naïve 🧪"},
        {"role": "assistant", "content": replies[0]},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": replies[1]},
    ]
    _, kept = trained(renderer, messages)
    assert tokenizer.decode(kept) == "".join(f"{reply}<|im_end|>" for reply in replies)
    _, last = trained(renderer, messages, message_loss_mask=[0, 0, 0, 1])
    assert tokenizer.decode(last) == "🙂<|im_end|>"


def test_body_only_roles(renderer, tokenizer):
    sample = build_training_sample(renderer, CONVERSATIONS["tools"], tools=TOOLS, content_sft_roles={"tool"})
    text = tokenizer.decode([t for t, keep in zip(sample.token_ids, sample.loss_mask, strict=True) if keep])
    assert "<|im_end|>done<tool_call>" in text and "tool\n" not in text and "look" not in text


def test_spans_belong_to_their_messages(renderer, tokenizer):
    rendered = renderer.render(CONVERSATIONS["system"], add_generation_prompt=True)
    for index, message in enumerate(CONVERSATIONS["system"]):
        body = [
            token
            for token, owner, content in zip(
                rendered.token_ids, rendered.message_indices, rendered.is_content, strict=True
            )
            if owner == index and content
        ]
        end = "<|im_end|>" if message["role"] == "assistant" else ""
        assert tokenizer.decode(body) == message["content"] + end
    assert rendered.message_indices[-1] == -1


@pytest.mark.parametrize("reply", ["yo", "  \n yo \n", "", "a 🙂", "<think>\nx\n</think>\n\nyes"])
def test_reply_round_trip_and_prefix_stability(renderer, tokenizer, reply):
    prompt = renderer.render_ids(CONVERSATIONS["plain"][:1], add_generation_prompt=True)
    completion = [*tokenizer.encode(reply), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    parsed = renderer.parse_response(completion, prompt_ids=prompt)
    assert parsed.content == reply and not parsed.tool_calls
    again = [*CONVERSATIONS["plain"][:1], {"role": "assistant", "content": parsed.content}]
    following = [*again, {"role": "user", "content": "next"}]
    rendered = renderer.render_ids(following, add_generation_prompt=True)
    assert rendered[: len(prompt) + len(completion)] == prompt + completion
    bridged = renderer.bridge_to_next_turn(prompt, completion, following[-1:])
    assert bridged.token_ids == rendered
    assert not any(bridged.sampled_mask) and set(bridged.message_indices) == {-1, 0}
    assert bridged.tokens_per_message(1)


def test_truncated_reply_is_closed(renderer, tokenizer):
    prompt = renderer.render_ids(CONVERSATIONS["plain"][:1], add_generation_prompt=True)
    bridged = renderer.bridge_to_next_turn(prompt, tokenizer.encode("yo"), [{"role": "user", "content": "next"}])
    whole = renderer.render_ids(
        [*CONVERSATIONS["plain"], {"role": "user", "content": "next"}], add_generation_prompt=True
    )
    assert bridged.token_ids == whole
    assert renderer.bridge_to_next_turn(prompt, [5], [{"role": "assistant", "content": "x"}]) is None
    assert renderer.bridge_to_next_turn([], [5], [{"role": "user", "content": "x"}]) is None


def test_tool_calls_come_back(renderer, tokenizer):
    messages = CONVERSATIONS["tools"][:2]
    prompt = renderer.render_ids(messages[:1], tools=TOOLS, add_generation_prompt=True)
    completion = renderer.render_ids(messages, tools=TOOLS)[len(prompt) :]
    parsed = renderer.parse_response(completion, tools=TOOLS)
    assert parsed.content == "calling"
    assert [(call.name, call.arguments, call.status) for call in parsed.tool_calls] == [
        ("move", {"dx": 3, "why": "ünï"}, "ok")
    ] * 2
    broken = renderer.parse_response(tokenizer.encode('x<tool_call>{"name": 3'), tools=TOOLS)
    assert broken.tool_calls[0].status == "unclosed_block"


def test_ids_beyond_the_tokenizer_are_shown(renderer, tokenizer):
    assert (
        renderer.parse_response([*tokenizer.encode("yo"), len(tokenizer) + 2]).content
        == f"yo<unused_{len(tokenizer) + 2}>"
    )


def test_bad_messages_and_configurations(renderer, tokenizer, tiny):
    with pytest.raises(ValueError, match="text parts"):
        renderer.render_ids([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(ValueError, match="only an assistant"):
        renderer.render_ids([{"role": "user", "content": "x", "tool_calls": [CALL]}])
    with pytest.raises(UserError, match="auto"):
        make_renderer(tokenizer, RendererConfig())
    with pytest.raises(UserError, match="enable_thinkin"):
        typed_config(RendererConfig(name="qwen3", enable_thinkin=False))
    with pytest.raises(UserError, match="Nothing"):
        typed_config(RendererConfig(name="custom", import_path="rlmake.models.chatml:Nothing"))
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tiny[0] / "nowhere")


def test_renderers_own_door(tokenizer):
    config = typed_config(RendererConfig(name="custom", import_path=CHATML))
    assert isinstance(create_renderer(tokenizer, config), chatml.ChatMLRenderer)
    qwen = make_renderer(tokenizer, RendererConfig(name="qwen3", enable_thinking=False))
    assert qwen.config.enable_thinking is False
