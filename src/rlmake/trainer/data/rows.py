"""From a data set's row to a conversation: messages, tools, and which messages train.

Layouts: `messages`, or `prompt` + `completion` (messages win). In a prompt–completion row the prompt never trains.
"""

import json
from dataclasses import dataclass
from typing import Any

from rlmake.core.errors import UserError


@dataclass
class Conversation:
    """`message_mask`: one 0/1 per message, or None for "as roles and renderer say". `options`: renderer fields."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    message_mask: list[int] | None
    options: dict[str, Any]


class RowError(UserError):
    """A row that is not as the layout wants it; the message names the column, `Rows` adds data set and index."""


def resolve(row: dict[str, Any], columns: Any) -> Conversation:
    """Read a row by the column names of `data.columns`. Raises `RowError`."""
    if row.get(columns.messages) is not None:
        messages, prompt = _messages(row[columns.messages], columns.messages, "assistant"), 0
    elif row.get(columns.prompt) is not None and row.get(columns.completion) is not None:
        head = _messages(row[columns.prompt], columns.prompt, "user")
        messages = head + _messages(row[columns.completion], columns.completion, "assistant")
        prompt = len(head)
    else:
        raise RowError(
            f"neither column '{columns.messages}' nor '{columns.prompt}' and '{columns.completion}' has a value "
            f"(columns: {', '.join(row)})"
        )
    mask = _message_mask(row.get(columns.message_loss_mask), len(messages), columns.message_loss_mask)
    if prompt:
        given = mask or [1] * len(messages)
        mask = [0] * prompt + given[prompt:]
    options = {field: row[column] for field, column in columns.renderer.items() if row.get(column) is not None}
    name = columns.tools if row.get(columns.tools) is not None else "tool_defs"
    return Conversation(messages, _tools(row.get(name), name), mask, options)


def _messages(value: Any, column: str, default_role: str) -> list[dict[str, Any]]:
    """A string is one message of the default role; nulls go, except inside the arguments of tool calls."""
    if isinstance(value, str):
        return [{"role": default_role, "content": value}]
    if not isinstance(value, list) or not value:
        raise RowError(f"column '{column}': expected text or a non-empty list of messages, not {_kind(value)}")
    return [_message(item, f"column '{column}', message {i}") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RowError(f"{where}: expected an object with a role")
    message = _strip(value)
    message.setdefault("content", "")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call, where) for call in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _strip(value: Any) -> Any:
    """Without nulls at any depth (columnar files write them for absent keys); call arguments are left as they are."""
    if isinstance(value, dict):
        return {key: v if key == "arguments" else _strip(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_strip(item) for item in value if item is not None]
    return value


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI writes them as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{where}: a tool call needs a function with a name")
    arguments = function.get("arguments")
    arguments = _parsed(arguments, f"{where}: arguments of the call to '{function['name']}'")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """A list of tools or its JSON text, in OpenAI's form; a flat definition is wrapped. None for no tools."""
    value = _parsed(value, f"column '{column}'")
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f"column '{column}': expected a list of tools, not {_kind(value)}")
    tools = []
    for i, tool in enumerate(value):
        tool = _parsed(tool, f"column '{column}', tool {i}")
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise RowError(f"column '{column}', tool {i}: expected an object")
        tool = _strip(tool)
        if "name" not in tool.get("function", tool):
            raise RowError(f"column '{column}', tool {i}: has no name")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _parsed(value: Any, where: str) -> Any:
    """The value that JSON text stands for (blank text: None); anything but text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        raise RowError(f"{where}: not JSON") from None


def _message_mask(value: Any, count: int, column: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != count:
        size = len(value) if isinstance(value, list) else _kind(value)
        raise RowError(f"column '{column}': expected one entry for each of {count} messages, found {size}")
    if bad := [entry for entry in value if not (isinstance(entry, bool | int) and entry in (0, 1))]:
        raise RowError(f"column '{column}': entries are booleans or 0/1, not {bad[0]!r}")
    return [int(entry) for entry in value]


def _kind(value: Any) -> str:
    return (
        "null"
        if value is None
        else f"an empty {type(value).__name__}"
        if value in ([], {}, "")
        else type(value).__name__
    )
