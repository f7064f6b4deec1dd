"""What the Snakefile asks for. `attach(workflow)` gives the driver's view, or in a job (a Snakemake below a Snakemake)
the store's: a job reads nothing but specifications, so an edit after the plan changes nothing.

Snakemake tells a workflow its targets only after the Snakefile was read; `attach` hooks into that moment, to check the
targets and to force what must be made again although it exists. Both end in one line per fault, never in a traceback.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmake.build import failure, plan, publish, resources, store
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.core.errors import UserError
from rlmake.core.jsonio import hash_bytes

WORKING = ("logs", "configs")  # of a run directory, linked from the start of the work
KINDS = {"data": "data", "model": "weights", "train": "checkpoint", "eval": "eval", "report": "report"}
RULES = {"data": "data", "model": "model", "train": "train", "export": "train", "evaluate": "eval", "report": "report"}


def attach(workflow: Any, config: dict[str, Any]) -> "Jobs":
    """The build's view for this process; `config` is Snakemake's (`--config retry_failed=1`)."""
    if not workflow.is_main_process:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the early signal is for the training, not for us above it
        return Jobs()
    return or_leave(lambda: Driver(workflow, str(config.get("retry_failed", "0")).lower() not in ("0", "false", "")))


class Jobs:
    """Inputs, threads and resources of jobs, from the specifications in the store."""

    all: list[str] = []

    def about(self, stage: str, fingerprint: str) -> dict[str, Any]:
        """`{parents, resources}` of a unit of work."""
        return store.read_spec(stage, fingerprint)

    def inputs(self, made: Artefact, parents: list[Artefact]) -> list[str]:
        """The manifests that making `made` waits for."""
        return [parent.manifest_path.as_posix() for parent in parents]

    def parents(self, stage: str) -> Callable[[Any], list[str]]:
        """Input function of the rules that make a stage: the manifests of its parents."""

        def inputs(wildcards: Any) -> list[str]:
            step = int(wildcards.n) if stage == "train" else None
            made = Artefact(stage, wildcards.fp, KINDS[stage], step)
            return self.inputs(made, [store.artefact_of(p) for p in self.about(stage, wildcards.fp)["parents"]])

        return inputs

    def checkpoint(self, wildcards: Any) -> list[str]:
        """Input function of an export."""
        made, of = (Artefact("train", wildcards.fp, kind, int(wildcards.n)) for kind in ("weights", "checkpoint"))
        return self.inputs(made, [of])

    def threads(self, stage: str) -> Callable[[Any], int]:
        return lambda wildcards: self.about(stage, wildcards.fp)["resources"]["threads"]

    def resource(self, stage: str, name: str) -> Callable[[Any], Any]:
        """A resource function, see `slurm_resources`; "export" is the small job beside a training."""
        of, small = ("train", True) if stage == "export" else (stage, False)
        return lambda wildcards: slurm_resources(self.about(of, wildcards.fp)["resources"], small)[name]

    def published(self, kind: str) -> Callable[[Any], Any]:
        """Inputs of a publishing rule: links are made by the driver alone."""

        def never(wildcards: Any) -> Any:
            raise UserError("links are made by the driver, never in a job")

        return never

    link = published


class Driver(Jobs):
    """The process that plans: it reads every experiment file and knows the names."""

    def __init__(self, workflow: Any, retry: bool):
        self.workflow, self.retry = workflow, retry
        self.registry = Registry.load()
        self.all = plan.targets_of_all(self.registry)
        self.needs = plan.Needs()
        _when_settled(workflow, lambda settings: or_leave(lambda: self._settle(settings)))

    def _settle(self, settings: Any) -> None:
        """Snakemake has said what is asked for: check it, and force what is stale."""
        asked = [str(target) for target in settings.targets]
        whole = not asked or "all" in asked
        rules = {rule.name for rule in self.workflow.rules}
        paths = [path for path in asked if path not in rules and not path.startswith(f"{store.STORE}/")]
        self.needs = plan.needs(
            self.registry, [*(self.all if whole else []), *paths], everything=whole, retry=self.retry
        )
        if whole:
            self.all[:] = [target.path for target in self.needs.targets]
        plan.say(self.needs)
        self._count_gpus()
        settings.forcerun = {*settings.forcerun, *(path.as_posix() for path in self.needs.stale)}

    def about(self, stage: str, fingerprint: str) -> dict[str, Any]:
        work = self.registry.works.get((stage, fingerprint))
        if work is None:  # an older identity, asked for by its path in the store
            return super().about(stage, fingerprint)
        return {"parents": work.parents, "resources": work.resources}

    def inputs(self, made: Artefact, parents: list[Artefact]) -> list[str]:
        """What is there and whole waits for nothing: identity is in the path, no time stamp of a parent ever counts."""
        if made not in self.needs.missing and made.manifest_path.is_file():
            return []
        return [self.needs.source(parent).as_posix() for parent in parents]

    def published(self, kind: str) -> Callable[[Any], Any]:
        """Input function of a publishing rule: the manifest of the artefact that its link stands for."""

        def inputs(wildcards: Any) -> list[str]:
            target = _target(kind, wildcards)
            link, artefact = Path(target.path), self.registry.artefact(target)
            if artefact.manifest_path.is_file() and publish.points(link, artefact.path):
                return []
            return [self.needs.source(artefact).as_posix()]

        return inputs

    def link(self, kind: str) -> Callable[[Any], str]:
        """Parameter of a publishing rule: `<link> <destination>` as hex digits."""

        def arguments(wildcards: Any) -> str:
            target = _target(kind, wildcards)
            artefact = self.registry.artefact(target)
            return f"{publish.encode(target.path)} {publish.encode(artefact.path.as_posix())}"

        return arguments

    def start(self) -> None:
        """Before the first job, never in a dry run: write the specifications, show where the work can be followed."""
        moment = {"planned_at": _now(), "code": code_state()}
        for job in self.workflow.dag.needrun_jobs():
            stage = RULES.get(job.rule.name)
            work = stage and self.registry.works.get((stage, job.wildcards.fp))
            if work:
                store.write_spec(self.registry.spec(work, sorted(self.needs.steps.get(work.fingerprint, ())), moment))
                if self.retry and stage == "train":
                    failure.forgive(work.artefact("checkpoint", 0).folder)
        self.registry.cache.save()
        for name in dict.fromkeys(target.run for target in self.needs.targets):
            work = self.registry.work(name)
            if work.stage == "train":
                folder = work.artefact("checkpoint", 0).folder
                for leaf in WORKING:
                    (folder / leaf).mkdir(parents=True, exist_ok=True)
                    publish.publish(Path(OUTPUTS) / name / leaf, folder / leaf)

    def resource(self, stage: str, name: str) -> Callable[[Any], Any]:
        """On a cluster no job takes GPUs of this machine."""
        if name != "local_gpus":
            return super().resource(stage, name)
        return lambda wildcards: self.about(stage, wildcards.fp)["resources"]["gpus"] if self.workflow.local_exec else 0

    def _count_gpus(self) -> None:
        """On this machine jobs share its GPUs, unless the user gave `--resources local_gpus=N`. A job that wants more
        than there are is let through: its own message is the clearer one."""
        there = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if there and "local_gpus" not in self.workflow.global_resources:
            wanted = [work.resources["gpus"] for work in self.registry.works.values()]
            self.workflow.register_resource("local_gpus", max(there, *wanted))


def slurm_resources(wanted: dict[str, Any], small: bool = False) -> dict[str, Any]:
    """Snakemake resources of a job; 0 and "" ask for nothing. `small`: an export beside its training, no GPU.

    One rule for any number of nodes: the launcher calls srun itself, so the `mpi` key keeps the job's step from pinning
    it to one node, and `tasks_per_gpu = 0` keeps the plugin from multiplying tasks.
    """
    slurm = wanted.get("slurm") or resources.small(None)
    if small:
        wanted, slurm = {"nodes": 1, "gpus": 0}, resources.small(slurm)
    nodes, gpus = wanted["nodes"], wanted["gpus"]
    return {
        "local_gpus": gpus,
        "nodes": nodes,
        "tasks": nodes,
        "mpi": "srun" if nodes > 1 else "",
        "tasks_per_gpu": 0,
        "gres": f"gpu:{wanted['gpus_per_node']}" if gpus else "",
        "runtime": slurm["time"] or 0,
        "mem_mb": slurm["memory"] or 0,
        "slurm_partition": slurm["partition"] or "",
        "slurm_account": slurm["account"] or "",
        "slurm_extra": " ".join(map(shlex.quote, slurm["extra"])),
    }


def code_state() -> dict[str, Any]:
    """`{commit, dirty}` of the project: the commit, and a hash over what differs from it (None: nothing, or no git)."""

    def git(*arguments: str) -> bytes | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, difference = git("rev-parse", "HEAD"), git("diff", "HEAD")
    return {
        "commit": commit.decode().strip() if commit else None,
        "dirty": hash_bytes(difference)[:16] if difference else None,
    }


def _target(kind: str, wildcards: Any) -> Target:
    step = int(wildcards.n) if hasattr(wildcards, "n") else None
    return Target(wildcards.run, kind, step, getattr(wildcards, "suite", None))


def _when_settled(workflow: Any, then: Callable[[Any], None]) -> None:
    """Call `then(settings)` when Snakemake sets `workflow.dag_settings`, which it does between reading the Snakefile
    and building the graph (9.25 to 9.27)."""

    class Watched(type(workflow)):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "dag_settings" and value is not None:
                then(value)

    workflow.__class__ = Watched


def or_leave(work: Callable[[], Any]) -> Any:
    """Do `work`; a user's mistake becomes `error: …` lines and the end of this process."""
    try:
        return work()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
