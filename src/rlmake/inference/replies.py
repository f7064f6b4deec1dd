"""Replies of the HTTP contract: OpenAI's shapes, and the token-in/token-out one of vLLM."""

import json
import re
import time
import uuid
from typing import Any

from rlmake.inference.engines.base import Completion, Entry
from rlmake.models.text import decode

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class Replies:
    """Builds replies; `tokenizer` turns ids into text, `model` is the name served."""

    def __init__(self, tokenizer: Any, model: str):
        self.tokenizer, self.model = tokenizer, model
        self._special = frozenset(tokenizer.all_special_ids)

    def generate(self, prompt: list[int], done: list[Completion], logprobs: int | None, prompt_logprobs: bool) -> dict:
        """`/inference/v1/generate`: exact ids, each with the logprob under which it was sampled."""
        choices = []
        for index, one in enumerate(done):
            content = None
            if logprobs is not None:
                content = [{"token": f"token_id:{t}", "logprob": p, "top_logprobs": []} for t, p in _pairs(one)]
                for entry, top in zip(content, one.top, strict=False):
                    entry["top_logprobs"] = [{"token": f"token_id:{e.token}", "logprob": e.logprob} for e in top]
            choices.append(
                {
                    "index": index,
                    "token_ids": one.token_ids,
                    "finish_reason": one.finish_reason,
                    "logprobs": None if content is None else {"content": content},
                }
            )
        scored = self._prompt_logprobs(done[0]) if prompt_logprobs else None
        return {
            "request_id": new_id("gen"), "choices": choices, "prompt_logprobs": scored, "usage": _usage([prompt], done),
        }  # fmt: skip

    def chat(self, prompt: list[int], done: list[Completion], request: Any) -> dict:
        """`/v1/chat/completions`, with tool calls where the request brought tools."""
        choices = []
        for index, one in enumerate(done):
            message: dict[str, Any] = {"role": "assistant", "content": self.text(one, request.skip_special_tokens)}
            reason = one.finish_reason
            if request.tools and (request.model_extra or {}).get("tool_choice") != "none":
                # The marks may be special tokens of the tokenizer, so look for them in the whole text.
                content, calls = split_calls(self.text(one, False) if one.text is None else one.text)
                if calls:
                    message |= {"content": self._plain(content) or None, "tool_calls": calls}
                    reason = "tool_calls"
            entries = None
            if request.logprobs:
                entries = {"content": [self._entry(t, p) for t, p in _pairs(one)]}
                for entry, top in zip(entries["content"], one.top, strict=False):
                    entry["top_logprobs"] = [self._entry(e.token, e.logprob) for e in top]
            choices.append({"index": index, "message": message, "logprobs": entries, "finish_reason": reason})
        reply = self._head("chatcmpl", "chat.completion", choices, _usage([prompt], done))
        if request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = self._prompt_logprobs(done[0])
        return reply

    def completions(self, prompts: list[list[int]], done: list[Completion], request: Any) -> dict:
        """`/v1/completions`: `n` choices for each prompt, in the prompts' order."""
        choices = []
        for index, one in enumerate(done):
            choice: dict[str, Any] = {"index": index, "text": self.text(one, request.skip_special_tokens)}
            choice |= {"finish_reason": one.finish_reason, "logprobs": None}
            if request.logprobs is not None:
                tokens = [decode(self.tokenizer, [token]) for token in one.token_ids]
                offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
                tops = [{decode(self.tokenizer, [e.token]): e.logprob for e in top} for top in one.top] or None
                choice["logprobs"] = {
                    "tokens": tokens, "token_logprobs": one.logprobs, "top_logprobs": tops, "text_offset": offsets,
                }  # fmt: skip
            if request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(one)
            choices.append(choice)
        return self._head("cmpl", "text_completion", choices, _usage(prompts, done))

    def text(self, one: Completion, skip_special: bool) -> str:
        """The text of a completion; cut before a stop text that was met."""
        if one.text is not None:
            return one.text
        ids = [token for token in one.token_ids if token not in self._special] if skip_special else one.token_ids
        return decode(self.tokenizer, ids)

    def _plain(self, text: str) -> str:
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _entry(self, token: int, logprob: float) -> dict:
        text = decode(self.tokenizer, [token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def _prompt_logprobs(self, one: Completion) -> list[dict[str, dict] | None]:
        """Per position `{id: {logprob, rank, decoded_token}}`, the given token first; null for the first position."""

        def entry(found: Entry) -> dict:
            return {
                "logprob": found.logprob, "rank": found.rank, "decoded_token": decode(self.tokenizer, [found.token]),
            }  # fmt: skip

        rows = one.prompt_logprobs or []
        return [None if row is None else {str(found.token): entry(found) for found in row} for row in rows]

    def _head(self, prefix: str, kind: str, choices: list[dict], usage: dict) -> dict:
        return {
            "id": new_id(prefix), "object": kind, "created": int(time.time()), "model": self.model,
            "choices": choices, "usage": usage,
        }  # fmt: skip


def split_calls(text: str) -> tuple[str, list[dict]]:
    """The text before the first well-formed call, and the calls (`<tool_call>{"name", "arguments"}</tool_call>`)."""
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": new_id("call"), "type": "function", "function": function})
    return (text.partition("<tool_call>")[0].removesuffix("\n"), calls) if calls else (text, [])


def _pairs(one: Completion) -> zip:
    return zip(one.token_ids, one.logprobs, strict=True)


def _usage(prompts: list[list[int]], done: list[Completion]) -> dict[str, int]:
    given, made = sum(map(len, prompts)), sum(len(one.token_ids) for one in done)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def error(message: str, status: int, kind: str) -> dict:
    """The error object of OpenAI's API."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
