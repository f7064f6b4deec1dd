"""Episodes and environments made by hand."""

import asyncio
from types import SimpleNamespace

import pytest

from rlmake.envs.client import EnvTask


def trace(reward=1.0, reply="olleh", **given):
    values = {
        "agent": SimpleNamespace(trainable=True), "reward": reward, "last_reply": reply, "is_truncated": False,
        "is_timeout": False, "errors": [], "stop_condition": "agent_completed",
        "metrics": {"exact": float(reward == 1)}, "rewards": {"similarity": SimpleNamespace(value=reward)},
    }  # fmt: skip
    return SimpleNamespace(**values | given)


def episode(traces, prompt="hello", ok=True, errors=(), is_timeout=False):
    data = SimpleNamespace(prompt_text=prompt)
    return SimpleNamespace(
        traces=traces, ok=ok, errors=list(errors), is_timeout=is_timeout, task=SimpleNamespace(data=data),
        num_turns=len(traces), num_input_tokens=5, num_output_tokens=7,
    )  # fmt: skip


class FakeEnv:
    """`script(task, seed) -> episode | awaitable` decides; `calls` are (task index, sampling) in order of arrival."""

    def __init__(self, num_tasks, script, name="rev"):
        self.name, self._tasks, self._script = name, num_tasks, script
        self.calls, self.running, self.most = [], 0, 0

    def num_tasks(self):
        return self._tasks

    def task(self, index):
        return EnvTask(index, f"k{index}", f"h{index}", "T", {"prompt": f"p{index}"})

    async def run(self, task, client, model, sampling, on_delta=None):
        self.calls.append((task.index, sampling))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            made = self._script(task, sampling["seed"])
            return await made if asyncio.iscoroutine(made) else made
        finally:
            self.running -= 1

    def failed(self, task, kind, message, is_timeout=False):
        error = SimpleNamespace(type=kind, message=message)
        return episode([], task.data["prompt"], ok=False, errors=[error], is_timeout=is_timeout)


@pytest.fixture
def make():
    return SimpleNamespace(trace=trace, episode=episode, env=FakeEnv)
