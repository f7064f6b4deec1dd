"""Which runs there are below the output directories, and what can be said of each at a glance."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.core.rundir import file_monitor_dir, numbered
from rlmake.dashboard.confine import NotThere
from rlmake.monitors.file import METRICS
from rlmake.monitors.traces import layout

MARKS = ("configs", "logs", "monitors", "traces.jsonl")
DEPTH = 6  # folders between an output directory and a run
ACTIVE_SECONDS = 90.0
TAIL_BYTES = 1 << 20
RESCAN_SECONDS = 2.0


@dataclass(frozen=True)
class Run:
    """`id` is what addresses it; `folder` where its name is, `work` where its files are (in a build: in the store)."""

    id: str
    name: str
    output_dir: Path
    folder: Path
    work: Path

    @property
    def monitor(self) -> Path:
        return file_monitor_dir(self.work)

    @property
    def metrics(self) -> Path:
        return self.monitor / METRICS

    @property
    def traces(self) -> Path:
        return self.monitor / layout.FOLDER


class Runs:
    """All runs below the directories that `dirs` gives, looked up again at most every two seconds."""

    def __init__(self, dirs: Callable[[], list[Path]]):
        self._dirs = dirs
        self._found: dict[str, Run] = {}
        self._scanned = -RESCAN_SECONDS
        self._steps: dict[Path, tuple[int, int | None]] = {}

    @property
    def dirs(self) -> list[Path]:
        return [Path(folder).absolute() for folder in self._dirs()]

    def all(self) -> dict[str, Run]:
        if time.monotonic() - self._scanned > RESCAN_SECONDS:
            self._found = {run.id: run for run in self._scan()}
            self._scanned = time.monotonic()
        return self._found

    def get(self, identity: str) -> Run:
        """Raises `NotThere`."""
        run = self._found.get(identity) or self.all().get(identity)
        if run is None:
            raise NotThere(identity)
        return run

    def _scan(self) -> Iterator[Run]:
        seen: dict[str, Path] = {}
        for output in self.dirs:
            for folder, work in _below(output, output, 0):
                name = folder.relative_to(output).as_posix() if folder != output else output.name
                identity = name if seen.setdefault(name, output) == output else f"{output.name}:{name}"
                if seen.setdefault(identity, output) != output:  # two output directories of one name
                    identity = f"{output.as_posix()}:{name}"
                yield Run(identity, name, output, folder, work)

    def meta(self, run: Run) -> dict[str, Any]:
        """What the list shows of a run. Reads little: names, times, the end of the metrics."""
        attempt, resolved = _resolved(run.work)
        kind = _kind(resolved, run.work)
        config = _load(resolved / {"sft": "sft.json", "eval": "eval.json"}.get(kind, "orchestrator.json"))
        if kind == "rl" and not config:
            config = _load(resolved / "trainer.json")
        updated, created = _times(run)
        max_steps = config.get("max_steps") if isinstance(config.get("max_steps"), int) else None
        last = self._last_step(run.metrics)
        return {
            "id": run.id,
            "name": run.name,
            "output_dir": str(run.output_dir),
            "type": kind,
            "attempt": attempt,
            "model": _published(_model(config, kind), run.work),
            "train_envs": _names(config, "train"),
            "eval_envs": _names(config, "eval") or _names({"eval": config}, "eval"),
            "dataset": (config.get("data") or {}).get("name") if isinstance(config.get("data"), dict) else None,
            "has_validation": bool(config.get("val")),
            "max_steps": max_steps,
            "last_step": last,
            "has_metrics": run.metrics.is_file(),
            "has_traces": layout.index(run.traces).is_file(),
            "eval_plan": _load(layout.plan(run.traces)) or None,
            "state": _state(run, kind, last, max_steps, updated),
            "created": created,
            "updated": updated,
        }

    def _last_step(self, path: Path) -> int | None:
        """The last step in the last lines of a metrics file."""
        try:
            size = path.stat().st_size
        except OSError:
            return None
        if path in self._steps and self._steps[path][0] == size:
            return self._steps[path][1]
        with open(path, "rb") as file:
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")[-8:]
        steps = [row["step"] for line in lines if isinstance(row := _json(line), dict) and _is_step(row)]
        self._steps[path] = (size, max(steps, default=self._steps.get(path, (0, None))[1]))
        return self._steps[path][1]


def _is_step(row: dict[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and row.get("producer") != "launcher"


def _below(output: Path, folder: Path, depth: int) -> Iterator[tuple[Path, Path]]:
    """`(folder of the name, folder of the files)` of every run at or below `folder`."""
    if work := _work(output, folder):
        yield folder, work
        inner = [folder / "evals"]
    elif depth < DEPTH:
        inner = [folder]
    else:
        return
    for place in inner:
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                if work := _linked_run(output, path):
                    yield path, work
            elif entry.is_dir(follow_symlinks=False):
                yield from _below(output, path, depth + 1)


def _work(output: Path, folder: Path) -> Path | None:
    """Where the files of the run at `folder` are: there, or in the store its `configs` or `logs` link into."""
    for mark in MARKS:
        path = folder / mark
        if path.is_symlink():
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError):
                continue
            if target.name == mark and _in_store(output, target.parent):
                return target.parent
        elif path.exists() and folder.name not in MARKS:
            return folder
    return None


def _linked_run(output: Path, link: Path) -> Path | None:
    """A link that is a run itself, as evaluations are: only into the store of its own output directory."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    if _in_store(output, target) and any((target / mark).exists() for mark in MARKS):
        return target
    return None


def _in_store(output: Path, folder: Path) -> bool:
    return folder.parent == (output / ".store").resolve()


def _resolved(work: Path) -> tuple[int | None, Path]:
    """The newest attempt and its resolved configurations."""
    attempts = numbered(work / "configs", "attempt")
    newest = max(attempts, default=None)
    return newest, (attempts[newest] if newest is not None else work / "configs") / "resolved"


def _kind(resolved: Path, work: Path) -> str:
    for kind, names in (("sft", ["sft.json"]), ("rl", ["orchestrator.json", "trainer.json"]), ("eval", ["eval.json"])):
        if any((resolved / name).is_file() for name in names):
            return kind
    return "eval" if work.name.startswith("eval-") else "other"


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _load(path: Path, limit: int = 8 << 20) -> dict[str, Any]:
    """A JSON object; {} for a file that is missing, broken, too large or something else."""
    try:
        if path.stat().st_size > limit:
            return {}
        found = _json(path.read_bytes())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _model(config: dict[str, Any], kind: str) -> str | None:
    model = config.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    if kind == "eval" and not name:
        name = ((config.get("inference") or {}).get("vllm") or {}).get("model")
    return name if isinstance(name, str) else None


def _published(model: str | None, work: Path) -> str | None:
    """A model in a store by the name under which the run was given it, where that is on record."""
    if model is None or "/.store/" not in model:
        return model
    spec = _load(work / "spec.json")
    stage, _, fingerprint = model.partition("/.store/")[2].partition("/")[0].rpartition("-")
    for parent in spec.get("parents") or ():
        if (parent.get("stage"), parent.get("fingerprint")) == (stage, fingerprint):
            if parent.get("ref"):
                return str(parent["ref"]).removeprefix("outputs/")
            if spec.get("runs"):  # an evaluation, which belongs to the run whose weights it looks at
                return f"{spec['runs'][0]}/weights"
    return model


def _names(config: dict[str, Any], split: str) -> list[str]:
    table = config.get(split)
    sources = table.get("source") if isinstance(table, dict) else None
    return [str(source.get("name")) for source in sources or [] if isinstance(source, dict)]


def _times(run: Run) -> tuple[float, float]:
    """When anything last moved, and when the run began (seconds since the epoch)."""
    places = [run.metrics, layout.index(run.traces), layout.live(run.traces), run.work / "configs"]
    try:
        places += list((run.work / "logs" / "latest").resolve().glob("*.log"))
    except (OSError, RuntimeError):
        pass
    times = []
    for place in places:
        try:
            times.append(place.stat().st_mtime)
        except OSError:
            continue
    attempts = numbered(run.work / "configs", "attempt")
    first = attempts[min(attempts)] if attempts else run.work
    updated = max(times, default=first.stat().st_mtime if first.exists() else 0.0)
    try:
        created = (first / "command.txt").stat().st_mtime
    except OSError:
        created = min(times, default=updated)
    return updated, created


def _state(run: Run, kind: str, last: int | None, max_steps: int | None, updated: float) -> str:
    """failed | finished | running | stopped: from records where there are any, else from what moved last."""
    if (run.work / "failure.json").is_file() or (run.work / "diverged.json").is_file():
        return "failed"
    if kind == "eval" and (run.work / "report.json").is_file():
        return "finished"
    if max_steps is not None and last is not None and last >= max_steps:
        return "finished"
    return "running" if time.time() - updated < ACTIVE_SECONDS else "stopped"
