"""The Prime Intellect platform, through its SDK: a thin layer that opens the run, hands over and closes.

Rows go up at every step, episodes that were trained on at every 10th (`EVERY`), evaluations that a training makes of
itself as evaluations. A process that leaves without `close` is reported as crashed by the SDK's own exit hook; one that
is killed is not reported at all.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.rundir import RunContext
from rlmake.monitors.base import Monitor
from rlmake.monitors.prime_evals import Evaluations
from rlmake.monitors.traces.records import Arrival, Work, trace_id, trace_name

EVERY = 10  # steps between uploads of episodes
MOST = 8192  # traces held until they ship
ATTACH, MODE = "RUN_ID", "PRIME_RUNS_MODE"


class PrimeMonitor(Monitor):
    """One run of the platform: registered, or attached to the one that `$RUN_ID` names.

    One process of a launch writes it: the orchestrator in RL, the trainer in SFT. Raises `UserError` when it can't.
    """

    def __init__(self, config: Any, producer: str, ctx: RunContext):
        runs = _sdk()
        kind = "eval" if producer == "eval" else "train"
        given: dict[str, Any] = {"kind": kind, "name": config.name or ctx.run_name, "framework": "rlmake"}
        attached = os.environ.get(ATTACH)
        if attached:
            given["id"] = attached
        else:
            given |= _described(ctx.config_dir / "resolved", kind, runs)
        if os.environ.get(MODE, "").strip().lower() != "disabled":
            given["mode"] = "online"  # the SDK would go on without a key: a monitor that was asked for must work
        try:
            self._run = runs.init(**given)
        except Exception as error:  # the SDK's own, or httpx's
            raise UserError(f"monitors.prime: {' '.join(str(error).split()) or type(error).__name__}") from None
        self._evals = None
        if kind == "train":
            shared = {key: given[key] for key in ("framework", "mode") if key in given}
            model = given.get("model") or _described(ctx.config_dir / "resolved", kind, runs)["model"]
            self._evals = Evaluations(runs, given["name"], self._run.id, shared | {"model": model})
        self.traces = Episodes(ctx.run_id, everything=kind == "eval", evals=self._evals)
        record = {"id": self._run.id, "url": self._run.url, "mode": self._run.mode, "attached": bool(attached)}
        write_json(ctx.run_dir / "monitors" / "prime" / "run.json", {"schema": 1, **record})

    def log(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key not in ("step", "time", "producer")}
        self._run.log_metrics(values, step=row["step"])
        if self._evals is not None:
            self._evals.row(row)
        self._upload()

    def _upload(self) -> None:
        if episodes := self.traces.take():
            self._run.log_episodes(episodes)

    def close(self, finished: bool = False) -> None:
        self._upload()
        if self._evals is not None:
            self._evals.close()
        if finished:
            self._run.finish()
        else:
            self._run.finish(status="crashed", error="the process ended before the run")


class Episodes:
    """Of all episodes, those to upload: the effective ones of every `EVERY`th step, or `everything`.

    What episodes become is known later than they are: they are held, up to `MOST`, until an annotation ships them.
    It has the methods of a `TraceStream`.
    """

    def __init__(self, run_id: str, everything: bool, evals: Evaluations | None = None):
        self._run_id, self._everything, self._evals = run_id, everything, evals
        self._held: OrderedDict[str, Any] = OrderedDict()  # id of a trace -> its episode
        self._due: dict[int, Any] = {}  # by identity: the traces of one episode ship together
        self._lock = threading.Lock()  # annotations may come from other threads than rows

    def arrived(self, arrival: Arrival) -> None:
        work, episode = arrival.work, arrival.episode
        if work.kind == "eval" and self._evals is not None:
            return self._evals.arrived(work, episode)
        with self._lock:
            if self._everything:
                self._due[id(episode)] = episode
            elif work.kind == "train":
                count = len(episode.traces)
                for number in range(count):
                    self._held[trace_id(self._run_id, trace_name(work.name, number, count))] = episode
                while len(self._held) > MOST:
                    self._held.popitem(last=False)

    def annotate(self, row: dict[str, Any]) -> None:
        ship = row["info"].get("ship")
        if ship is None:
            return
        with self._lock:
            episode = self._held.pop(row["trace_id"], None)
            if episode is not None and ship["step"] % EVERY == 0 and id(episode) not in self._due:
                self._due[id(episode)] = self._placed(episode, ship["step"])

    def _placed(self, episode: Any, step: int) -> Any:
        """A copy that says which step trains it: the SDK sorts by that."""
        from verifiers.v1.episode import TrainRunInfo, TrainWorkInfo

        return episode.model_copy(update={"run": TrainRunInfo(id=self._run_id, work=TrainWorkInfo(step=step))})

    def take(self) -> list[Any]:
        """The episodes that became due since the last call."""
        with self._lock:
            due, self._due = list(self._due.values()), {}
        return due

    def started(self, work: Work) -> None: ...

    def delta(self, work: Work, delta: dict[str, Any]) -> None: ...

    def dropped(self, work: Work) -> None: ...

    def planned(self, counts: dict[str, int]) -> None: ...


def _sdk() -> Any:
    try:
        import prime_runs
    except ImportError:
        raise UserError("monitors.prime: the package is missing: pip install 'rlmake[prime]'") from None
    return prime_runs


def _described(resolved: Path, kind: str, runs: Any) -> dict[str, Any]:
    """What a new run is registered with: model, environments and the resolved configuration."""
    found = {path.stem: read_json(path) for path in sorted(resolved.glob("*.json"))} if resolved.is_dir() else {}
    main = next((found[name] for name in ("orchestrator", "sft", "eval") if name in found), {})
    sources = [
        *((main.get("train") or {}).get("source") or ()),
        *((main.get("eval") or {}).get("source") or ()),
        *(main.get("source") or ()),
    ]
    model = (found.get("trainer") or main).get("model") or {}
    given: dict[str, Any] = {
        "environments": list(dict.fromkeys(str(source["name"]) for source in sources)),
        "model": model.get("name") if isinstance(model, dict) else str(model),
        "config": found,
    }
    if kind == "train":
        given["training"] = runs.TrainingSpec(max_steps=main.get("max_steps") or 0)
    return given
