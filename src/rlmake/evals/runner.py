"""One environment evaluated: every task `group_size` times, so many episodes at once, in a fixed order.

Seeds depend on what is sampled, not on when: `derive(seed, "eval", env, task key, sample)`. So a result is the same
whatever the concurrency, and two models that are evaluated with one suite get the same draws.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.envs.client import EnvHandle, EnvTask
from rlmake.evals.records import EnvResult, EpisodeRecord, of_episode

DEADLINE_S = 3600.0  # of an episode whose environment has no limit of its own
GRACE_S = 30.0  # what the server gets beyond the environment's own limit, to score and answer


async def evaluate(
    env: EnvHandle,
    client: Any,
    model: str,
    *,
    group_size: int,
    sampling: Mapping[str, Any],
    seed: int,
    max_inflight: int = 128,
    deadline: float = DEADLINE_S,
    stop: asyncio.Event | None = None,
    on_episode: Callable[[EpisodeRecord], None] | None = None,
) -> EnvResult:
    """Run all tasks of `env`.

    `client` and `model` are for verifiers (`rlmake.envs.client.engine_client`); `sampling` is as it goes on the wire
    (see `wire_sampling`). An episode that takes longer than `deadline` seconds is given up and counts as timed out.
    Setting `stop` gives up what is in flight and returns what there is. Never raises for an episode.
    """
    num_tasks = env.num_tasks()
    if num_tasks is None:
        raise UserError(f"env {env.name!r}: its tasks have no end; say how many with select.limit")
    started = time.monotonic()
    queue = iter([(env.task(index), sample) for index in range(num_tasks) for sample in range(group_size)])
    records: dict[tuple[int, int], EpisodeRecord] = {}

    async def worker() -> None:
        for task, sample in queue:
            if stop is not None and stop.is_set():
                return
            record = await _episode(env, client, model, task, sample, sampling, seed, deadline)
            records[task.index, sample] = record
            if on_episode is not None:
                on_episode(record)

    await _all(worker, min(max_inflight, num_tasks * group_size), stop)
    ordered = [records[place] for place in sorted(records)]
    return EnvResult(env.name, num_tasks, group_size, dict(sampling), ordered, time.monotonic() - started)


async def _all(worker: Callable[[], Any], number: int, stop: asyncio.Event | None) -> None:
    """Run `number` workers to their end, or until `stop` is set or one raises; leave none behind."""
    workers = {asyncio.ensure_future(worker()) for _ in range(number)}
    stopping = asyncio.ensure_future(stop.wait() if stop is not None else asyncio.Event().wait())
    running = set(workers)
    try:
        while running and not stopping.done():
            done, _ = await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            for finished in done - {stopping}:
                finished.result()
    finally:
        for task in (*workers, stopping):
            task.cancel()
        await asyncio.gather(*workers, stopping, return_exceptions=True)


async def _episode(
    env: EnvHandle,
    client: Any,
    model: str,
    task: EnvTask,
    sample: int,
    sampling: Mapping[str, Any],
    seed: int,
    deadline: float,
) -> EpisodeRecord:
    own_seed = derive(seed, "eval", env.name, task.key, sample)
    try:
        async with asyncio.timeout(deadline):
            episode = await env.run(task, client, model, {**sampling, "seed": own_seed})
    except TimeoutError:
        episode = env.failed(task, "EpisodeTimeout", f"no result within {deadline:.0f} s", is_timeout=True)
    return of_episode(episode, env.name, task, sample, own_seed)


def wire_sampling(sampling: Any) -> dict[str, Any]:
    """An `EvalSamplingConfig` as it goes on the wire: what is set, with `extra_body` flattened into it."""
    values = {name: value for name, value in dict(sampling).items() if value is not None}
    return {**values.pop("extra_body", {}), **values}


def episode_deadline(env: Mapping[str, Any]) -> float:
    """Seconds that an episode of the `env` table may take, seen from here: its own limit and a grace."""
    timeout = env.get("timeout")
    own = timeout.get("episode") if isinstance(timeout, Mapping) else None
    return DEADLINE_S if own is None else float(own) + GRACE_S
