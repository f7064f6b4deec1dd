"""What the server keeps in memory of each run, and lets go of again."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlmake.dashboard.episodes import Episodes
from rlmake.dashboard.metrics import Metrics
from rlmake.dashboard.project import Project
from rlmake.dashboard.run import Run
from rlmake.dashboard.runs import Runs
from rlmake.dashboard.transcript import Records
from rlmake.dashboard.view import Hub

KEEP_SECONDS = 900.0
MOST_RUNS = 24


class State:
    """Followers by file, made when first asked for. The least used go when there are many or they were long unused."""

    def __init__(self, dirs: Callable[[], list[Path]]):
        self.runs, self.hub = Runs(dirs), Hub()
        self._projects: dict[Path, Project] = {}
        self._lock = threading.Lock()
        self._metrics: dict[Path, Metrics] = {}
        self._episodes: dict[Path, tuple[Episodes, Records]] = {}

    def projects(self) -> list[Project]:
        """Of every directory called `outputs`: the project that it belongs to."""
        roots = [folder.parent for folder in self.runs.dirs if folder.name == "outputs"]
        return [self._projects.setdefault(root, Project(root)) for root in dict.fromkeys(roots)]

    def metrics(self, run: Run) -> Metrics:
        with self._lock:
            if run.metrics not in self._metrics:
                self._metrics[run.metrics] = Metrics(run.metrics, run.reach)
                self._forget()
            return self._metrics[run.metrics]

    def episodes(self, run: Run) -> Episodes:
        return self._of(run)[0]

    def records(self, run: Run) -> Records:
        return self._of(run)[1]

    def _of(self, run: Run) -> tuple[Episodes, Records]:
        with self._lock:
            if run.traces not in self._episodes:
                self._episodes[run.traces] = (Episodes(run.traces, run.reach), Records(run.traces, run.reach))
                self._forget()
            return self._episodes[run.traces]

    def _forget(self) -> None:
        now = time.monotonic()
        for kept, used in ((self._metrics, lambda one: one.used), (self._episodes, lambda pair: pair[0].used)):
            order = sorted(kept, key=lambda key: used(kept[key]))
            for place, key in enumerate(order):
                if now - used(kept[key]) > KEEP_SECONDS or len(order) - place > MOST_RUNS:
                    del kept[key]
