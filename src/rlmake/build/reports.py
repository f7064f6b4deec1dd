"""What reports stand for, and other choices among finished work: the page of a run, the page of a grid, the best
checkpoint, the agreement of trainer and engine. Each rests on finished work and on no configuration of its own."""

import functools
from typing import TYPE_CHECKING, Any

from rlmake import config as schema
from rlmake.build import lease, resources, revisions, store
from rlmake.build.experiments import CLASSES
from rlmake.build.fingerprint import fingerprint
from rlmake.build.store import Artefact
from rlmake.build.work import Work
from rlmake.config import parity
from rlmake.config.eval import numbers
from rlmake.core.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    from rlmake.build.registry import Registry


class Reports:
    """Identities of reports over the runs of a registry, each worked out once."""

    def __init__(self, registry: "Registry"):
        self.registry = registry

    def _keep(
        self, kind: str, name: str, parents: list[dict[str, Any]], facts: dict[str, Any], semantic: dict[str, Any]
    ) -> Work:
        """Work of the stage `kind`, which rests on its parents and on no configuration."""
        code = {kind: revisions.SHIPPED[kind]}
        work = Work(
            stage=kind,
            kind=kind,
            fingerprint=fingerprint(kind, kind, semantic, parents, code),
            config={},
            semantic=semantic,
            parents=parents,
            revisions=code,
            declared=None,
            resources=resources.of(kind, {}),
            facts=facts,
        )
        return self.registry.keep(work, name)

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def of_run(self, run_name: str) -> Work:
        """Identity of a run's report: its last checkpoint, its evaluations, and those of the run it began from."""
        run, work = self.registry.runs[run_name], self.registry.work(run_name)
        last = work.artefact("checkpoint", work.last_step)
        parents = [{"role": "run", **last.record(), "ref": None}]
        evals = []
        before = self.before(run_name)
        for of, name in [*([("before", before)] if before else []), ("run", run_name)]:
            for suite in run.evals:
                evaluation = self.registry.evaluation(suite, name)
                parents.append({"role": f"{of}.{suite}", **evaluation.artefact().record(), "ref": None})
                evals.append(
                    {
                        "suite": suite,
                        "of": name,
                        "fingerprint": evaluation.fingerprint,
                        "step": evaluation.facts["step"],
                    }
                )
        facts = {"evals": evals, "lineage": self.lineage(run_name), "step": work.last_step}
        return self._keep("report", run_name, parents, facts, {})

    def fault_of_best(self, run_name: str) -> Fault | None:
        """What is wrong with a choice of the best checkpoint."""
        run = self.registry.runs[run_name]
        if run.best is None:
            return None
        if not self.registry.work(run_name).interval:
            message = "needs ckpt.interval: it says which checkpoints there are to choose from"
            return Fault(message, "experiment.best", run.file)
        best, suite = run.best, self.registry.suites.get(run.best.suite)
        if suite is None:
            return None  # a fault of its own
        envs = {source.name: source for source in suite.config.source}
        if best.env is not None and best.env not in envs:
            message = f"suite {best.suite} has no environment '{best.env}'{nearest(best.env, envs)}"
            return Fault(message, "experiment.best.env", run.file)
        for name, source in envs.items():
            there = numbers(source.group_size)
            if best.env in (None, name) and best.metric not in there:
                message = f"suite {best.suite} has no number '{best.metric}' of {name}{nearest(best.metric, there)}"
                return Fault(f"{message}; there are {', '.join(there)}", "experiment.best.metric", run.file)
        return None

    def best(self, run_name: str) -> Work:
        """Identity of the weights of a run's best checkpoint: its evaluations at every checkpoint, and the metric."""
        run, work = self.registry.runs[run_name], self.registry.work(run_name)
        assert run.best is not None and work.last_step is not None
        if fault := self.fault_of_best(run_name):
            raise ConfigError(fault)
        whole = range(work.interval, work.last_step + 1, work.interval)
        steps = sorted({step for step in (*whole, work.last_step) if step > store.begins(work.config)})
        parents, evals = [], []
        for step in steps:
            evaluation = self.registry.evaluation(run.best.suite, run_name, step)
            parents.append({"role": f"step_{step}", **evaluation.artefact().record(), "ref": None})
            evals.append({"step": step, "fingerprint": evaluation.fingerprint})
        facts = {"evals": evals, "train": work.fingerprint, "file": run.file}
        return self._keep("best", run_name, parents, facts, run.best.model_dump())

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def parity(self, run_name: str) -> Work:
        """Identity of the comparison of trainer and engine on a run's weights: these, the data that prompts are taken
        from, and what is asked. Which engine counts where the run itself does not say it (an SFT)."""
        work = self.registry.work(run_name)
        run = schema.parse(CLASSES[work.kind], work.config)
        engine, gpus = parity.engine_of(run), parity.gpus_of(run)
        semantic = {
            **parity.ASKED,
            "engine": engine.engine,
            "device": engine.device,
            "head": engine.enable_fp32_lm_head,
        }
        weights = work.artefact("weights", work.last_step)
        parents = [{"role": "model", **weights.record(), "ref": None}]
        parents += [parent for parent in work.parents if parent["kind"] == "data"]
        place = {"cpu_threads": run.deployment.cpu_threads, "gpus_per_node": gpus, "num_infer_gpus": gpus}
        code = {"parity": revisions.SHIPPED["parity"]}
        return self.registry.keep(
            Work(
                stage="parity",
                kind="parity",
                fingerprint=fingerprint("parity", "parity", semantic, parents, code),
                config=work.config,
                semantic=semantic,
                parents=parents,
                revisions=code,
                declared=None,
                # as an evaluation: trainer and engine take turns on the same GPUs
                resources=resources.of("eval", {"deployment": place, "inference": True}, resources.near(work.config)),
                facts={"trains": work.kind},
            ),
            run_name,
        )

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def of_grid(self, name: str) -> Work:
        """Identity of a grid's report: the last checkpoint and the evaluations of every cell. The grid's name counts,
        since the page and its files name the runs.

        Cells whose training failed for good are named (`lost`), not waited for; with `allow_missing` neither is
        anything else that is not there (`missing`).
        """
        parents, cells, lost, missing, trains = [], [], {}, {}, ""
        for run in (run for run in self.registry.runs.values() if run.grid == name):
            assert run.cell is not None
            trains = run.kind
            work = self.registry.work(run.name)
            row = {"name": run.cell.name, "run": run.name, "values": run.cell.values, "texts": run.cell.texts}
            row |= {"baseline": run.cell.baseline, "train": work.fingerprint, "step": work.last_step, "evals": []}
            failed = self.registry.failure(work.artefact("weights", work.last_step))
            wanted = [("run", work.artefact("checkpoint", work.last_step))]
            for suite in run.evals:
                evaluation = self.registry.evaluation(suite, run.name)
                wanted.append((suite, evaluation.artefact()))
                row["evals"].append({"suite": suite, "fingerprint": evaluation.fingerprint})
            for role, artefact in wanted:
                if failed:
                    lost[run.cell.name] = f"{failed[0]} {failed[1]}"
                elif self.registry.allow_missing and not store.finished(artefact):
                    missing.setdefault(run.cell.name, _state(artefact, role))
                else:
                    parents.append({"role": f"{run.cell.name}.{role}", **artefact.record(), "ref": None})
            cells.append(row)
        axes = list(dict.fromkeys(key for cell in cells for key in cell["values"]))  # records sort their keys
        facts = {"grid": name, "trains": trains, "axes": axes, "cells": cells, "lost": lost}
        facts["missing"] = missing
        semantic = {"grid": name, "cells": [[c["name"], c["values"], c["baseline"]] for c in cells], "lost": lost}
        semantic |= {"missing": missing} if missing else {}
        return self._keep("grid", name, parents, facts, semantic)

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def failed_cells(self, name: str) -> dict[str, str]:
        """Run that failed for good → its failure in words, of the cells of a grid and what they rest on."""
        works = (self.registry.work(run.name) for run in self.registry.runs.values() if run.grid == name)
        found = (self.registry.failure(work.artefact("weights", work.last_step)) for work in works)
        return dict(failed for failed in found if failed)

    def before(self, run_name: str) -> str | None:
        """The training whose weights a run began from, None where it began from a model that was not trained here."""
        work = self.registry.work(run_name)
        for parent in work.parents:
            if parent["stage"] == "train" and parent["kind"] == "weights" and parent["role"].endswith("model.name"):
                target = self.registry.target(parent["ref"])
                return target.run if target.step is None else None
        return None

    @functools.cache  # noqa: B019 - a registry lives as long as its process
    def lineage(self, run_name: str, step: int | None = None) -> list[dict[str, Any]]:
        """What a run (at `step`, or its last) descends from, oldest first, itself last.

        Rows are {name, stage, kind, fingerprint, step, manifest}.
        """
        work, rows = self.registry.work(run_name), []
        for parent in work.parents:
            target = self.registry.target(parent["ref"])
            rows += [row for row in self.lineage(target.run, target.step) if row not in rows]
        artefact = work.artefact(*(("checkpoint", step or work.last_step) if work.stage == "train" else ()))
        return [
            *rows,
            {
                "name": run_name,
                "stage": work.stage,
                "kind": work.kind,
                "fingerprint": work.fingerprint,
                "step": artefact.step,
                "manifest": artefact.output,
            },
        ]


def _state(artefact: Artefact, role: str) -> str:
    """What there is of a cell of which something is missing: its last checkpoint, or an evaluation (`role`)."""
    if artefact.stage != "train":
        return f"not evaluated: {role}"
    reached, holder = store.progress(artefact.folder), lease.read(artefact.folder)
    if holder and not lease.is_gone(holder):
        return f"in training: step {reached} of {artefact.step}"
    return f"unfinished: step {reached} of {artefact.step}" if reached else "not built"
