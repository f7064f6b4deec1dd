"""Moments of a run at which it is killed, and the hook that kills it there.

A moment is a call of a function of rlmake: the `call`-th in a process, and `delay` seconds into it. Everything of the
run gets SIGKILL from within, the process itself last. Nothing in rlmake knows of this: functions are wrapped when their
module has been imported.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

MARK, PLAN = "RLMAKE_SOAK_RUN", "RLMAKE_SOAK_KILL"


@dataclass(frozen=True)
class Moment:
    """`target`: `module:attribute`. Calls count from 1; `calls` and `seconds` are the most that may be drawn."""

    kind: str
    target: str
    calls: int
    seconds: float

    def draw(self, rng: random.Random) -> "Kill":
        return Kill(self.kind, self.target, rng.randint(1, self.calls), rng.uniform(0, self.seconds))


@dataclass(frozen=True)
class Kill:
    kind: str
    target: str
    call: int
    delay: float

    def __str__(self) -> str:
        return f"{self.kind}, call {self.call} of {self.target.rpartition(':')[2]}, {self.delay * 1000:.0f} ms into it"


def environment(kill: Kill | None, run: str) -> dict[str, str]:
    """Variables with which a process and its children install the hook (`sitecustomize.py` beside this file)."""
    found = {MARK: run, "PYTHONPATH": f"{Path(__file__).parent / 'hook'}:{os.environ.get('PYTHONPATH', '')}"}
    return found | ({PLAN: json.dumps(asdict(kill))} if kill else {})


def members(run: str) -> list[int]:
    """Processes that bear the mark of the run."""
    mark, found = f"{MARK}={run}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_all() -> None:
    """SIGKILL to everything that bears this process's mark, itself last."""
    own = os.getpid()
    for pid in members(os.environ[MARK]) if MARK in os.environ else []:
        if pid != own:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    os.kill(own, signal.SIGKILL)


def wrap(module: object, kill: Kill) -> None:
    """Put the hook around the function, in its module or class."""
    owner, _, name = kill.target.partition(":")[2].rpartition(".")
    place = getattr(module, owner) if owner else module
    function, calls = getattr(place, name), []

    @functools.wraps(function)
    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == kill.call:
            timer = threading.Timer(kill.delay, kill_all)
            timer.daemon = True
            timer.start()
        return function(*args, **kwargs)

    setattr(place, name, counted)


def install(kill: Kill) -> None:
    """Wrap the function now if its module is there, else as soon as it has been imported."""
    wanted = kill.target.partition(":")[0]
    if wanted in sys.modules:
        wrap(sys.modules[wanted], kill)
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != wanted:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                wrap(module, kill)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
