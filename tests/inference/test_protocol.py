"""Requests as they are checked before the engine sees them."""

import pytest

from rlmake.inference import protocol
from rlmake.inference.engines.base import Refused

IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    "cls, body, message",
    [
        ("ChatRequest", {"messages": [{"role": "user", "content": IMAGE}]}, "0.content: a part of type 'image_url'"),
        ("ChatRequest", {"messages": [{"role": "user", "content": ["x"]}]}, "a part of type 'str'"),
        ("ChatRequest", {"messages": []}, "messages"),
        ("CompletionRequest", {"prompt": [True]}, "prompt"),
        ("CompletionRequest", {"prompt": [1.0]}, "prompt"),
        ("GenerateRequest", {"token_ids": [True, 3]}, "token_ids.0"),
    ],
)  # fmt: skip
def test_refused_in_one_line(cls, body, message):
    with pytest.raises(Refused) as refused:
        protocol.parse(getattr(protocol, cls), body)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_text_parts_are_read():
    body = {"messages": [{"role": "user", "content": IMAGE[:1]}, {"role": "assistant", "content": None}]}
    assert protocol.parse(protocol.ChatRequest, body).messages[0]["content"] == IMAGE[:1]
