"""One environment evaluated: every task `group_size` times, so many episodes at once, in a fixed order.

Seeds depend on what is sampled, not on when: `derive(seed, "eval", env, task key, sample)`. So a result is the same
whatever the concurrency, and two models that are evaluated with one suite get the same draws.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.envs.client import EnvHandle, EnvTask
from rlmake.evals.records import EnvResult, EpisodeRecord, of_episode
from rlmake.monitors.traces import Recorder, Work

DEADLINE_S = 3600.0  # of an episode whose environment has no limit of its own
LIMIT_POLL_S = 0.5  # how soon a raised limit is seen when nothing ends
GRACE_S = 30.0  # what the server gets beyond the environment's own limit, to score and answer


async def evaluate(
    env: EnvHandle,
    client: Any,
    model: str,
    *,
    group_size: int,
    sampling: Mapping[str, Any],
    seed: int,
    max_inflight: int | Callable[[], int] = 128,
    deadline: float = DEADLINE_S,
    stop: asyncio.Event | None = None,
    done: Iterable[EpisodeRecord] = (),
    on_episode: Callable[[EpisodeRecord], Any] | None = None,
    on_inflight: Callable[[int], None] | None = None,
    on_all_started: Callable[[], None] | None = None,
    recorder: Recorder | None = None,
    version: int = 0,
) -> EnvResult:
    """Run all tasks of `env`.

    `client` and `model` are for verifiers (`rlmake.envs.client.engine_client`); `sampling` is as it goes on the
    wire (see `wire_sampling`). An episode that takes longer than `deadline` seconds is given up and counts as timed
    out. `max_inflight` may change while it runs. Setting `stop` gives up what is in flight and returns what there
    is. Records in `done` (of an earlier attempt) are taken as they are. `on_episode` may be a coroutine.
    `on_inflight` hears how many episodes run, and `on_all_started` when the last one has begun. Never raises for an
    episode. `recorder` gets every episode for the trace stream, as of policy `version`.
    """
    num_tasks = env.num_tasks()
    if num_tasks is None:
        raise UserError(f"env {env.name!r}: its tasks have no end; say how many with select.limit")
    started, recorder = time.monotonic(), recorder or Recorder((), "", 1)
    places = [(index, sample) for index in range(num_tasks) for sample in range(group_size)]
    records = {(record.task, record.sample): record for record in done}
    records = {place: records[place] for place in places if place in records}

    async def run(index: int, sample: int) -> None:
        group = f"{env.name}/v{version}/{index}"
        work = Work("eval", env.name, group, f"eval/{group}/{sample}", version, version, time.time(), index, sample)
        record = await _episode(env, client, model, env.task(index), work, sampling, seed, deadline, recorder)
        records[index, sample] = record
        if on_episode is not None and (noted := on_episode(record)) is not None:
            await noted

    limit = max_inflight if callable(max_inflight) else lambda: max_inflight
    work = (functools.partial(run, *place) for place in places if place not in records)
    await _all(work, limit, stop or asyncio.Event(), on_inflight or (lambda _: None), on_all_started or (lambda: None))
    ordered = [records[place] for place in sorted(records)]
    return EnvResult(env.name, num_tasks, group_size, dict(sampling), ordered, time.monotonic() - started)


async def _all(
    work: Iterator[Callable[[], Any]],
    limit: Callable[[], int],
    stop: asyncio.Event,
    on_inflight: Callable[[int], None],
    on_all_started: Callable[[], None],
) -> None:
    """Run all of `work`, at most `limit()` at once, until the end, until `stop` is set or one raises; leave none."""
    running: set[asyncio.Task] = set()
    failed: list[BaseException] = []
    changed, more = asyncio.Event(), True
    stopping = asyncio.ensure_future(stop.wait())
    stopping.add_done_callback(lambda _: changed.set())

    def ended(task: asyncio.Task) -> None:
        running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            failed.append(task.exception())
        changed.set()

    try:
        while (more or running) and not stop.is_set() and not failed:
            changed.clear()
            while more and len(running) < limit():
                if (start := next(work, None)) is None:
                    more = False
                    on_all_started()
                    break
                task = asyncio.create_task(start())
                running.add(task)
                task.add_done_callback(ended)
            on_inflight(len(running))
            if running:
                with suppress(TimeoutError):  # the limit may have been raised meanwhile
                    async with asyncio.timeout(LIMIT_POLL_S if more else None):
                        await changed.wait()
        if failed:
            raise failed[0]
    finally:
        left = [*running, stopping]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        on_inflight(0)


async def _episode(
    env: EnvHandle,
    client: Any,
    model: str,
    task: EnvTask,
    work: Work,
    sampling: Mapping[str, Any],
    seed: int,
    deadline: float,
    recorder: Recorder,
) -> EpisodeRecord:
    own_seed = derive(seed, "eval", env.name, task.key, work.sample)
    try:
        with recorder.episode(work) as on_delta:
            async with asyncio.timeout(deadline):
                episode = await env.run(task, client, model, {**sampling, "seed": own_seed}, on_delta)
    except TimeoutError:
        episode = env.failed(task, "EpisodeTimeout", f"no result within {deadline:.0f} s", is_timeout=True)
    recorder.arrived(work, episode, work.version)
    return of_episode(episode, env.name, task, work.sample, own_seed)


def wire_sampling(sampling: Any) -> dict[str, Any]:
    """An `EvalSamplingConfig` as it goes on the wire: what is set, with `extra_body` flattened into it."""
    values = {name: value for name, value in dict(sampling).items() if value is not None}
    return {**values.pop("extra_body", {}), **values}


def episode_deadline(env: Mapping[str, Any]) -> float:
    """Seconds that an episode of the `env` table may take, seen from here: its own limit and a grace."""
    timeout = env.get("timeout")
    own = timeout.get("episode") if isinstance(timeout, Mapping) else None
    return DEADLINE_S if own is None else float(own) + GRACE_S
