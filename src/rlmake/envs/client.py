"""The client of one environment: which tasks it has, and one episode of a task.

    env = await EnvHandle.connect(source, address_file(ctx, "train", source.name), run_id=ctx.run_id)
    episode = await env.run(env.task(0), client, model, sampling)

Token ids, masks and logprobs of an episode are those that the engine saw and sent, unrounded: they travel as
msgpack. (`episode.to_record()`, for files that people read, rounds to four decimals: never train on it.)
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset

from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext
from rlmake.envs import address as addresses
from rlmake.envs import plugins
from rlmake.envs.wire import Wire
from rlmake.models.renderer import typed_config

ENV_SERVER_SECONDS = 600.0

_SERVERS_WORDS = re.compile(r"(\w+): (.*)", re.DOTALL)


def engine_client(client: Any, base_url: str, renderer: Any = None, tokenizer: str | None = None) -> vf.ClientConfig:
    """How episodes reach an engine, for `EnvHandle.run`.

    `client`: a `ClientConfig`; `base_url` ends in /v1. With a `renderer` (a `RendererConfig`) the env server renders
    messages with `tokenizer` (a directory or hub id) and speaks tokens with the engine, so that an episode holds ids
    and logprobs. Without one it relays chat completions, which any OpenAI-compatible endpoint answers: no ids.
    """
    common = {
        "base_url": base_url,
        "api_key_var": client.api_key_var,
        "headers": client.headers,
        "headers_from_env": client.headers_from_env,
    }
    if renderer is None:
        return vf.EvalClientConfig(**common)
    return vf.TrainClientConfig(**common, renderer=typed_config(renderer), renderer_model_name=tokenizer)


@dataclass(frozen=True)
class EnvTask:
    """One task of an environment. `key` identifies it across runs; `data` is what travels to the server (JSON)."""

    index: int
    key: str
    hash: str
    type: str
    data: dict[str, Any]


class EnvHandle:
    """A connected environment. All methods belong to the event loop that connected it. `agents`: names of its roles."""

    agents: tuple[str, ...] = ("agent",)

    def __init__(self, name: str, tasks: Iterator[EnvTask], bounded: bool, client: Wire):
        self.name = name
        self._client = client
        self._iterator = tasks
        self._tasks: list[EnvTask] = list(tasks) if bounded else []
        self._bounded = bounded

    @classmethod
    async def connect(
        cls, source: Any, address: Path | str, timeout: float = 600.0, run_id: str | None = None
    ) -> "EnvHandle":
        """Load the source's tasks and wait for its server.

        `source`: `.name`, `.env` (verifiers' configuration as a dict) and, for evaluations, `.select`.
        `address`: the address file of a server of run `run_id`, or the address itself of one managed elsewhere.
        Raises `UserError` for a taskset that can't be loaded or is empty, and for a server of another run
        or taskset;
        `RunFailed` when none answers within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        tasks, bounded = await asyncio.to_thread(load_tasks, source)
        target = await _await_address(source.name, address, run_id, deadline)
        client = Wire(target)
        try:
            await client.start(max(1.0, deadline - time.monotonic()))
        except TimeoutError:
            await client.close()
            raise RunFailed(f"env {source.name!r}: no answer from its server at {target} in {timeout:.0f} s") from None
        if client.taskset not in (None, wanted := source.env["taskset"]["id"]):
            await client.close()
            raise UserError(f"env {source.name!r}: the server at {target} runs '{client.taskset}', not '{wanted}'")
        handle = cls(source.name, tasks, bounded, client)
        handle.agents = tuple(plugins.roles(source.env))
        return handle

    def num_tasks(self) -> int | None:
        """How many tasks there are; None for a taskset that goes on for ever."""
        return len(self._tasks) if self._bounded else None

    def task(self, index: int) -> EnvTask:
        """Task `index`, the same whenever it is asked for. Raises IndexError beyond the last."""
        while not self._bounded and len(self._tasks) <= index:
            self._tasks.append(next(self._iterator))
        return self._tasks[index]

    async def run(
        self,
        task: EnvTask,
        client: vf.ClientConfig,
        model: str,
        sampling: vf.SamplingConfig | Mapping[str, Any],
        on_delta: Callable[[bytes], None] | None = None,
    ) -> vf.WireEpisode:
        """One episode. A failure of any kind is an episode with `ok` False and its error, never an exception.

        Cancelling the awaiting task cancels the episode on the server. `on_delta` sees the traces grow
        (`verifiers.v1.serve.delta`).
        """
        try:
            if not isinstance(sampling, vf.SamplingConfig):
                sampling = vf.SamplingConfig.model_validate(sampling)
            episode = await self._client.run(client, model, sampling, task.data, on_delta)
        except Exception as error:
            kind, message = type(error).__name__, str(error)
            if isinstance(error, RuntimeError) and (told := _SERVERS_WORDS.match(message)):  # "<type>: <message>"
                kind, message = told.groups()
            episode = self.failed(task, kind, message)
        episode.env.name = self.name
        return episode

    def failed(self, task: EnvTask, kind: str, message: str, is_timeout: bool = False) -> vf.WireEpisode:
        """The episode of an attempt that came to nothing."""
        data = vf.WireTaskData.model_validate(task.data)
        return vf.WireEpisode(
            env=vf.EnvInfo(name=self.name),
            task=vf.TraceTask[vf.WireTaskData](type=task.type, data=data, key=task.key, hash=task.hash),
            is_timeout=is_timeout,
            errors=[vf.Error(type=kind, message=message)],
        )

    async def close(self) -> None:
        """Send pending cancellations and close the connection."""
        await self._client.close()


def load_tasks(source: Any) -> tuple[Iterator[EnvTask], bool]:
    """The source's tasks in their order, and whether there is an end to them."""
    try:
        taskset = load_taskset(plugins.resolve(source.env).taskset)
        if (select := getattr(source, "select", None)) is not None:
            taskset = taskset.select(vf.SelectConfig.model_validate(dict(select)))
        tasks = (
            EnvTask(index, task.key, task.hash, type(task).__name__, task.data.model_dump(mode="json"))
            for index, task in enumerate(taskset)
        )
        if not taskset.bounded:
            return tasks, False
        tasks = list(tasks)
    except Exception as error:  # a user's code may raise anything while it is imported, and while tasks are made
        raise UserError(f"env {source.name!r}: {plugins.reason(error)}") from error
    if not tasks:
        raise UserError(f"env {source.name!r}: its taskset has no tasks")
    seen: dict[str, int] = {}
    for task in tasks:
        if (other := seen.setdefault(task.key, task.index)) != task.index:
            raise UserError(f"env {source.name!r}: tasks {other} and {task.index} have one key, {task.key!r}")
    return iter(tasks), True


async def _await_address(name: str, address: Path | str, run_id: str | None, deadline: float) -> str:
    if isinstance(address, str):
        return address
    while (found := addresses.read(address, run_id)) is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"env {name!r}: its server has not published {address} in time; see its log")
        await asyncio.sleep(0.05)
    return found


async def connect_all(ctx: RunContext, split: str, sources: list[Any]) -> dict[str, EnvHandle]:
    """Handles of a run's sources by their names; all connect at the same time."""

    async def one(source: Any) -> EnvHandle:
        where = source.serve.address or addresses.address_file(ctx, split, source.name)
        return await EnvHandle.connect(source, where, ENV_SERVER_SECONDS, ctx.run_id)

    handles = await asyncio.gather(*(one(source) for source in sources))
    return {handle.name: handle for handle in handles}
