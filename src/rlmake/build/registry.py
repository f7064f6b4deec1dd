"""What every run stands for: its configuration resolved, its parents found, its fingerprint. Nothing here is on disk.

Registry.load()                    all experiment files, all faults
registry.work(run)                 identity of a run's own stage (data, model or train)
registry.artefact(target)          the artefact in the store that a target stands for
registry.spec(artefact, …)         the `spec.json` of the job that makes it
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from rlmake import config as schema
from rlmake.build import names, resources, revisions
from rlmake.build.edges import Edges
from rlmake.build.experiments import Experiments, Run, Suite, load
from rlmake.build.fingerprint import fingerprint, leaves
from rlmake.build.names import Target
from rlmake.build.store import SPEC_SCHEMA, STORE, Artefact
from rlmake.config.fields import semantic_part, walk
from rlmake.core.errors import ConfigError, Fault, UserError, nearest
from rlmake.core.jsonio import canonical

Declared = Run | Suite
KIND_OF_STAGE = {"data": "data", "model": "weights", "eval": "eval", "report": "report"}


@dataclass
class Work:
    """One unit of identity, and what its job needs to know.

    `parents` are records {role, stage, fingerprint, step, kind, ref}: `ref` is the text in `config` that stands for the
    parent and that the job replaces by the parent's path. `last_step` is a training's `max_steps`; with `fixed_length`
    the schedule depends on it, so no other step may be the end.
    """

    stage: str
    kind: str
    fingerprint: str
    config: dict[str, Any]
    semantic: dict[str, Any]
    parents: list[dict[str, Any]]
    revisions: dict[str, Any]
    declared: Declared | None
    resources: dict[str, Any]
    last_step: int | None = None
    interval: int | None = None
    fixed_length: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def defaults(self) -> dict[str, Any]:
        """Semantic leaves that nobody set and that hold the schema's own default: what a change in code would shift."""
        if self.declared is None:
            return {}
        given = {key for key, _ in leaves(self.declared.raw)}
        own = _schema_defaults(type(self.declared.config))
        return {
            key: value
            for key, value in leaves(self.semantic)
            if key in own and key not in given and canonical(value) in own[key]
        }

    def artefact(self, kind: str | None = None, step: int | None = None) -> Artefact:
        return Artefact(self.stage, self.fingerprint, kind or KIND_OF_STAGE[self.stage], step)


class Registry:
    """Runs and suites of the project with their identities, each worked out once."""

    def __init__(self, experiments: Experiments):
        self.experiments = experiments
        self.runs, self.suites = experiments.runs, experiments.suites
        self.cache = revisions.ContentCache(STORE / "content.json")
        self.works: dict[tuple[str, str], Work] = {}
        self._by_run: dict[str, Work | None] = {}
        self._evals: dict[tuple[str, Artefact], Work] = {}
        self._active: list[str] = []

    @classmethod
    def load(cls) -> "Registry":
        """Read and resolve everything. Raises `ConfigError` with all faults of all files."""
        experiments = load()
        registry = cls(experiments)
        faults = list(experiments.faults)
        for run in experiments.runs.values():
            try:
                registry.work(run.name)
            except ConfigError as error:
                faults += error.faults
        for suite in experiments.suites.values():
            edges = Edges(registry, suite.raw, suite.file)
            edges.resolve(suite.semantic())
            faults += edges.faults
        if faults:
            raise ConfigError(dict.fromkeys(faults))
        return registry

    def work(self, name: str) -> Work:
        """Identity of a run. Raises `ConfigError` for what is wrong with it, or once more for a parent of its."""
        if name in self._active:
            chain = " → ".join([*self._active[self._active.index(name) :], name])
            raise ConfigError(Fault(f"runs depend on one another in a circle: {chain}", file=self.runs[name].file))
        if name not in self._by_run:
            self._active.append(name)
            try:
                self._by_run[name] = self._resolve(self.runs[name])
            except ConfigError:
                self._by_run[name] = None
                raise
            finally:
                self._active.pop()
        work = self._by_run[name]
        if work is None:
            raise ConfigError([])  # its own faults were reported where it was resolved first
        return work

    def _resolve(self, run: Run) -> Work:
        edges = Edges(self, run.raw, run.file)
        config = schema.dump(run.config)
        semantic = edges.resolve(semantic_part(run.config))
        edges.fork(config)
        last = _find(config, "max_steps") if run.stage == "train" else None
        if run.stage == "train" and last is None:
            edges.faults.append(Fault("a run of the build needs a last step", key="max_steps", file=run.file))
        if edges.faults or edges.broken:
            raise ConfigError(edges.faults)
        code = {run.kind: revisions.SHIPPED[run.kind], **edges.revisions}
        work = Work(
            stage=run.stage,
            kind=run.kind,
            fingerprint=fingerprint(run.stage, run.kind, semantic, edges.parents, code),
            config=config,
            semantic=semantic,
            parents=edges.parents,
            revisions=code,
            declared=run,
            resources=resources.of(run.kind, config),
            last_step=last,
            interval=(_find(config, "ckpt") or {}).get("interval") if run.stage == "train" else None,
            fixed_length=_find(semantic, "max_steps") is not None,
        )
        return self._keep(work, run.name)

    def _keep(self, work: Work, name: str) -> Work:
        known = self.works.setdefault((work.stage, work.fingerprint), work)
        runs = known.facts.setdefault("runs", [])
        if name not in runs:
            runs.append(name)
        return known

    def target(self, path: str) -> Target:
        """Take a target's path apart. Raises `UserError` when there is no such thing."""
        target = names.parse_target(path, self.runs)
        if isinstance(target, str):
            raise UserError(target)
        run = self.runs[target.run]
        leaf = {"eval": "evals/<suite>", "report": "report.html", "checkpoint": "checkpoints/step_<n>"}
        if leaf.get(target.kind, target.kind) not in names.ARTEFACTS[run.stage] or (
            target.step and run.stage != "train"
        ):
            raise UserError(
                f"{path}: run '{run.name}' ({run.kind}) has none; it yields {', '.join(names.ARTEFACTS[run.stage])}"
            )
        if target.kind == "eval" and target.suite not in self.suites:
            hint = nearest(target.suite, self.suites)
            raise UserError(f"{path}: there is no suite experiments/evals/{target.suite}.toml{hint}")
        if target.step is not None:
            self._check_step(path, self.work(target.run), target.step)
        return target

    def _check_step(self, path: str, work: Work, step: int) -> None:
        assert work.last_step is not None
        if step > work.last_step:
            raise UserError(f"{path}: the run ends at step {work.last_step} (max_steps)")
        if work.fixed_length and step != work.last_step and (work.interval is None or step % work.interval):
            raise UserError(
                f"{path}: the schedule depends on max_steps = {work.last_step}, so there are only its own checkpoints: "
                + (f"every {work.interval} steps and the last" if work.interval else "set ckpt.interval")
            )

    def artefact(self, target: Target) -> Artefact:
        """The artefact that a target (without its `rest`) stands for."""
        if target.kind == "report":
            return self.report(target.run).artefact()
        if target.kind == "eval":
            assert target.suite is not None
            return self.evaluation(target.suite, target.run, target.step).artefact()
        work = self.work(target.run)
        if work.stage != "train":
            return work.artefact()
        return work.artefact(target.kind, target.step or work.last_step)

    def evaluation(self, suite_name: str, run_name: str, step: int | None = None) -> Work:
        """Identity of the evaluation of a run's weights (of `step`, or the last) by a suite."""
        model = self.artefact(Target(run_name, "weights", step))
        if work := self._evals.get((suite_name, model)):
            return self._keep(work, run_name)
        suite = self.suites[suite_name]
        edges = Edges(self, suite.raw, suite.file)
        semantic = edges.resolve(suite.semantic())
        parents = [{"role": "model", **model.record(), "ref": None}, *edges.parents]
        config = schema.dump(suite.config)
        code = {"eval": revisions.SHIPPED["eval"], **edges.revisions}
        work = Work(
            stage="eval",
            kind="eval",
            fingerprint=fingerprint("eval", "eval", semantic, parents, code),
            config=config,
            semantic=semantic,
            parents=parents,
            revisions=code,
            declared=suite,
            resources=resources.of("eval", config, near=_slurm(self.runs[run_name].config)),
            facts={
                "suite": suite_name,
                "suite_fingerprint": fingerprint("suite", "eval", semantic, edges.parents, code),
                "step": model.step,
                "target": Target(run_name, "eval", step, suite_name).path,
            },
        )
        self._evals[suite_name, model] = work
        return self._keep(work, run_name)

    def report(self, run_name: str) -> Work:
        """Identity of a run's report: its last checkpoint, its evaluations, and those of the run it began from."""
        run, work = self.runs[run_name], self.work(run_name)
        last = work.artefact("checkpoint", work.last_step)
        parents = [{"role": "run", **last.record(), "ref": None}]
        evals = []
        before = self.before(run_name)
        for of, name in [*([("before", before)] if before else []), ("run", run_name)]:
            for suite in run.evals:
                evaluation = self.evaluation(suite, name)
                parents.append({"role": f"{of}.{suite}", **evaluation.artefact().record(), "ref": None})
                evals.append(
                    {
                        "suite": suite,
                        "of": name,
                        "fingerprint": evaluation.fingerprint,
                        "step": evaluation.facts["step"],
                    }
                )
        code = {"report": revisions.SHIPPED["report"]}
        return self._keep(
            Work(
                stage="report",
                kind="report",
                fingerprint=fingerprint("report", "report", {}, parents, code),
                config={},
                semantic={},
                parents=parents,
                revisions=code,
                declared=None,
                resources=resources.of("report", {}),
                facts={"evals": evals, "lineage": self.lineage(run_name), "step": work.last_step},
            ),
            run_name,
        )

    def before(self, run_name: str) -> str | None:
        """The training whose weights a run began from, None where it began from a model that was not trained here."""
        work = self.work(run_name)
        for parent in work.parents:
            if parent["stage"] == "train" and parent["kind"] == "weights" and parent["role"].endswith("model.name"):
                target = names.parse_target(parent["ref"], self.runs)
                return target.run if isinstance(target, Target) and target.step is None else None
        return None

    def lineage(self, run_name: str) -> list[dict[str, Any]]:
        """What a run descends from, oldest first, itself last: {name, stage, kind, fingerprint, step, manifest}."""
        work, rows = self.work(run_name), []
        for parent in work.parents:
            target = names.parse_target(parent["ref"], self.runs)
            assert isinstance(target, Target)
            rows += [row for row in self.lineage(target.run) if row not in rows]
        artefact = work.artefact(*(("checkpoint", work.last_step) if work.stage == "train" else ()))
        return [
            *rows,
            {
                "name": run_name,
                "stage": work.stage,
                "kind": work.kind,
                "fingerprint": work.fingerprint,
                "step": artefact.step,
                "manifest": artefact.manifest_path.as_posix(),
            },
        ]

    def spec(self, work: Work, steps: list[int], moment: dict[str, Any]) -> dict[str, Any]:
        """The record `spec.json`. `moment`: planned_at and code; `steps`: those of a training that are asked for."""
        return {
            "schema": SPEC_SCHEMA,
            "stage": work.stage,
            "kind": work.kind,
            "fingerprint": work.fingerprint,
            "config": work.config,
            "semantic": work.semantic,
            "parents": work.parents,
            "revisions": work.revisions,
            "defaults": work.defaults(),
            "resources": work.resources,
            "fixed_length": work.fixed_length,
            "steps": sorted(steps),
            **work.facts,
            **moment,
        }


def _slurm(config: Any) -> dict[str, Any] | None:
    """A run's [slurm] table, None where it has none."""
    table = getattr(config, "slurm", None)
    return table and table.model_dump(include=set(resources.SMALL))


def _find(config: dict[str, Any], key: str) -> Any:
    """A key of a training's configuration: the trainer's own, which a shared one of the root has filled."""
    return config["trainer"].get(key) if isinstance(config.get("trainer"), dict) else config.get(key)


@functools.cache
def _schema_defaults(cls: type) -> dict[str, set[bytes]]:
    """`{dotted key: its defaults}` in canonical JSON (several where tables of a union share a key)."""
    found: dict[str, set[bytes]] = {}
    for key, info, _ in walk(cls):
        if not info.is_required():
            default = info.get_default(call_default_factory=True)
            if isinstance(default, str | int | float | bool | None):
                found.setdefault(key, set()).add(canonical(default))
    return found
