"""What planned jobs will take, from the measured speed of earlier builds. What is not known is said, not guessed.

A training's seconds per step are taken from, in this order: its own earlier steps; the latest trainings in the store
that are alike in everything that sets the cost (kind, GPUs, and all semantic settings but optimizer, schedule, loss,
algorithm and seed, on a model of the same origin); `experiment.seconds_per_step`. Evaluations and exports: the same
suite, the same format, on a model of the same origin.
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from rlmake.build import lease, store
from rlmake.build.fingerprint import leaves
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.build.work import Work
from rlmake.core.errors import UserError
from rlmake.core.jsonio import canonical, hash_bytes

# Settings that change the result and not the work of a step.
FREE = re.compile(
    r"(.*\.)?(optim|scheduler|loss|algo|seed|max_off_policy_steps|deterministic|max_steps|ckpt|resume)(\..*)?"
)
OF_EPISODES = re.compile(r"(.*\.)?(seed|group_size|temperature|top_p|top_k|min_p)")  # of an evaluation's
LATEST = 5  # of earlier builds that are alike so many count, by their median


class Estimates:
    """Speeds of what is in the store, read when first asked for."""

    def __init__(self, registry: Registry):
        self.registry = registry

    def of(self, artefact: Artefact, gpus: int) -> dict[str, Any]:
        """`{gpu_hours, hours, rate}` of making an artefact; see `explain.document`."""
        seconds, rate = self._train(artefact) if artefact.kind == "checkpoint" else self._other(artefact)
        hours = None if seconds is None else round(seconds / 3600, 6)
        gpu_hours = 0.0 if gpus == 0 else None if hours is None else round(hours * gpus, 6)
        return {"gpu_hours": gpu_hours, "hours": hours, "rate": rate}

    def spent(self, whole: Iterable[Artefact]) -> dict[str, float]:
        """`{gpu_hours, hours}` that went into artefacts that are there, and into all that they rest on."""
        most: dict[tuple[str, ...], tuple[float, float]] = {}
        seen: set[Artefact] = set()
        todo = list(whole)
        while todo:
            artefact = todo.pop()
            if artefact in seen:
                continue
            seen.add(artefact)
            todo += self.registry.parents(artefact)
            if manifest := _manifest(artefact):
                unit = (artefact.stage, artefact.fingerprint, artefact.kind)
                unit += () if artefact.kind == "checkpoint" else (str(artefact.step),)
                took = (manifest.get("gpu_hours") or 0.0, (manifest.get("seconds") or 0.0) / 3600)
                most[unit] = max(took, most.get(unit, (0.0, 0.0)))
        return {
            "gpu_hours": round(sum(gpu for gpu, _ in most.values()), 4),
            "hours": round(sum(hours for _, hours in most.values()), 4),
        }

    def _train(self, artefact: Artefact) -> tuple[float | None, str | None]:
        assert artefact.step is not None
        work = self.registry.works[artefact.stage, artefact.fingerprint]
        if store.is_kept(artefact):
            return 0.0, "kept, nothing is trained"
        last = work.last_step if work.fixed_length and work.last_step else artefact.step  # it cannot stop before
        steps = last - max(store.begins(work.config), store.progress(artefact.folder, upto=artefact.step))
        own = _seconds_per_step(artefact.folder, work.parents)
        if own is not None:
            return own * steps, f"{own:.3g} s a step, its own"
        alike = []
        if self._trainings:
            alike = self._trainings.get(_cost(work.kind, work.resources, work.semantic, self._origin(work.parents)), [])
        if alike:
            speed = median(seconds for _, seconds in sorted(alike)[-LATEST:])
            return speed * steps, f"{speed:.3g} s a step, as {min(len(alike), LATEST)} earlier built alike"
        runs = (self.registry.runs.get(name) for name in work.facts.get("runs", ()))  # all that this training is
        stated = max((run.seconds_per_step for run in runs if run and run.seconds_per_step), default=None)
        return (stated * steps, f"{stated:.3g} s a step, as stated") if stated else (None, None)

    def _other(self, artefact: Artefact) -> tuple[float | None, str | None]:
        if not self._others:
            return None, None
        work = self.registry.works[artefact.stage, artefact.fingerprint]
        key = (artefact.stage, artefact.kind, work.facts.get("suite_fingerprint"), self._origin(work.parents))
        if found := self._others.get(key, []):
            return median(seconds for _, seconds in sorted(found)[-LATEST:]), f"as {min(len(found), LATEST)} earlier"
        return self._edited(work) if artefact.stage == "eval" else (None, None)

    def _edited(self, work: Work) -> tuple[float | None, str | None]:
        """Of a suite that was edited: by the episodes of its earlier evaluations, where one costs the same."""
        rest, episodes = _episodes(work.semantic)
        found = self._others.get((work.facts["suite"], self._origin(work.parents), rest), [])
        if not found:
            return None, None
        seconds = episodes * median(seconds for _, seconds in sorted(found)[-LATEST:])
        return seconds, f"by the episodes of {min(len(found), LATEST)} before the suite was edited"

    @functools.cached_property
    def _trainings(self) -> dict[str, list[tuple[str, float]]]:
        """Cost key → `[(ended, seconds per step)]`."""
        found: dict[str, list[tuple[str, float]]] = {}
        for folder in sorted(store.STORE.glob("train-*")):
            spec = _read(folder / "spec.json")
            speed = _seconds_per_step(folder, spec["parents"]) if spec else None
            if speed is not None and spec:
                origin = self._origin(spec["parents"])
                key = _cost(spec["kind"], spec["resources"], spec["semantic"], origin)
                found.setdefault(key, []).append((spec["planned_at"], speed))
        return found

    @functools.cached_property
    def _others(self) -> dict[tuple[Any, ...], list[tuple[str, float]]]:
        found: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
        for artefact in store.stored():
            manifest = None if artefact.kind == "checkpoint" else _manifest(artefact)
            if manifest and manifest.get("origin") == "built" and manifest.get("seconds") is not None:
                spec = _read(artefact.folder / "spec.json") or {}
                origin = self._origin(manifest["parents"])
                key = (artefact.stage, artefact.kind, spec.get("suite_fingerprint"), origin)
                found.setdefault(key, []).append((manifest["ended"], manifest["seconds"]))
                if artefact.stage == "eval" and spec:
                    rest, episodes = _episodes(spec["semantic"])
                    row = (manifest["ended"], manifest["seconds"] / episodes)
                    found.setdefault((spec["suite"], origin, rest), []).append(row)
        return found

    def _origin(self, parents: list[dict[str, Any]]) -> str | None:
        """The model (made or imported) that the line of a training or an evaluation begins with."""
        for parent in parents:
            if parent["kind"] in ("data", "report"):
                continue
            stage, fingerprint = parent["stage"], parent["fingerprint"]
            if stage == "model":
                return fingerprint
            if stage not in ("train", "best"):
                continue
            known = self.registry.works.get((stage, fingerprint))
            above = known.parents if known else (_read(store.spec_path(stage, fingerprint)) or {}).get("parents", [])
            return self._origin(above)
        return None


def _cost(kind: str, resources: dict[str, Any], semantic: dict[str, Any], origin: str | None) -> str:
    """What two trainings of the same cost a step have in common."""
    rest = {key: value for key, value in leaves(semantic) if not FREE.fullmatch(key) and ".parent." not in f".{key}."}
    return hash_bytes(canonical([kind, resources["gpus"], resources["threads"], origin, rest]))


def _seconds_per_step(folder: Path, parents: list[dict[str, Any]]) -> float | None:
    """A training's own speed: the time of all its attempts over the steps that they made; of one that runs, or that
    was killed, the beats of its lease."""
    made = store.progress(folder) - _forked(parents)
    if made <= 0:
        return None
    return (lease.spent(folder) or 0.0) / made or None


def _forked(parents: list[dict[str, Any]]) -> int:
    """The step that a training was forked from, 0 where it was not."""
    return max((p["step"] for p in parents if p["kind"] == "checkpoint" and p["step"]), default=0)


def _episodes(suite: dict[str, Any]) -> tuple[str, int]:
    """`(all that sets the cost of an episode, number)` of the episodes of a suite. Where a source takes all its tasks,
    nobody knows how many: then it is only compared with suites that take the same ones."""
    limits = [(source.get("select") or {}).get("limit") for source in suite["source"]]
    counted = all(limits)
    number = sum((limit or 1) * source["group_size"] for limit, source in zip(limits, suite["source"], strict=True))
    rest = {key: value for key, value in leaves(suite) if not OF_EPISODES.fullmatch(key)}
    tasks = [key for key in rest if key.endswith(".limit") or ".parent." in f".{key}."]
    return hash_bytes(canonical({key: rest[key] for key in rest if not counted or key not in tasks})), number


def _manifest(artefact: Artefact) -> dict[str, Any] | None:
    try:
        return store.read_brief(artefact.done_path)
    except UserError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return store.spec_at(path)
    except UserError:
        return None
