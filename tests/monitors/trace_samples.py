"""Episodes as verifiers gives them, made by hand."""

import uuid

import verifiers.v1 as vf


def episode(reward=1.0, reply="olleh", prompt="hello", logprobs=(-0.123456, -0.5), ok=True, traces=1, **node):
    """A `WireEpisode` of one turn: a prompt of 3 tokens, a header of 1, two sampled ones."""
    task = {"type": "Toy", "data": {"idx": 3, "prompt": prompt}, "key": "task-3"}

    def trace():
        return {
            "id": uuid.uuid4().hex, "task": task, "agent": {"config": {}, "name": "agent"},
            "nodes": [
                {"message": {"role": "user", "content": prompt}, "token_ids": [1, 2, 3], "mask": [False] * 3},
                {
                    "parent": 0, "message": {"role": "assistant", "content": reply}, "sampled": True,
                    "token_ids": [4, 5, 6], "mask": [False, True, True], "logprobs": list(logprobs), **node,
                },
            ],
            "calls": [{
                "node": 1, "usage": {"prompt_tokens": 4, "completion_tokens": 2}, "finish_reason": "stop",
                "time": {"start": 10.0, "end": 12.0},
            }],
            "rewards": {"exact": {"score": reward, "weight": 2.0}}, "metrics": {"length": 5.0}, "ok": ok,
            "is_completed": True, "stop_condition": "agent_completed",
        }  # fmt: skip

    made = {"task": task, "ok": ok, "traces": [trace() for _ in range(traces)], "env": {"name": "toy"}}
    return vf.WireEpisode.model_validate(made)
