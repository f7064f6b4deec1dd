"""Plain ChatML: the renderer of models made by `init`, and the chat template that writes the same text. No torch.

    <|im_start|>{role}\\n{content}<|im_end|>\\n

Nothing is inserted that the messages do not hold: no think block, no trimming. So what an assistant turn trains is what
the model samples, its text and `<|im_end|>`; the header is given at generation and the newline after the end is never
sampled. A reply's tokens are the same in every later render, so conversations only ever grow at the end.
"""

import json
from typing import Any, ClassVar, Literal

from renderers.base import (
    ParsedResponse,
    RenderedTokens,
    attribute_text_segments,
    extract_message_tool_names,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig
from renderers.parsing import parse_qwen3

from rlmake.models.text import decode

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
SPECIAL = (PAD, START, END)
MARKS = (CALL, CALL_END, "<tool_response>", "</tool_response>", "<think>", "</think>")

TOOLS_BEFORE = "You can call these functions, described one a line:\n"
TOOLS_AFTER = (
    f'\n\nA call is written as\n{CALL}\n{{"name": the name, "arguments": an object}}\n{CALL_END}\n'
    "and answered by the next turn."
)

TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part if part is string else part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro header() -%}
{{ BEFORE }}{%- for tool in tools -%}{{ '\\n' if not loop.first }}{{ tool | tojson }}{%- endfor -%}{{ AFTER }}
{%- endmacro -%}
{%- if tools and messages[0].role != 'system' -%}
{{ '<|im_start|>system\\n' + header() + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content -%}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}
{{ text(message.content) }}
{%- if tools and loop.first and message.role == 'system' -%}{{ ('\\n\\n' if text(message.content)) + header() }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\\n' if text(message.content) or not loop.first }}{{ '<tool_call>\\n{"name": ' + function.name | tojson }}
{{- ', "arguments": ' + (function.arguments if function.arguments is string else function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".replace("BEFORE", json.dumps(TOOLS_BEFORE)).replace("AFTER", json.dumps(TOOLS_AFTER))


class ChatMLRendererConfig(BaseRendererConfig):
    """No options: the format has none."""

    name: Literal["custom"] = "custom"


def content_text(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts. `ValueError` for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    if any(not isinstance(part, str) for part in parts):
        raise ValueError("the ChatML renderer takes text parts only")
    return "".join(parts)


class ChatMLRenderer:
    """See the module. In a configuration: `name = "custom"`, `import_path = "rlmake.models.chatml:ChatMLRenderer"`."""

    config_class: ClassVar = ChatMLRendererConfig
    is_prefix_stable = True
    supports_tools = True

    def __init__(self, tokenizer: Any, config: ChatMLRendererConfig | None = None):
        self.config = config or ChatMLRendererConfig()
        self._tokenizer = tokenizer
        known = tokenizer.get_vocab()
        if missing := [token for token in (START, END, PAD) if token not in known]:
            raise ValueError(f"the tokenizer has no token {missing[0]}, which ChatML needs")
        self._start, self._end, self._pad = known[START], known[END], known[PAD]
        # A tokenizer without the marks of calls (SmolLM2's) writes them as text, and replies are not searched for them.
        self._call, self._call_end = known.get(CALL), known.get(CALL_END)

    def render(
        self, messages: list, *, tools: list | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Tokens of a conversation. Sampled (and body) are exactly an assistant's text, calls and `<|im_end|>`."""
        if not messages:
            raise ValueError("no messages to render")
        out = _Out(self._tokenizer)
        if tools and messages[0]["role"] != "system":
            self._turn(out, -1, "system", [(_header(tools), False)])
        for index, message in enumerate(messages):
            head = _header(tools) if tools and index == 0 and message["role"] == "system" else ""
            self._message(out, index, message, head)
        if add_generation_prompt:
            self._generation_prompt(out)
        return out.rendered(messages)

    def _message(self, out: "_Out", index: int, message: Any, head: str = "") -> None:
        content = content_text(message.get("content"))
        reasoning = message.get("reasoning_content")
        if reasoning:
            content = f"<think>\n{reasoning}\n</think>\n\n{content}"
        calls = message.get("tool_calls") or []
        if message["role"] != "assistant":
            if calls:
                raise ValueError(f"message {index}: only an assistant calls tools, not '{message['role']}'")
            tail = [(("\n\n" if content else "") + head, False)] if head else []
            self._turn(out, index, message["role"], [(content, True), *tail])
            return
        out.special(self._start, index)
        out.text([("assistant\n", False)], index)
        body = content
        for number, call in enumerate(calls):
            body += ("\n" if content or number else "") + _call_text(call)
        out.text([(body, True)], index, sampled=True)
        out.special(self._end, index, sampled=True, content=True)
        out.text([("\n", False)], index)

    def _turn(self, out: "_Out", index: int, role: str, segments: list[tuple[str, bool]]) -> None:
        out.special(self._start, index)
        out.text([(f"{role}\n", False), *segments], index)
        out.special(self._end, index)
        out.text([("\n", False)], index)

    def _generation_prompt(self, out: "_Out") -> None:
        out.special(self._start, -1)
        out.text([("assistant\n", False)], -1)

    def render_ids(
        self, messages: list, *, tools: list | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        return [self._end, self._pad]

    def parse_response(
        self, token_ids: list[int], *, tools: list | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The message of a completion: its text as it stands, and tool calls where there are any."""
        stops = set(self.get_stop_token_ids())
        ids = next((token_ids[:at] for at, token in enumerate(token_ids) if token in stops), token_ids)
        if self._call is None or self._call not in ids:
            return ParsedResponse(content=decode(self._tokenizer, ids))
        found = parse_qwen3(
            self._tokenizer, ids, stop_ids=stops, tool_call_id=self._call, tool_call_end_id=self._call_end
        )
        before = decode(self._tokenizer, ids[: ids.index(self._call)])
        return ParsedResponse(content=before.removesuffix("\n"), tool_calls=found.tool_calls)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list,
        *,
        tools: list | None = None,
    ) -> RenderedTokens | None:
        """The next turn's prompt, with what was sampled kept as it is; a truncated reply gets its `<|im_end|>`.

        None where an assistant's message is among the new ones.
        """
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self._end, self._pad}, synthesize_close=self._end
        )
        out = _Out(self._tokenizer)
        out.add(previous, -1)
        out.text([("\n", False)], -1)
        for index, message in enumerate(new_messages):
            self._message(out, index, message)
        self._generation_prompt(out)
        return out.rendered(new_messages)


class _Out:
    """Tokens under construction, each with its message, and whether it is sampled and part of a message's body."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.messages: list[int] = []
        self.sampled: list[bool] = []
        self.content: list[bool] = []
        self.attributed = True

    def add(self, ids: list[int], message: int, sampled: bool = False, content: bool = False) -> None:
        self.ids += ids
        self.messages += [message] * len(ids)
        self.sampled += [sampled] * len(ids)
        self.content += [content] * len(ids)

    def special(self, token: int, message: int, sampled: bool = False, content: bool = False) -> None:
        self.add([token], message, sampled, content)

    def text(self, segments: list[tuple[str, bool]], message: int, sampled: bool = False) -> None:
        """Encode the joined segments in one pass (merges may cross them); each token counts to where it begins."""
        pairs = attribute_text_segments(self.tokenizer, segments)
        self.attributed &= pairs.has_content_attribution
        for token, content in pairs:
            self.add([token], message, sampled, content)

    def rendered(self, messages: list) -> RenderedTokens:
        return RenderedTokens(
            token_ids=self.ids,
            message_indices=self.messages,
            sampled_mask=self.sampled,
            is_content=self.content if self.attributed else [],
            message_roles=[message.get("role") or "" for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )


def _header(tools: list) -> str:
    return TOOLS_BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_AFTER


def _call_text(call: Any) -> str:
    function = call.get("function") or call
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name", ""), ensure_ascii=False)
    return f'{CALL}\n{{"name": {name}, "arguments": {arguments}}}\n{CALL_END}'
