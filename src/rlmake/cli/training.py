"""A training of the build, brought to one step: by going on, or beside the run when that step was passed unkept."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake import checkpoint
from rlmake.build import card, failure, store
from rlmake.build.store import Artefact
from rlmake.config import RLConfig, SFTConfig, parse
from rlmake.config.shared import OrchestratorCkptConfig, TrainerCkptConfig
from rlmake.core.errors import RunFailed
from rlmake.core.jsonio import hash_file, read_json
from rlmake.core.rundir import step_dir
from rlmake.launch import train
from rlmake.launch.supervise import RunDiverged


def to_step(
    spec: dict[str, Any], config: dict[str, Any], artefact: Artefact, end: int, name: str, command: list[str]
) -> dict[str, Any]:
    """Make checkpoint `artefact.step` complete and whole, by training to `end`. Returns facts for its manifest.

    Raises `RunFailed` when the run fails; one that diverged is noted as a terminal failure.
    """
    folder, step = artefact.folder, artefact.step
    assert step is not None
    there = step_dir(folder, step)
    if checkpoint.verify(there):
        reached = max([0, *(s for s in checkpoint.steps(folder) if not checkpoint.verify(step_dir(folder, s), False))])
        refuse_failed(folder, name)  # on the way to an earlier step
        try:
            if reached > step:
                _aside(spec, _config(spec, config, step), artefact, name, command)
            else:
                _run(spec, _config(spec, config, end), folder, name, command)
        except RunDiverged as error:
            noted = folder / "diverged.json"
            about = read_json(noted) if noted.is_file() else {}
            failure.record(folder, "diverged", about.get("reason", str(error)), about.get("step"))
            if checkpoint.verify(there, hashes=False):  # else what was asked for had been passed
                raise
        if faults := checkpoint.verify(there, hashes=False):
            raise RunFailed(f"{name}: the run ended, but step {step} is no whole checkpoint: {faults[0]}")
    record = checkpoint.read(there)
    return {key: record[key] for key in ("policy_version", "world_size", "ledger", "attempt")}


def stops_at(spec: dict[str, Any], step: int) -> bool:
    """Whether a training must end at a step to have a checkpoint there: it is none of its own."""
    config = spec["config"]
    table = (config.get("trainer") or config).get("ckpt") or {}
    return not table.get("interval") or step % table["interval"] != 0


def refuse_failed(folder: Path, name: str) -> None:
    """Raise `RunDiverged` where it is on record that this training failed for good."""
    if noted := failure.read(folder):
        raise RunDiverged(f"{name} {failure.describe(noted)}; it is not tried again until it is changed")


def checkpoint_files(folder: Path) -> list[dict[str, Any]]:
    """`[{path, size, blake3}]` of a complete checkpoint; the hashes of its halves are those of its own record."""
    rows = [{key: entry[key] for key in ("path", "size", "blake3")} for entry in checkpoint.read(folder)["files"]]
    beside = (path for path in folder.iterdir() if path.is_file() and not checkpoint.is_mark(path))
    for path in sorted(path for path in beside if path.name not in card.NAMES):
        rows.append({"path": path.name, "size": path.stat().st_size, "blake3": hash_file(path)})
    return sorted(rows, key=lambda row: row["path"])


def _config(spec: dict[str, Any], config: dict[str, Any], step: int) -> SFTConfig | RLConfig:
    """The configuration that ends at `step`. Where the schedule depends on `max_steps` that is left as it is, and every
    checkpoint is kept on the way, so that one at the step asked for is there in the end."""
    config = copy.deepcopy(config)
    tables = [config, *(config[key] for key in ("trainer", "orchestrator") if isinstance(config.get(key), dict))]
    for table in tables:
        if "max_steps" in table and not spec["fixed_length"]:
            table["max_steps"] = step
        if spec["fixed_length"] and table.get("ckpt"):
            table["ckpt"]["keep_last"] = table["ckpt"]["keep_interval"] = None
    if spec["kind"] == "sft":
        cfg = parse(SFTConfig, config)
        cfg.ckpt = cfg.ckpt or TrainerCkptConfig()
        return cfg
    rl = parse(RLConfig, config)
    rl.trainer.ckpt = rl.trainer.ckpt or TrainerCkptConfig()
    rl.orchestrator.ckpt = rl.orchestrator.ckpt or OrchestratorCkptConfig()
    return rl


def _run(spec: dict[str, Any], cfg: SFTConfig | RLConfig, folder: Path, name: str, command: list[str]) -> None:
    train.run(
        spec["kind"],
        cfg,
        folder,
        argv=command,
        files=[store.spec_path("train", spec["fingerprint"])],
        resume="auto",
        fingerprint=spec["fingerprint"],
        run_name=name,
    )


def _aside(spec: dict[str, Any], cfg: SFTConfig | RLConfig, artefact: Artefact, name: str, command: list[str]) -> None:
    """Make a step that the run has passed, in a directory of its own, from the newest checkpoint before it. Where the
    schedule depends on `max_steps` that goes on to the end."""
    assert artefact.step is not None
    folder, aside = artefact.folder, artefact.folder / "aside" / f"step_{artefact.step}"
    before = checkpoint.newest(folder, upto=artefact.step - 1)
    logger.info(f"{name}: step {artefact.step} was passed and not kept, it is made again behind step {before or 0}")
    if before is not None and not step_dir(aside, before).exists():
        aside.mkdir(parents=True, exist_ok=True)
        shutil.copytree(step_dir(folder, before), step_dir(aside, before), copy_function=os.link)
    _run(spec, cfg, aside, name, command)
    there = step_dir(folder, artefact.step)
    if there.exists():
        shutil.rmtree(there)
    os.rename(step_dir(aside, artefact.step), there)
    shutil.rmtree(aside)
