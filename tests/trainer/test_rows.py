"""Rows as data sets really hold them → messages, tools and masks; and what is refused, naming the column."""

from types import SimpleNamespace

import pytest

from rlmake.config.sft import Columns
from rlmake.trainer.data.rows import RowError, resolve

COLUMNS = Columns()


def read(**row):
    return resolve(row, COLUMNS)


def test_prompt_and_completion_as_text_or_messages():
    found = read(prompt="hi", completion="yo")
    assert found.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert found.message_mask == [0, 1]
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = read(prompt=prompt, completion=[{"role": "assistant", "content": "d"}])
    assert found.message_mask == [0, 0, 0, 1], "an assistant turn of the prompt never trains"


def test_messages_win_and_renamed_columns_are_read():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = read(messages=messages, prompt="x", completion="y")
    assert found.messages == messages and found.message_mask is None
    columns = COLUMNS.model_copy(update={"messages": "talk", "message_loss_mask": "selection"})
    assert resolve({"talk": messages, "selection": [0, True]}, columns).message_mask == [0, 1]


def test_a_mask_only_restricts_a_prompt_completion_row():
    assert read(prompt="a", completion="b", message_loss_mask=[1, 1]).message_mask == [0, 1]
    assert read(prompt="a", completion="b", message_loss_mask=[1, 0]).message_mask == [0, 0]
    assert read(prompt="a", completion="b", message_loss_mask=None).message_mask == [0, 1]


@pytest.mark.parametrize("mask", [[1], [1, 1, 1], [0, 2], ["1", 0], [0.5, 1], "11"])
def test_a_wrong_mask_is_named(mask):
    with pytest.raises(RowError, match="message_loss_mask"):
        read(prompt="a", completion="b", message_loss_mask=mask)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_arguments_as_json_text_or_objects_are_the_same():
    found = []
    for tools in ([TOOL], '[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}]'):
        for arguments in ({"a": 1}, '{"a":1}'):
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
            found.append(read(messages=messages, tools=tools))
    assert all(one == found[0] for one in found)
    assistant = found[0].messages[1]
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found[0].tools == [TOOL]


def test_nulls_go_except_in_arguments():
    call = {"id": None, "function": {"name": "f", "arguments": {"x": None, "y": {"z": None}}}}
    messages = [
        {"role": "user", "content": "q", "name": None, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    found = read(messages=messages).messages
    assert found[0] == {"role": "user", "content": "q"}
    assert found[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"x": None, "y": {"z": None}}}}]


def test_flat_tools_are_wrapped_and_the_old_column_name_is_read():
    flat = {"name": "add", "description": "adds", "parameters": {}}
    found = read(prompt="a", completion="b", tool_defs=[flat])
    assert found.tools == [{"type": "function", "function": flat}]


@pytest.mark.parametrize("tools", [None, "[]", [], ""])
def test_no_tools(tools):
    assert read(prompt="a", completion="b", tools=tools).tools is None


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"tools": "not json"}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"function": {"description": "no name"}}]}, "tools"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [{"content": "no role"}]}, "prompt"),
        ({"prompt": None}, "neither"),
        (
            {"completion": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "completion",
        ),
    ],
)
def test_what_cannot_be_read_names_the_column(row, named):
    with pytest.raises(RowError, match=named):
        resolve({"prompt": "a", "completion": "b", **row}, COLUMNS)


def test_renderer_fields_come_from_the_row_and_null_leaves_the_configured_one():
    columns = SimpleNamespace(**{**COLUMNS.model_dump(), "renderer": {"reasoning_effort": "effort"}})
    assert resolve({"prompt": "a", "completion": "b", "effort": "low"}, columns).options == {"reasoning_effort": "low"}
    assert resolve({"prompt": "a", "completion": "b", "effort": None}, columns).options == {}
