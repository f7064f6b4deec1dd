"""Which runs there are below the output directories, and what can be said of each at a glance."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlmake.core.rundir import numbered
from rlmake.dashboard import confine
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.run import CONFIGS, Run, load, parsed, table
from rlmake.monitors.rows import LAUNCHER
from rlmake.monitors.traces import layout

MARKS = ("configs", "logs", "monitors", "traces.jsonl")
DEPTH = 6  # folders between an output directory and a run
ACTIVE_SECONDS = 90.0
TAIL_BYTES, TAIL_LINES = 1 << 20, 24
MOST_SECONDS = 1 << 40  # since the epoch
RESCAN_SECONDS = 2.0
MOVING = ("running", "broken")  # states that are looked at anew each time
Progress = tuple[int | None, float | None]
Stamp = tuple[int, int, int, int] | None  # what changes with a file; None: it is not there


class Runs:
    """All runs below the directories that `dirs` gives. The list is looked up anew at most every two seconds, and
    whenever a run is asked for that is not on it: it may have been made this moment."""

    def __init__(self, dirs: Callable[[], list[Path]]):
        self._dirs = dirs
        self._found: dict[str, Run] = {}
        self._scanned = -RESCAN_SECONDS
        self._steps: dict[Path, tuple[int, Progress]] = {}
        self._kept: dict[Run, tuple[list[Path], list[Stamp], dict[str, Any]]] = {}

    @property
    def dirs(self) -> list[Path]:
        return [Path(folder).absolute() for folder in self._dirs()]

    def all(self) -> dict[str, Run]:
        if time.monotonic() - self._scanned > RESCAN_SECONDS:
            self._look()
        return self._found

    def _look(self) -> dict[str, Run]:
        self._found = {run.id: run for run in self._scan()}
        self._scanned = time.monotonic()
        there = set(self._found.values())
        self._kept = {run: kept for run, kept in list(self._kept.items()) if run in there}
        return self._found

    def known(self, identity: str) -> bool:
        return identity in self._found or identity in self._look()

    def get(self, identity: str) -> Run:
        """Raises `NotThere`."""
        run = self._found.get(identity) or self._look().get(identity)
        if run is None:
            raise NotThere(identity)
        return run

    def _scan(self) -> Iterator[Run]:
        seen: dict[str, Path] = {}
        for output in self.dirs:
            for folder, work in _below(output, output, 0):
                name = folder.relative_to(output).as_posix() if folder != output else output.name
                name = os.fsencode(name).decode("utf-8", "replace")  # bytes that are no text can be in no address
                identity = name if seen.setdefault(name, output) == output else f"{output.name}:{name}"
                if seen.setdefault(identity, output) != output:  # two output directories of one name
                    identity = f"{output.as_posix()}:{name}"
                yield Run(identity, name, output, folder, work)

    def meta(self, run: Run) -> dict[str, Any]:
        """What the list shows of a run; of one that can't be looked at, why (`error`). Never raises.

        Of a run at rest it is what was found before, unless a file that it was found in has changed: pages ask
        every few seconds, and there may be hundreds of runs.
        """
        paths, stamps, facts = self._kept.get(run, ([], [], nothing_of(run)))
        if facts["state"] not in MOVING and stamps == [_stamp(path) for path in paths]:
            return facts
        try:
            paths = _sources(run)
            stamps = [_stamp(path) for path in paths]
            facts = nothing_of(run) | self._facts(run)
        except Exception as error:  # one run of many: whatever is wrong with it is said in its row
            words = " ".join(str(error).split())[:300]
            return nothing_of(run) | {"error": f"{type(error).__name__}: {words}"}
        self._kept[run] = (paths, stamps, facts)
        return facts

    def _facts(self, run: Run) -> dict[str, Any]:
        """Reads little: names, times, the end of the metrics."""
        attempt, resolved = run.resolved
        kind = _kind(run, resolved)
        file = resolved / {"sft": "sft.json", "eval": "eval.json"}.get(kind, "orchestrator.json")
        config = run.load(file)
        if kind == "rl" and not config:
            config = run.load(resolved / "trainer.json")
        updated, created = _times(run)
        max_steps = config.get("max_steps") if _whole(config.get("max_steps")) else None
        done, pace = self._progress(run)
        last = done or _kept_step(run)
        faults = [run.elsewhere]
        if not config and _is_file(file, run.roots):
            faults.append(f"{file.name}: no configuration can be read there")
        if faults[0] is None:
            faults += [confine.fault(path, run.reach) for path in (run.metrics, layout.index(run.traces))]
        return {
            "type": kind,
            "attempt": attempt,
            "model": _published(_model(config, kind), run),
            "train_envs": _names(config, "train"),
            "eval_envs": _names(config, "eval") or _names({"eval": config}, "eval"),
            "dataset": table(config, "data").get("name"),
            "has_validation": bool(config.get("val")),
            "max_steps": max_steps,
            "last_step": last,
            "left": pace * max(0, max_steps - last) if pace and done and max_steps is not None else None,
            "has_metrics": _is_file(run.metrics, run.reach),
            "has_traces": _is_file(layout.index(run.traces), run.reach),
            "eval_plan": load(layout.plan(run.traces), run.reach) or None,
            "state": _state(run, kind, last, max_steps, updated),
            "created": created,
            "updated": updated,
            "error": "; ".join(fault for fault in faults if fault) or None,
        }

    def _progress(self, run: Run) -> "Progress":
        """`(last step, seconds a step)` of the newest attempt in the last lines of a metrics file."""
        path = run.metrics
        try:
            with confine.opened(path, run.reach) as file:
                size = file.seek(0, os.SEEK_END)
                if path in self._steps and self._steps[path][0] == size:
                    return self._steps[path][1]
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).split(b"\n")[-TAIL_LINES:]
        except OSError:
            return None, None
        rows = [row for line in lines if isinstance(row := parsed(line), dict) and _whole(row.get("step"))]
        newest = max(map(_attempt, rows), default=1)  # what an earlier one did behind its checkpoint is done anew
        rows = [row for row in rows if _attempt(row) == newest]
        times = {row["step"]: row["time"] for row in rows if row.get("producer") != LAUNCHER and _moment(row)}
        first, last = min(times, default=0), max(times, default=0)
        pace = max(0.0, times[last] - times[first]) / (last - first) if last > first else None
        steps = [row["step"] for row in rows if row.get("producer") != LAUNCHER or row["step"]]
        known = self._steps.get(path, (0, (None, None)))[1]
        self._steps[path] = (size, (max(steps), pace) if steps else known)
        return self._steps[path][1]


def nothing_of(run: Run) -> dict[str, Any]:
    """What is said of a run before it is looked at."""
    return {
        "id": run.id, "name": run.name, "output_dir": str(run.output_dir), "type": "other", "attempt": None,
        "model": None, "train_envs": [], "eval_envs": [], "dataset": None, "has_validation": False,
        "max_steps": None, "last_step": None, "left": None, "has_metrics": False, "has_traces": False,
        "eval_plan": None, "state": "broken", "created": 0.0, "updated": 0.0, "error": None,
    }  # fmt: skip


def _sources(run: Run) -> list[Path]:
    """The files and folders that the facts of a run come from."""
    logs = run.attempts("logs")
    found = [run.work, run.folder, run.work / "configs", run.work / "logs", run.metrics, layout.index(run.traces)]
    found += [run.resolved[1], *(run.resolved[1] / name for name in CONFIGS), layout.plan(run.traces)]
    return found + (sorted(logs[max(logs)].glob("*.log")) if logs else [])


def _stamp(path: Path) -> "Stamp":
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _whole(value: Any) -> bool:
    """A whole number that a page can hold without losing digits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 53


def _attempt(row: dict[str, Any]) -> int:
    return row["attempt"] if _whole(row.get("attempt")) else 1


def _moment(row: dict[str, Any]) -> bool:
    return isinstance(row.get("time"), int | float) and 0 < row["time"] < MOST_SECONDS


def _is_file(path: Path, roots: tuple[Path, ...]) -> bool:
    try:
        return bool(confine.regular(path, roots))
    except OSError:
        return False


def _below(output: Path, folder: Path, depth: int) -> Iterator[tuple[Path, Path]]:
    """`(folder of the name, folder of the files)` of every run at or below `folder`."""
    if work := _work(output, folder):
        yield folder, work
        inner = [] if os.path.islink(folder / "evals") else [folder / "evals"]
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
            if not entry.name.startswith("."):
                yield from _at(output, entry, depth)


def _at(output: Path, entry: os.DirEntry[str], depth: int) -> Iterator[tuple[Path, Path]]:
    path = Path(entry.path)
    try:
        linked, folder = entry.is_symlink(), entry.is_dir(follow_symlinks=False)
    except OSError:
        return
    if linked:
        if work := _linked_run(output, path):
            yield path, work
    elif folder:
        yield from _below(output, path, depth + 1)


def _work(output: Path, folder: Path) -> Path | None:
    """Where the files of the run at `folder` are: there, or in the store its `configs` or `logs` link into."""
    for mark in MARKS:
        path = folder / mark
        if os.path.islink(path):  # False for what may not be looked at
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError):
                continue
            if target.name == mark and _in_store(output, target.parent):
                return target.parent
        elif os.path.exists(path) and folder.name not in MARKS:
            return folder
    return None


def _linked_run(output: Path, link: Path) -> Path | None:
    """A link that is a run itself, as evaluations are: only into the store of its own output directory."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    if _in_store(output, target) and any(os.path.exists(target / mark) for mark in MARKS):
        return target
    return None


def _in_store(output: Path, folder: Path) -> bool:
    return folder.parent == (output / ".store").resolve()


def _kind(run: Run, resolved: Path) -> str:
    for kind, names in (("sft", ["sft.json"]), ("rl", ["orchestrator.json", "trainer.json"]), ("eval", ["eval.json"])):
        if any(_is_file(resolved / name, run.roots) for name in names):
            return kind
    return "eval" if run.work.name.startswith("eval-") else "other"


def _model(config: dict[str, Any], kind: str) -> str | None:
    model = config.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    if kind == "eval" and not name:
        name = table(table(config, "inference"), "vllm").get("model")
    return name if isinstance(name, str) else None


def _published(model: str | None, run: Run) -> str | None:
    """A model in a store by the name under which the run was given it, where that is on record."""
    if model is None or "/.store/" not in model:
        return model
    spec = run.load(run.work / "spec.json")
    stage, _, fingerprint = model.partition("/.store/")[2].partition("/")[0].rpartition("-")
    parents = spec.get("parents")
    for parent in parents if isinstance(parents, list) else ():
        if isinstance(parent, dict) and (parent.get("stage"), parent.get("fingerprint")) == (stage, fingerprint):
            if parent.get("ref"):
                return str(parent["ref"]).removeprefix("outputs/")
            runs = spec.get("runs")
            if isinstance(runs, list) and runs:  # an evaluation, which belongs to the run whose weights it looks at
                return f"{runs[0]}/weights"
    return model


def _names(config: dict[str, Any], split: str) -> list[str]:
    sources = table(config, split).get("source")
    return [str(one.get("name")) for one in (sources if isinstance(sources, list) else ()) if isinstance(one, dict)]


def _times(run: Run) -> tuple[float, float]:
    """When anything last moved, and when the run began (seconds since the epoch)."""
    places = [run.metrics, layout.index(run.traces), layout.live(run.traces), run.work / "configs"]
    logs = run.attempts("logs")
    if logs:
        places += logs[max(logs)].glob("*.log")
    times = []
    for place in places:
        try:
            times.append(place.stat().st_mtime)
        except OSError:
            continue
    attempts = run.attempts("configs")
    first = attempts[min(attempts)] if attempts else run.work
    updated = max(times, default=first.stat().st_mtime if first.exists() else 0.0)
    try:
        created = (first / "command.txt").stat().st_mtime
    except OSError:
        created = min(times, default=updated)
    return updated, created


def _kept_step(run: Run) -> int | None:
    """The newest complete checkpoint: what is known of the progress of a run without the file monitor."""
    try:
        steps = reversed(numbered(run.work / "checkpoints").items())
    except OSError:  # no right to look
        return None
    return next((step for step, folder in steps if _is_file(folder / "COMPLETE", run.reach)), None)


def _state(run: Run, kind: str, last: int | None, max_steps: int | None, updated: float) -> str:
    """failed | finished | running | stopped: from records where there are any, else from what moved last."""
    if (run.work / "failure.json").is_file() or (run.work / "diverged.json").is_file():
        return "failed"
    if kind == "eval" and (run.work / "report.json").is_file():
        return "finished"
    if max_steps is not None and last is not None and last >= max_steps:
        return "finished"
    return "running" if time.time() - updated < ACTIVE_SECONDS else "stopped"
