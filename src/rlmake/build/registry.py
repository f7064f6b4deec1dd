"""What every run stands for: its configuration resolved, its parents found, its fingerprint. Nothing here is on disk.

Registry.load()                    all experiment files, all faults
registry.work(run)                 identity of a run's own stage (data, model or train)
registry.artefact(target)          the artefact in the store that a target stands for
registry.reports                   what rests on runs: their reports, the best of each, grids
"""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmake import config as schema
from rlmake.build import accepted, failure, names, resources, revisions, store
from rlmake.build.edges import Edges, written
from rlmake.build.experiments import Experiments, Run, Suite, load
from rlmake.build.fingerprint import fingerprint
from rlmake.build.names import Target
from rlmake.build.reports import Reports
from rlmake.build.rows import FirstRows
from rlmake.build.store import STORE, Artefact
from rlmake.build.work import Work
from rlmake.config.faults import located
from rlmake.config.fields import semantic_part
from rlmake.config.optim import warmup_fault
from rlmake.core.errors import ConfigError, Fault, UserError, nearest
from rlmake.core.jsonio import canonical


class Registry:
    """Runs and suites of the project with their identities, each worked out once.

    `retry`: failures noted earlier do not count. `allow_missing`: reports of grids do without what is not there.
    """

    def __init__(self, experiments: Experiments, retry: bool = False, allow_missing: bool = False):
        self.experiments, self.retry, self.allow_missing = experiments, retry, allow_missing
        self.runs, self.suites = experiments.runs, experiments.suites
        trained = [run for run in self.runs.values() if run.grid and run.stage == "train"]
        self.grids = {run.grid: run.manual for run in trained if run.grid}
        self.cache = revisions.ContentCache(STORE / "content.json")
        self.works: dict[tuple[str, str], Work] = {}
        self._by_run: dict[str, Work | None] = {}
        self._evals: dict[tuple[str, Artefact], Work] = {}
        self.reports = Reports(self)
        self._targets: dict[str, Target] = {}
        self._failures: dict[Artefact, tuple[str, str] | None] = {}
        self._active: list[str] = []
        self.accepted = accepted.read()
        self.accepted_in_use: dict[str, dict[str, Any]] = {}

    @classmethod
    def load(cls, *, retry: bool = False, allow_missing: bool = False) -> "Registry":
        """Read and resolve everything. Raises `ConfigError` with all faults of all files."""
        collecting = gc.isenabled()
        gc.disable()  # a tenth of the time: all that is made here stays
        try:
            return cls._load(retry, allow_missing)
        finally:
            gc.freeze()
            if collecting:
                gc.enable()

    @classmethod
    def _load(cls, retry: bool, allow_missing: bool) -> "Registry":
        if os.path.lexists(names.OUTPUTS) and not os.path.isdir(names.OUTPUTS):
            what = "a link that leads nowhere" if os.path.islink(names.OUTPUTS) else "a file"
            raise ConfigError(
                Fault(f"is {what}; results go into a folder of this name: mend it or move it away", file=names.OUTPUTS)
            )
        experiments = load()
        registry = cls(experiments, retry, allow_missing)
        faults = list(experiments.faults)
        for run in experiments.runs.values():
            try:
                registry.work(run.name)
                if fault := registry.reports.fault_of_best(run.name):
                    faults.append(fault)
            except ConfigError as error:
                faults += error.faults
        for name in experiments.suites:
            faults += registry._suite(name)[2].faults
        faults += registry.faults_of_rows() if not faults else []
        if faults:
            raise ConfigError(dict.fromkeys(faults))
        return registry

    def faults_of_rows(self) -> Iterator[Fault]:
        """What the first rows of the data that is named here lack."""
        first = FirstRows(self)
        declared = [(run, work.config) for name, run in self.runs.items() if (work := self._by_run[name])]
        declared += [(suite, self._suite(name)[3]) for name, suite in self.suites.items()]
        for one, config in declared:
            for key, value, fault in first.faults(config):
                yield located(fault, written(one.raw, key, value), one.raw, one.file)

    def work(self, name: str) -> Work:
        """Identity of a run. Raises `ConfigError` for what is wrong with it, or once more for a parent of it."""
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
        return self.keep(self.identity(run, self.experiments.configs.pop(run.name)), run.name)

    def identity(self, run: Run, resolved: schema.Config) -> Work:
        """What a run with this configuration stands for. Raises `ConfigError`."""
        edges = Edges(self, run.raw, run.file)
        config = schema.dump(resolved)
        semantic = edges.resolve(semantic_part(resolved))
        edges.fork(config)
        last = _find(config, "max_steps") if run.stage == "train" else None
        if run.stage == "train" and last is None:
            edges.faults.append(Fault("a run of the build needs a last step", key="max_steps", file=run.file))
        if run.stage == "train":
            trainer = getattr(resolved, "trainer", resolved)
            if fault := warmup_fault(trainer.scheduler, last):
                edges.faults.append(Fault(fault, key="scheduler", file=run.file))
        if edges.faults or edges.broken:
            raise ConfigError(edges.faults)
        code = {run.kind: revisions.SHIPPED[run.kind], **edges.revisions}
        return Work(
            stage=run.stage,
            kind=run.kind,
            fingerprint=self._stands_for(run.stage, fingerprint(run.stage, run.kind, semantic, edges.parents, code)),
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

    def _stands_for(self, stage: str, fingerprint: str) -> str:
        """The fingerprint of the build that a user declared equivalent, or the same."""
        record = self.accepted.get((stage, fingerprint))
        if record is None:
            return fingerprint
        self.accepted_in_use[f"{stage}-{fingerprint}"] = record
        return record["stands_for"]

    def keep(self, work: Work, name: str) -> Work:
        known = self.works.setdefault((work.stage, work.fingerprint), work)
        runs = known.facts.setdefault("runs", [])
        if name not in runs:
            runs.append(name)
        if (work.last_step, work.interval) == (known.last_step, known.interval):
            return known
        work.facts = known.facts  # one training under two names that end at different steps
        return work

    def target(self, path: str) -> Target:
        """Take a target's path apart. Raises `UserError` when there is no such thing."""
        if path not in self._targets:
            self._targets[path] = self._target(path)
        return self._targets[path]

    def _target(self, path: str) -> Target:
        target = names.parse_target(path, self.runs, self.grids, lambda run: self.runs[run].stage)
        if isinstance(target, str):
            raise UserError(self.whole(path) or target)
        if target.kind == "grid":
            return target
        run = self.runs[target.run]
        leaf = {"eval": "evals/<suite>", "report": "report.html", "checkpoint": "checkpoints/step_<n>"}
        leaf |= {"best": "exports/best/weights", "parity": "parity/report.json"}
        if leaf.get(target.kind, target.kind) not in names.ARTEFACTS[run.stage] or (
            target.step and run.stage != "train"
        ):
            raise UserError(
                f"{path}: run '{run.name}' ({run.kind}) has none; it yields {', '.join(names.ARTEFACTS[run.stage])}"
            )
        if target.kind == "adapter" and not store.has_lora(self.work(target.run).config):
            raise UserError(f"{path}: run '{run.name}' trains all weights; only a run with model.lora has an adapter")
        if target.kind == "best" and run.best is None:
            raise UserError(f"{path}: {run.file} does not say what is best: give it a table [experiment.best]")
        if target.kind == "eval" and target.suite not in self.suites:
            hint = nearest(target.suite, self.suites)
            raise UserError(f"{path}: there is no suite experiments/evals/{target.suite}.toml{hint}")
        if target.step is not None:
            self._check_step(path, self.work(target.run), target.step)
        return target

    def whole(self, path: str) -> str | None:
        """What to ask for instead of a whole run or grid, where `path` is one."""
        name = path.removeprefix(f"{names.OUTPUTS}/").rstrip("/")
        if name in self.grids:
            return (
                f"{path}: is a grid; ask for {', '.join(f'{names.OUTPUTS}/{name}/{leaf}' for leaf in names.GRID_FILES)}"
            )
        if name in self.runs:
            run = self.runs[name]
            leaves = ", ".join(names.ARTEFACTS[run.stage])
            return f"{path}: is a run ({run.kind}); ask for a target of it, {names.OUTPUTS}/{name}/ and one of {leaves}"
        return None

    def _check_step(self, path: str, work: Work, step: int) -> None:
        assert work.last_step is not None
        if step > work.last_step:
            raise UserError(f"{path}: the run ends at step {work.last_step} (max_steps)")
        if step <= store.begins(work.config):
            forked = store.fork_of(work.config)
            raise UserError(f"{path}: there is no step {step}: the run is a fork of {forked} and counts on from there")
        if work.fixed_length and step != work.last_step and (work.interval is None or step % work.interval):
            raise UserError(
                f"{path}: the schedule depends on max_steps = {work.last_step}, so there are only its own checkpoints: "
                + (f"every {work.interval} steps and the last" if work.interval else "set ckpt.interval")
            )

    def artefact(self, target: Target) -> Artefact:
        """The artefact that a target (without its `rest`) stands for."""
        if target.kind == "grid":
            return self.reports.of_grid(target.run).artefact()
        if target.kind == "best":
            return self.reports.best(target.run).artefact()
        if target.kind == "parity":
            return self.reports.parity(target.run).artefact()
        if target.kind == "report":
            return self.reports.of_run(target.run).artefact()
        if target.kind == "eval":
            assert target.suite is not None
            return self.evaluation(target.suite, target.run, target.step).artefact()
        work = self.work(target.run)
        if work.stage != "train":
            return work.artefact()
        return work.artefact(target.kind, target.step or work.last_step)

    def place(self, target: Target) -> Path:
        """What a target's link points to."""
        path = self.artefact(target).path
        return path / target.rest if target.kind == "grid" else path

    def links(self, target: Target) -> dict[str, Path]:
        """Link → what it points to, of all that is published with a target: the files of a grid are so together."""
        if target.kind != "grid":
            return {target.path: self.place(target)}
        files = (Target(target.run, "grid", rest=leaf) for leaf in names.GRID_FILES)
        return {file.path: self.place(file) for file in files}

    def evaluation(self, suite_name: str, run_name: str, step: int | None = None) -> Work:
        """Identity of the evaluation of a run's weights (of `step`, or the last) by a suite."""
        model = self.artefact(Target(run_name, "weights", step))
        if work := self._evals.get((suite_name, model)):
            return self.keep(work, run_name)
        suite, semantic, edges, config = self._suite(suite_name)
        parents = [{"role": "model", **model.record(), "ref": None}, *edges.parents]
        code = {"eval": revisions.SHIPPED["eval"], **edges.revisions}
        work = Work(
            stage="eval",
            kind="eval",
            fingerprint=self._stands_for("eval", fingerprint("eval", "eval", semantic, parents, code)),
            config=config,
            semantic=semantic,
            parents=parents,
            revisions=code,
            declared=suite,
            resources=resources.of("eval", config, near=resources.near(self.work(run_name).config)),
            facts={
                "suite": suite_name,
                "suite_fingerprint": fingerprint("suite", "eval", semantic, edges.parents, code),
                "step": model.step,
                "leaf": Target(run_name, "eval", step, suite_name).path.partition(f"{run_name}/")[2],
                "asked_step": step,
            },
        )
        self._evals[suite_name, model] = work
        return self.keep(work, run_name)

    def evaluation_resources(self) -> list[dict[str, Any]]:
        """What evaluations take, every kind of them once: by suite, and by the [slurm] of the runs they belong to."""
        near = {canonical(table): table for table in (resources.near(self.work(name).config) for name in self.runs)}
        configs = [self._suite(name)[3] for name in self.suites]
        return [resources.of("eval", config, near=table) for config in configs for table in near.values()]

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def _suite(self, name: str) -> tuple[Suite, dict[str, Any], Edges, dict[str, Any]]:
        """A suite with what it rests on."""
        suite = self.suites[name]
        edges = Edges(self, suite.raw, suite.file)
        return suite, edges.resolve(suite.semantic()), edges, schema.dump(suite.config)

    @functools.cached_property
    def built(self) -> dict[tuple[str, str, str | None], dict[str, Any]]:
        """`(stage, run, suite's leaf)` → the specification of the latest finished build of it in the store."""
        found: dict[tuple[str, str, str | None], dict[str, Any]] = {}
        for unit in dict.fromkeys((one.stage, one.fingerprint) for one in store.stored()):
            if store.spec_path(*unit).is_file():
                try:
                    spec = store.read_spec(*unit)
                except UserError:  # damaged: written anew by the plan that needs it
                    continue
                for run in spec.get("runs", ()):
                    key = (unit[0], run, spec.get("leaf"))
                    found[key] = max(spec, found.get(key, spec), key=lambda one: one["planned_at"])
        return found

    def failure(self, artefact: Artefact) -> tuple[str, str] | None:
        """`(run, failure)` that an artefact which is not there would run into: its own or a parent's."""
        if self.retry:
            return None
        if artefact not in self._failures:
            found = None
            if not store.finished(artefact):
                if artefact.stage == "train" and (noted := failure.read(artefact.folder)):
                    found = (self.works[artefact.stage, artefact.fingerprint].facts["runs"][0], failure.describe(noted))
                for parent in self.parents(artefact) if not found else ():
                    found = found or self.failure(parent)
            self._failures[artefact] = found
        return self._failures[artefact]

    def parents(self, artefact: Artefact) -> list[Artefact]:
        """What making an artefact needs."""
        work = self.works[artefact.stage, artefact.fingerprint]
        if artefact.stage != "train" or artefact.kind == "checkpoint":
            return [store.artefact_of(parent) for parent in work.parents]
        return [store.exported_from(artefact, store.has_lora(work.config))]


def _find(config: dict[str, Any], key: str) -> Any:
    """A key of a training's configuration: the trainer's own, which a shared one of the root has filled."""
    return config["trainer"].get(key) if isinstance(config.get("trainer"), dict) else config.get(key)
