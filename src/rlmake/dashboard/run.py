"""One run: where its files are, where they may lead, and its small JSON files."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.core.rundir import file_monitor_dir, numbered
from rlmake.dashboard import confine
from rlmake.monitors.file import METRICS
from rlmake.monitors.traces import layout

CONFIGS = ("orchestrator.json", "trainer.json", "sft.json", "eval.json")
MAX_JSON = 8 << 20


@dataclass(frozen=True)
class Run:
    """`id` is what addresses it; `folder` where its name is, `work` where its files are (in a build: in the store)."""

    id: str
    name: str
    output_dir: Path
    folder: Path
    work: Path

    @functools.cached_property
    def roots(self) -> tuple[Path, ...]:
        """Where its files may be after links: in the run itself, and in the store of its output directory."""
        return tuple(dict.fromkeys(path.resolve() for path in (self.work, self.folder, self.output_dir / ".store")))

    def attempts(self, what: str) -> dict[int, Path]:
        """`{attempt: folder}` below "configs" or "logs", ascending; links that lead out are left out."""
        found = {}
        try:
            folder = confine.target(self.work / what, self.roots)
            for number, path in numbered(folder, "attempt").items():
                confine.target(path, self.roots)
                found[number] = path
        except OSError:
            return found
        return found

    @functools.cached_property
    def resolved(self) -> tuple[int | None, Path]:
        """The newest attempt and the folder of its resolved configurations."""
        attempts = self.attempts("configs")
        newest = max(attempts, default=None)
        return newest, (attempts[newest] if newest is not None else self.work / "configs") / "resolved"

    def load(self, path: Path) -> dict[str, Any]:
        """A JSON object of the run; {} for a file that is missing, broken, too large or something else."""
        return load(path, self.roots)

    @functools.cached_property
    def told(self) -> Path:
        """The folder that the resolved configuration names for metrics and traces, wherever that is."""
        for name in CONFIGS:
            path = table(table(self.load(self.resolved[1] / name), "monitors"), "file").get("path")
            if isinstance(path, str) and path and "\0" not in path:
                return self.work / path
        return file_monitor_dir(self.work)

    @functools.cached_property
    def reach(self) -> tuple[Path, ...]:
        """Where metrics and traces may be after links: `roots`, and below the output directory or its project."""
        wider = [self.output_dir.resolve()]
        if (self.output_dir.parent / "Snakefile").is_file():
            wider.append(wider[0].parent)
        own = file_monitor_dir(self.work)
        if self.told == own:
            return self.roots
        try:
            place = self.told.resolve()
        except (OSError, RuntimeError):
            return self.roots
        return (*self.roots, place) if any(place.is_relative_to(folder) for folder in wider) else self.roots

    @property
    def elsewhere(self) -> str | None:
        """One line when the metrics are where they can't be followed."""
        try:
            place = self.told.resolve()
        except (OSError, RuntimeError):
            return f"metrics are written to {self.told}, which is no place"
        if self.told == file_monitor_dir(self.work) or any(place.is_relative_to(folder) for folder in self.reach):
            return None
        return f"metrics are written to {place}, outside of this run and its project (monitors.file.path)"

    @property
    def monitor(self) -> Path:
        return self.told

    @property
    def metrics(self) -> Path:
        return self.monitor / METRICS

    @property
    def traces(self) -> Path:
        return self.monitor / layout.FOLDER


def table(value: Any, key: str) -> dict[str, Any]:
    """The object under `key`; {} where there is something else."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def parsed(data: bytes) -> Any:
    """JSON, or None."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def load(path: Path, roots: Sequence[Path]) -> dict[str, Any]:
    """A JSON object; {} for a file that is missing, broken, too large or something else."""
    try:
        with confine.opened(path, roots) as file:
            data = file.read(MAX_JSON + 1)
    except OSError:
        return {}
    found = parsed(data) if len(data) <= MAX_JSON else None
    return found if isinstance(found, dict) else {}
