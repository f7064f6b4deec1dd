"""The experiments' view: every target with its state, why it would be made, where things come from, grids as tables.

It is `rlmake plan` asked in a process of its own, in the project's root, so that a mistake in an experiment file or a
slow plan never touches the page's server. `python -m rlmake.dashboard.project` prints the document.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PLAN_SECONDS = 120.0
FRESH_SECONDS = 3.0
MAX_BYTES = 64 << 20


def document() -> dict[str, Any]:
    """All runs and targets of the project here. Raises `UserError`."""
    from rlmake.build import explain, plan, store
    from rlmake.build.registry import Registry

    registry = Registry.load()
    paths = plan.targets_of_all(registry, include_manual=True)
    needs = plan.needs(registry, paths, everything=True)
    rows = explain.document(registry, needs)["jobs"]
    making = {row["target"]: row for row in rows if not row["rule"].startswith("publish")}
    linking = {row["target"]: row for row in rows if row["rule"].startswith("publish")}
    runs = []
    for run in registry.runs.values():
        work = registry.work(run.name)
        runs.append(
            {
                "name": run.name, "file": run.file, "kind": run.kind, "grid": run.grid, "manual": run.manual,
                "cell": run.cell and {"texts": run.cell.texts, "baseline": run.cell.baseline},
                "fingerprint": f"{work.stage}-{work.fingerprint}", "last_step": work.last_step,
                "reached": store.progress(work.artefact("checkpoint", 1).folder) if work.stage == "train" else None,
                "parents": [_parent(parent, registry) for parent in work.parents],
                "failed": needs.failed.get(run.name), "evals": list(run.evals), "scores": scores(run.name),
            }
        )  # fmt: skip
    targets = []
    for path in paths:
        target = registry.target(path)
        artefact = registry.artefact(target)
        row = making.get(path) or linking.get(path) or next((r for r in rows if r["target"] == path), None)
        targets.append(
            {
                "path": path, "run": target.run, "kind": target.kind,
                "state": _state(path, artefact, needs, row, target.run),
                "reason": row and row["reason"], "changes": row["changes"] if row else [],
                "reuses": row["reuses"] if row else [],
            }
        )  # fmt: skip
    return {"runs": runs, "targets": targets, "jobs": rows, "at": time.time()}


def _state(path: str, artefact: Any, needs: Any, row: dict[str, Any] | None, run: str) -> str:
    """ready | stale | missing | running | failed | not asked for."""
    from rlmake.build import store

    if run in needs.failed and artefact not in needs.whole:
        return "failed"
    if artefact in needs.whole and row is None:
        return "ready"
    if _leased(artefact.folder):
        return "running"
    if row is None:
        return "ready" if os.path.lexists(path) and store.finished(artefact) else "missing"
    return "stale" if os.path.lexists(path) or row["changes"] else "missing"


def _leased(folder: Path) -> bool:
    """Whether somebody works there now: a lease whose beat is recent by this machine's clock."""
    for path in sorted(folder.glob("lease-*.json"))[-1:]:
        try:
            record = json.loads(path.read_bytes())
            return not record.get("released") and time.time() - path.stat().st_mtime < 60
        except (OSError, ValueError):
            continue
    return False


def _parent(parent: dict[str, Any], registry: Any) -> dict[str, Any]:
    names = [run.name for run in registry.runs.values() if registry.work(run.name).fingerprint == parent["fingerprint"]]
    return {
        **{key: parent[key] for key in ("role", "stage", "fingerprint", "step", "kind", "ref")},
        "run": names[0] if names else None,
    }


def scores(run: str) -> dict[str, Any]:
    """`{suite/env: {mean, ci95, episodes}}` from the reports of a run's evaluations."""
    found: dict[str, Any] = {}
    for path in sorted((Path("outputs") / run / "evals").glob("*/report.json")):
        try:
            report = json.loads(path.read_bytes())
            for env, entry in report["envs"].items():
                found[f"{path.parent.name}/{env}"] = {**entry["reward"], "episodes": entry["num_episodes"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


class Project:
    """The document of the project at `root`, made anew when something in it has changed and somebody asks."""

    def __init__(self, root: Path):
        self.root = root
        self._document: dict[str, Any] | None = None
        self._fault: str | None = None
        self._mark: Any = None
        self._checked = -FRESH_SECONDS
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def there(self) -> bool:
        return (self.root / "Snakefile").is_file() and (self.root / "experiments").is_dir()

    def state(self, wait: float = 0.2, force: bool = False) -> dict[str, Any]:
        """`{root, planning, fault, document}`; the document is the last one while a new one is worked out."""
        if not self.there:
            return {"root": str(self.root), "planning": False, "document": None,
                    "fault": f"no project at {self.root}: it has no Snakefile and experiments/"}  # fmt: skip
        with self._lock:
            idle = self._thread is None or not self._thread.is_alive()
            if idle and (force or time.monotonic() - self._checked > FRESH_SECONDS):
                self._checked, mark = time.monotonic(), self._signature()
                if force or mark != self._mark:
                    self._thread = threading.Thread(target=self._plan, args=(mark,), name="plan", daemon=True)
                    self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(wait)
        planning = thread is not None and thread.is_alive()
        return {"root": str(self.root), "planning": planning, "fault": self._fault, "document": self._document}

    def _signature(self) -> Any:
        """Times of what a plan reads: experiment files, and the store's folders and manifests."""
        marks = []
        for place, pattern in (
            ("experiments", "**/*.toml"),
            ("outputs/.store", "*"),
            ("outputs/.store", "*/manifests"),
            ("outputs/.store", "*/done.json"),
            ("outputs/.store", "*/lease-*.json"),
        ):
            for path in sorted((self.root / place).glob(pattern)):
                try:
                    stat = path.stat()
                    marks.append((str(path), stat.st_mtime_ns if "lease" not in path.name else 0))
                except OSError:
                    continue
        return hash(tuple(marks))

    def _plan(self, mark: Any) -> None:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "rlmake.dashboard.project"],
                cwd=self.root,
                capture_output=True,
                timeout=PLAN_SECONDS,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode == 0 and len(done.stdout) < MAX_BYTES:
                self._document, self._fault = json.loads(done.stdout[done.stdout.rindex(b"\n{") + 1 :]), None
            else:
                self._fault = (
                    done.stderr.decode("utf-8", "replace")[-4000:].strip()
                    or f"the plan ended with exit code {done.returncode}"
                )
        except subprocess.TimeoutExpired:
            self._fault = f"the plan took longer than {PLAN_SECONDS:.0f} s"
        except (OSError, ValueError) as error:
            self._fault = f"the plan gave no document: {error}"
        self._mark = mark


def main() -> None:
    from rlmake.core.errors import entry_point

    def run() -> int:
        found = document()
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return 0

    entry_point(run)()


if __name__ == "__main__":
    main()
