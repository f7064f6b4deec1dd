"""The process of an evaluation: `python -m rlmake.evals.main @ <resolved>/eval.json`.

Asks an engine and env servers that are there already, one source after the other, and leaves report.json,
episodes.jsonl and report.html in the run directory. What is evaluated for whom stands in `identity.json` beside the
configuration, where a launcher or the build has put it.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from loguru import logger
from setproctitle import setproctitle

from rlmake.core import jsonio, log, procs
from rlmake.core.errors import ConfigError, RunFailed, UserError, entry_point
from rlmake.core.offload import favour_loop
from rlmake.core.rundir import RunContext
from rlmake.evals.progress import Journal
from rlmake.evals.records import EnvResult, EpisodeRecord
from rlmake.inference.concurrency import Controller, require, steer
from rlmake.inference.load import LoadReader


@entry_point
def main(argv: list[str] | None = None) -> None:
    """Evaluate all sources; exits 0 when all episodes have ended, also when some of them failed."""
    procs.die_with_parent()
    setproctitle("PRL::Eval")
    from rlmake.config import EvalConfig, load_resolved

    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "@":
        raise ConfigError("usage: python -m rlmake.evals.main @ eval.json")
    path = Path(argv[1])
    cfg = load_resolved(EvalConfig, path)
    log.setup("eval", cfg.log.level, cfg.log.json_logging)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    identity_file = path.parent / "identity.json"
    identity = jsonio.read_json(identity_file) if identity_file.exists() else {}
    favour_loop()
    asyncio.run(run(cfg, RunContext.from_env(cfg.output_dir), identity, path.parent / "inference.address"))


async def run(cfg: Any, ctx: RunContext, identity: dict[str, Any], address_file: Path) -> dict[str, Any]:
    """Evaluate the sources of an `EvalConfig` in their order. Returns the content of report.json.

    Without a `client.base_url` the engine is the one that publishes itself in `address_file`.
    Raises `RunFailed` when it was stopped, or when every episode of a source failed; the report is there all the same.
    """
    from rlmake import monitors
    from rlmake.envs.client import engine_client
    from rlmake.evals import report, summary
    from rlmake.evals.engine import published_url
    from rlmake.evals.runner import wire_sampling

    logs = monitors.setup(cfg.monitors, "eval", ctx)
    recorder = logs.recorder(ctx.run_id)
    base_url = await published_url(cfg.client, address_file)
    handles, model = await _connect(cfg, ctx, base_url, ctx.run_id if cfg.inference is not None else None)
    # Tokens are only asked for where a renderer is named: chat completions serve every endpoint alike.
    renderer = None if cfg.renderer.name == "auto" else cfg.renderer
    client = engine_client(cfg.client, base_url, renderer, cfg.tokenizer.name)
    results, stop, journal = [], _stop_on_signals(), _journal(cfg, ctx, handles)
    recorder.planned({env: tasks * samples for env, (tasks, samples) in journal.planned.items()})
    try:
        async with _steered(cfg, base_url) as pace:
            for source, env in zip(cfg.source, handles, strict=True):
                result = await _evaluate(cfg, source, env, (client, model), journal, pace, stop, recorder)
                entry = summary.summarise(result)
                logger.success(summary.line(result, entry, 0))
                logs.log(0, summary.metrics(result, entry) | pace.controller.metrics())
                results.append(result)
        await journal.save()
    finally:
        journal.close()
        await asyncio.gather(*(env.close() for env in handles))
        logs.close(finished=not stop.is_set() and len(results) == len(cfg.source))
    made = report.make(results, identity=identity, sampling=wire_sampling(cfg.sampling), seed=cfg.seed)
    report.write(ctx.run_dir, made, results)
    logger.info(f"report: {ctx.run_dir / report.REPORT}")
    _check(results)
    return made


async def _evaluate(
    cfg: Any,
    source: Any,
    env: Any,
    ask: tuple[Any, str],
    journal: Journal,
    pace: "_Pace",
    stop: asyncio.Event,
    recorder: Any,
) -> EnvResult:
    from rlmake.evals.runner import episode_deadline, evaluate, wire_sampling

    async def ended(record: EpisodeRecord) -> None:
        pace.controller.completed(pace.inflight, record.output_tokens)
        await journal.add(record)

    return await evaluate(
        env,
        *ask,
        group_size=source.group_size,
        sampling=wire_sampling(source.sampling),
        seed=cfg.seed,
        max_inflight=lambda: pace.controller.max_inflight,
        deadline=episode_deadline(source.env),
        stop=stop,
        done=journal.of(env.name, [env.task(index).key for index in range(env.num_tasks())], source.group_size),
        on_episode=ended,
        on_inflight=pace.note,
        recorder=recorder,
    )


def _journal(cfg: Any, ctx: RunContext, handles: Sequence[Any]) -> Journal:
    """The records on disk, opened. Raises `UserError` for a taskset without an end."""
    from rlmake.config import semantic_part

    planned = {}
    for source, env in zip(cfg.source, handles, strict=True):
        if (tasks := env.num_tasks()) is None:
            raise UserError(f"env {env.name!r}: its tasks have no end; say how many with select.limit")
        planned[env.name] = (tasks, source.group_size)
    journal = Journal(ctx.run_dir, cfg.ckpt, planned)
    journal.open(semantic_part(cfg), cfg.resume)
    return journal


class _Pace:
    """How many episodes may run, and how many do."""

    def __init__(self, controller: Controller):
        self.controller, self.inflight = controller, 0

    def note(self, inflight: int) -> None:
        self.inflight = inflight


@contextlib.asynccontextmanager
async def _steered(cfg: Any, base_url: str) -> AsyncIterator[_Pace]:
    """The number of episodes in flight, pinned or steered by the engine's load; nothing is ever cancelled for it."""
    from rlmake.evals.engine import roots

    bounds = cfg.concurrency
    pace = _Pace(Controller(bounds.min_inflight, bounds.max_inflight, bounds.initial_inflight))
    if pace.controller.pinned:
        yield pace
        return
    clients = roots(cfg.client, base_url)
    reader, steering = LoadReader(clients), None
    try:
        pace.controller.poll(await require(reader, "concurrency"), 0)
        steering = asyncio.create_task(
            steer(pace.controller, reader, lambda: pace.inflight, lambda excess: asyncio.sleep(0))
        )
        yield pace
    finally:
        if steering is not None:
            steering.cancel()
            await asyncio.gather(steering, return_exceptions=True)
        await asyncio.gather(*(client.aclose() for client in clients))


def _stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM and SIGINT: what is done by then goes into a report that is marked partial."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _check(results: Sequence[EnvResult]) -> None:
    """An evaluation that was stopped, or of which nothing worked, has failed, although its report is there."""
    for result in results:
        if result.partial:
            raise RunFailed(f"stopped: {len(result.records)} of {result.planned} episodes of {result.env} have ended")
        errors = [record.error for record in result.records if record.error is not None]
        if len(errors) == result.planned:
            raise RunFailed(f"all {len(errors)} episodes of {result.env} failed, the last with {errors[-1]}")


async def _connect(cfg: Any, ctx: RunContext, base_url: str, run_id: str | None) -> tuple[list[Any], str]:
    """The handles of all sources and the model's name at the engine, waited for together."""
    from rlmake.envs.address import address_file
    from rlmake.envs.client import EnvHandle
    from rlmake.evals.engine import await_model

    def address(source: Any) -> str | Path:
        return source.serve.address or address_file(ctx, "eval", source.name)

    connecting = [EnvHandle.connect(source, address(source), run_id=ctx.run_id) for source in cfg.source]
    wanted = cfg.model
    if cfg.inference is not None:
        wanted = cfg.inference.vllm.served_model_name or cfg.inference.vllm.model
    model, *handles = await asyncio.gather(await_model(cfg.client, base_url, wanted, run_id), *connecting)
    return handles, model


if __name__ == "__main__":
    main()
