"""The comparison of trainer and engine on this host: for each type an engine and who asks it, then the trainer's side.

One after the other, so GPUs are used by one of them at a time.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.config.parity import DTYPES, Run, engine_of, pairs_of, trainer_of
from rlmake.core.rundir import RunContext
from rlmake.launch import rundir
from rlmake.launch.components import Components
from rlmake.launch.interpreter import check_python
from rlmake.launch.placement import TRAINER_DEFAULTS, environment, gpu_ids
from rlmake.launch.progress import Display
from rlmake.launch.supervise import Supervisor, kill_leftovers
from rlmake.launch.train import open_attempt
from rlmake.parity.order import Order


def run(
    cfg: Run,
    model: Path,
    out: Path,
    *,
    identity: Mapping[str, Any],
    argv: Sequence[str],
    files: Sequence[Path],
    fingerprint: str,
) -> None:
    """Compare trainer and engine of `cfg` on the weights in the folder `model`, and leave report.json in `out`.

    `identity` goes into the report: run, fingerprint, step and content of the model. Raises as `train.run` does.
    """
    out = Path(out).resolve()
    name = str(identity["run"])
    with rundir.Held(out):
        kill_leftovers(out)
        check_python(engine_of(cfg))
        attempt, ctx = open_attempt("parity", out, argv, files, fingerprint, name)
        order = Order(cfg, model, out, dict(identity))
        file = attempt.write_resolved("parity", order.to_json())
        sink = logger.add(ctx.log_dir / "launcher.log", level="DEBUG")
        try:
            logger.info(f"parity of {name} starts, attempt {attempt.number}; logs: {ctx.log_dir}")
            with Display(name, ctx.log_dir / "score.log", 0, None, brief=True) as display:
                pairs, _ = pairs_of(cfg)
                for dtype in DTYPES:
                    if any(dtype == one for one, _ in pairs):
                        _ask(Components(ctx, attempt), cfg, model, dtype, file)
                with Supervisor() as supervisor:
                    _start(supervisor, ctx, cfg, "score", [file])
                    supervisor.wait(display.tick)
        finally:
            logger.remove(sink)
            shutil.rmtree(out / "answers", ignore_errors=True)


def _ask(components: Components, cfg: Run, model: Path, dtype: str, file: Path) -> None:
    engine = engine_of(cfg, str(model), dtype)
    gpus = engine.gpus_per_engine if engine.device == "cuda" else 0
    with Supervisor() as supervisor:
        address = components.start_inference(supervisor, engine, gpus, f"inference-{dtype}")
        url = components.await_inference(supervisor, address)
        _start(supervisor, components.ctx, cfg, "ask", [file, dtype, url])
        supervisor.wait()


def _start(supervisor: Supervisor, ctx: RunContext, cfg: Run, what: str, arguments: list[Any]) -> None:
    """Start a process of `rlmake.parity`; the trainer's environment, its GPU for the one that scores."""
    trainer = trainer_of(cfg)
    gpus = gpu_ids(1) if what == "score" and trainer.device == "cuda" else []
    env = environment(ctx, TRAINER_DEFAULTS, trainer.env_vars, gpus=gpus, threads=None if gpus else trainer.cpu_threads)
    command = [sys.executable, "-m", f"rlmake.parity.{what}", "@", *map(str, arguments)]
    supervisor.start(what, command, env, ctx.log_dir / f"{what}.log", final=True)
