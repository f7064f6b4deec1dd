"""Hand-made episodes of verifiers' wire types."""

import pytest
import verifiers.v1 as vf


def node(role, tokens, *, parent=None, sampled=False, scaffold=0, content=True, start=0):
    """A message of `tokens` ids; a sampled one has `scaffold` unsampled ids before them."""
    ids = list(range(start, start + scaffold + tokens))
    message = {"role": role, "content": "x"} | ({"tool_call_id": "t"} if role == "tool" else {})
    mask = [False] * scaffold + [sampled] * tokens
    return vf.MessageNode.model_validate(
        {
            "parent": parent,
            "message": message,
            "sampled": sampled,
            "token_ids": ids,
            "mask": mask,
            "is_content": ([False] + [True] * (len(ids) - 1)) if content else [],
            "logprobs": [-0.5] * sum(mask),
        }
    )


def trace(nodes, reward=0.0, *, agent="agent", ok=True, trainable=True, outputs=None, info=None):
    outputs = outputs if outputs is not None else sum(sum(n.mask) for n in nodes)
    calls = [{"node": len(nodes) - 1, "usage": {"prompt_tokens": 4, "completion_tokens": outputs}}]
    return vf.WireTrace.model_validate(
        {
            "task": {"type": "T", "data": {"idx": 0, "prompt": "p"}},
            "agent": {"config": {}, "name": agent, "trainable": trainable},
            "nodes": nodes,
            "calls": calls,
            "rewards": {} if reward is None else {"r": {"score": reward}},
            "ok": ok,
            "info": info or {},
        }
    )


def simple(reward, tokens=2, **kwargs):
    """Prompt of three tokens, one reply."""
    return trace([node("user", 3), node("assistant", tokens, parent=0, sampled=True, scaffold=1)], reward, **kwargs)


def episode(*traces, ok=True):
    return vf.WireEpisode.model_validate(
        {"task": {"type": "T", "data": {"idx": 0, "prompt": "p"}}, "ok": ok, "traces": list(traces)}
    )


class Make:
    node, trace, simple, episode = map(staticmethod, (node, trace, simple, episode))


@pytest.fixture
def make():
    return Make
