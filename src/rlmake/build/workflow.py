"""What the Snakefile asks for. `attach(workflow)` gives the driver's view, or in a job (a Snakemake below a Snakemake)
the store's: a job reads nothing but specifications, so an edit after the plan changes nothing.

Snakemake tells a workflow its targets only after the Snakefile was read; `attach` hooks into that moment, to check the
targets and to force what must be made again although it exists. Both end in one line per fault, never in a traceback.
"""

import inspect
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlmake.build import card, experiments, explain, failure, plan, publish, resources, store
from rlmake.build.names import OUTPUTS, WORKING, Target
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.core.errors import UserError, leave, nearest
from rlmake.core.jsonio import hash_bytes, write_bytes

LARGEST_DIFF = 1 << 20  # of a project's uncommitted changes so much is kept, for cards
WILDCARDS = inspect.Signature([inspect.Parameter("wildcards", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
RULES = {rule: stage for stage, rule in plan.RULE_OF.items()} | dict.fromkeys(plan.EXPORT_RULE.values(), "train")


def attach(workflow: Any, config: dict[str, Any]) -> "Jobs":
    """The build's view for this process; `config` is Snakemake's, see `Options`."""
    if not workflow.is_main_process:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the early signal is for the training, not for us above it
        return Jobs()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a script's shell starts what it puts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    or_leave(lambda: check_folder(Path(workflow.main_snakefile).parent))
    return or_leave(lambda: Driver(workflow, Options.of(config)))


def check_folder(project: Path) -> None:
    """Raise `UserError` where Snakemake was given a project's Snakefile (`-s`) from a folder that is no project."""
    if not experiments.FOLDER.is_dir() and (project / experiments.FOLDER).is_dir():
        raise UserError(f"no {experiments.FOLDER}/ in {Path.cwd()}: run it in {project}, or with -d {project}")


@dataclass(frozen=True)
class Options:
    """What `snakemake … --config` may say: `retry_failed=1` (try again what failed for good), `allow_missing=1`
    (reports of grids do without what is not there), `defaults=new` (build anew where only a default in the code has
    changed), `budget_gpu_hours=N` (start nothing that is estimated to cost more)."""

    retry_failed: bool = False
    allow_missing: bool = False
    defaults: str = "ask"
    budget_gpu_hours: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Options":
        known = [field.name for field in fields(cls)]
        given: dict[str, Any] = {}
        for key, value in config.items():
            if key not in known:
                if hint := nearest(key, known):
                    raise UserError(f"--config {key}: there is no such option{hint}")
                continue  # of rules that the user added to the Snakefile
            text = str(value)
            if key in ("retry_failed", "allow_missing"):
                if text.lower() not in ("0", "1", "false", "true"):
                    raise UserError(f"--config {key}: expected 1 or 0, not {text}")
                given[key] = text.lower() in ("1", "true")
            elif key == "defaults":
                if text not in ("ask", "new"):
                    raise UserError(f"--config defaults: expected ask or new, not {text}")
                given[key] = text
            else:
                given[key] = amount(text, f"--config {key}")
        return cls(**given)


def amount(text: str, what: str) -> float:
    """A number of GPU-hours as a user gives it."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{what}: expected a number of GPU-hours, not {text}")
    return value


class Jobs:
    """Inputs, threads and resources of jobs, from the specifications in the store."""

    all: list[str] = []

    def about(self, stage: str, fingerprint: str) -> dict[str, Any]:
        """`{parents, resources}` of a unit of work."""
        return store.read_spec(stage, fingerprint)

    def inputs(self, made: Artefact, parents: Callable[[], Iterable[Artefact]]) -> list[str]:
        """The manifests that making `made` waits for."""
        return [parent.output for parent in parents()]

    def parents(self, stage: str) -> Callable[[Any], list[str]]:
        """Input function of the rules that make a stage: the manifests of its parents."""
        kind = store.KIND_OF_STAGE.get(stage, "checkpoint")

        def inputs(wildcards: Any) -> list[str]:
            made = Artefact(stage, wildcards.fp, kind, int(wildcards.n) if stage == "train" else None)
            return self.inputs(made, lambda: map(store.artefact_of, self.about(stage, wildcards.fp)["parents"]))

        return of_wildcards(inputs)

    def exported(self, kind: str) -> Callable[[Any], list[str]]:
        """Input function of an export: the checkpoint, or the weights that it is made from."""

        def inputs(wildcards: Any) -> list[str]:
            made = Artefact("train", wildcards.fp, kind, int(wildcards.n))
            lora = lambda: store.has_lora(self.about("train", wildcards.fp)["config"])  # noqa: E731 - asked only when it matters
            return self.inputs(made, lambda: [store.exported_from(made, kind == "weights-FP8" and lora())])

        return of_wildcards(inputs)

    def threads(self, stage: str) -> Any:
        return of_wildcards(lambda wildcards: self.about(stage, wildcards.fp)["resources"]["threads"])

    def resource(self, stage: str, name: str) -> Any:
        """A resource function, see `slurm_resources`; "export" is the small job beside a training."""
        of, small = ("train", True) if stage == "export" else (stage, False)
        return of_wildcards(lambda wildcards: slurm_resources(self.about(of, wildcards.fp)["resources"], small)[name])

    def published(self, leaf: str) -> Callable[[Any], Any]:
        """Inputs of the rule that publishes `outputs/<leaf>`: links are made by the driver alone."""

        def never(wildcards: Any) -> Any:
            raise UserError("links are made by the driver, never in a job")

        return never

    link = published

    def after_error(self) -> None:
        """Nothing: the driver sees to it."""


class Driver(Jobs):
    """The process that plans: it reads every experiment file and knows the names."""

    def __init__(self, workflow: Any, options: Options):
        self.workflow, self.options = workflow, options
        self.registry = Registry.load(retry=options.retry_failed, allow_missing=options.allow_missing)
        self.declared = self.left = plan.targets_of_all(self.registry)
        self.needs = plan.Needs()
        self.targets: dict[str, Target] = {}
        _when_settled(workflow, lambda settings: or_leave(lambda: self._settle(settings)))

    def _settle(self, settings: Any) -> None:
        """Snakemake has said what is asked for: check it, and force what is stale."""
        asked = [str(target) for target in settings.targets]
        if not asked and self.workflow.default_target is None:  # included rules are no default for Snakemake
            self.workflow.default_target = "all"
        whole = not asked or "all" in asked
        rules = {rule.name for rule in self.workflow.rules}
        paths = [path for path in asked if path not in rules and not path.startswith(f"{store.STORE}/")]
        self.needs = plan.needs(self.registry, [*(self.declared if whole else []), *paths], everything=whole)
        self.targets = {target.path: target for target in self.needs.targets}
        if whole:
            self.declared = self.left = list(self.targets)
            if not (settings.forceall or settings.forcerun or settings.forcetargets):
                self.left = self._left()
        for line in plan.notes(self.needs):
            print(line, file=sys.stderr)
        self._ask()
        if self.options.budget_gpu_hours is not None:
            explain.check_budget(explain.document(self.registry, self.needs), self.options.budget_gpu_hours)
        self._count_gpus()
        settings.forcerun = {*settings.forcerun, *self.needs.stale}

    @property
    def all(self) -> list[str]:  # type: ignore[override]
        """What the rule `all` waits for. Where jobs are to run, or only listed, that is what is not there: Snakemake
        spends a millisecond on each. Its reports and summaries get all of it."""
        return self.declared if self.workflow.execution_settings is None else self.left

    def _left(self) -> list[str]:
        """Targets for which something is to be done; at least one: a rule without inputs would always run."""
        links = {target.path for target in plan.unpublished(self.registry, self.needs)}
        found = [
            path
            for path, artefact in self.needs.links.items()
            if path in links or path in self.needs.stale or artefact in self.needs.missing
        ]
        return found or self.declared[:1]

    def _ask(self) -> None:
        """Where nothing but a default in the code has changed, the user says what is to be done, before it is done."""
        if self.options.defaults == "new":
            return
        lines = [question for _, question in explain.questions(self.registry, self.needs)]
        if lines and not self.workflow.output_settings.dryrun:
            raise UserError("\n".join(lines))
        for line in lines:
            print(f"asks: {line}", file=sys.stderr)

    def about(self, stage: str, fingerprint: str) -> dict[str, Any]:
        work = self.registry.works.get((stage, fingerprint))
        if work is None:  # an older identity, asked for by its path in the store
            return super().about(stage, fingerprint)
        return {"parents": work.parents, "resources": work.resources, "config": work.config}

    def inputs(self, made: Artefact, parents: Callable[[], Iterable[Artefact]]) -> list[str]:
        """What is there and whole waits for nothing: identity is in the path, no time stamp of a parent ever counts."""
        if made not in self.needs.missing and os.path.isfile(made.output):
            return []
        return [self.needs.source(parent) for parent in parents()]

    def published(self, leaf: str) -> Callable[[Any], Any]:
        """Input function of a publishing rule: the manifest of the artefact that its link stands for."""

        def inputs(wildcards: Any) -> list[str]:
            target = self._target(leaf, wildcards)
            artefact = self.registry.artefact(target)
            links = self.registry.links(target)
            if os.path.isfile(artefact.output) and all(publish.points(link, to) for link, to in links.items()):
                return []
            return [self.needs.source(artefact)]

        return of_wildcards(inputs)

    def link(self, leaf: str) -> Callable[[Any], str]:
        """Parameter of a publishing rule: `<link> <destination>` as hex digits, of all that is published with it."""

        def arguments(wildcards: Any) -> str:
            target = self._target(leaf, wildcards)
            pairs = self.registry.links(target).items()
            return " ".join(f"{publish.encode(link)} {publish.encode(to.as_posix())}" for link, to in pairs)

        return of_wildcards(arguments)

    def _target(self, leaf: str, wildcards: Any) -> Target:
        path = f"{OUTPUTS}/" + leaf.format(**dict(wildcards.items()))
        return self.targets.get(path) or self.registry.target(path)

    def start(self) -> None:
        """Before the first job, never in a dry run: write the specifications, show where the work can be followed."""
        or_leave(self._start)

    def _start(self) -> None:
        state, difference = code_state()
        moment = {"planned_at": _now(), "code": state}
        if (
            difference
            and len(difference) <= LARGEST_DIFF
            and not (kept := card.DIFFS / f"{state['dirty']}.diff").is_file()
        ):
            write_bytes(kept, difference)
        trained: list[str] = []
        for job in self.workflow.dag.needrun_jobs():
            stage = RULES.get(job.rule.name)
            work = stage and self.registry.works.get((stage, job.wildcards.fp))
            if work:
                store.write_spec(work.spec(sorted(self.needs.steps.get(work.fingerprint, ())), moment))
                trained += work.facts["runs"] if stage == "train" else ()
                if self.options.retry_failed and stage == "train":
                    failure.forgive(work.artefact("checkpoint", 0).folder)
        self.registry.cache.save()
        asked = dict.fromkeys(target.run for target in self.needs.targets)
        cells = [run.name for run in self.registry.runs.values() if run.grid in asked]
        for name in dict.fromkeys([*(name for name in asked if name in self.registry.runs), *trained, *cells]):
            work = self.registry.work(name)
            folder = work.artefact("checkpoint", 0).folder if work.stage == "train" else None
            if folder and (name in asked or folder.is_dir()):
                for leaf in WORKING:
                    link = Path(OUTPUTS) / name / leaf
                    if name in asked or not publish.obstacle(link):  # what nobody asked for stops nothing
                        (folder / leaf).mkdir(parents=True, exist_ok=True)
                        publish.publish(link, folder / leaf)

    def after_error(self) -> None:
        """Cells that failed for good in this build are not waited for: where nothing else is left to do for a grid's
        report, it is made now."""
        try:
            registry, ready = Registry.load(), []
            for path in [target.path for target in self.needs.targets if target.kind == "grid"]:
                needs = plan.needs(registry, [path])
                rules = {job.rule for job in plan.jobs(registry, needs)}
                if needs.failed.keys() - self.needs.failed.keys() and rules <= {"grid", *plan.GRID_RULES}:
                    ready.append(path)
        except UserError:  # what has become of the files meanwhile
            return
        if ready:
            print(f"without the cells that failed: {', '.join(ready)}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "snakemake", "-s", self.workflow.main_snakefile, "-c", "1", *ready]
            subprocess.run([*command, "--quiet", "all"], check=False)

    def threads(self, stage: str) -> Any:
        """The number itself where all jobs of the stage take the same: thousands of calls less."""
        found = {resources["threads"] for resources in self._resources(stage)}
        return found.pop() if len(found) == 1 else super().threads(stage)

    def resource(self, stage: str, name: str) -> Any:
        """On a cluster no job takes GPUs of this machine. What all jobs of the stage share stands for itself."""
        of, small = ("train", True) if stage == "export" else (stage, False)
        found = {slurm_resources(wanted, small)[name] for wanted in self._resources(of)}
        if name == "local_gpus" and found != {0}:
            gpus = lambda wildcards: self.about(stage, wildcards.fp)["resources"]["gpus"]  # noqa: E731
            return of_wildcards(lambda wildcards: gpus(wildcards) if self.workflow.local_exec else 0)
        return found.pop() if len(found) == 1 else super().resource(stage, name)

    def _resources(self, stage: str) -> list[dict[str, Any]]:
        """What the jobs of a stage take, of all that the project declares."""
        if stage == "eval":
            return self.registry.evaluation_resources()
        return [work.resources for work in self.registry.works.values() if work.stage == stage]

    def _count_gpus(self) -> None:
        """On this machine jobs share its GPUs, unless the user gave `--resources local_gpus=N`. A job that wants more
        than there are is let through: its own message is the clearer one."""
        there = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if there and "local_gpus" not in self.workflow.global_resources:
            wanted = [work.resources["gpus"] for work in self.registry.works.values()]
            self.workflow.register_resource("local_gpus", max(there, *wanted))


def of_wildcards(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a rule's wildcards that says so: Snakemake asks for a signature at each of its calls."""
    function.__signature__ = WILDCARDS  # type: ignore[attr-defined]
    return function


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


def code_state() -> tuple[dict[str, Any], bytes | None]:
    """`({commit, dirty}, difference)` of the project.

    `dirty` is a hash over what differs from the commit (None: nothing, or no git), `difference` what that is.
    """

    def git(*arguments: str) -> bytes | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, difference = git("rev-parse", "HEAD"), git("diff", "HEAD")
    others = git("ls-files", "-z", "--others", "--exclude-standard", "--", ".", f":!{OUTPUTS}", ":!.snakemake")
    if commit:
        difference = (difference or b"") + _untracked([os.fsdecode(name) for name in (others or b"").split(b"\0")[:-1]])
    dirty = hash_bytes(difference)[:16] if difference else None
    return {"commit": commit.decode().strip() if commit else None, "dirty": dirty}, difference


def _untracked(names: list[str]) -> bytes:
    """A line for each file that git does not know: name, size, hash while all together are small. No text of them: a
    card goes where weights go, and a file that is not under version control may hold secrets."""
    lines, room = [], LARGEST_DIFF
    for name in sorted(names):
        try:
            size = os.lstat(name).st_size
            seen = size <= room and os.path.isfile(name)
            content = hash_bytes(Path(name).read_bytes())[:16] if seen else "not read"
        except OSError:
            continue  # deleted meanwhile, or may not be read
        room -= size * seen
        lines.append(f"untracked: {name!r}, {size} bytes, {content}\n")
    return "".join(lines).encode()


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
    """Do `work`; a user's mistake becomes `error: …` lines and the end of this process, see `leave`."""
    try:
        return work()
    except Exception as error:
        leave(error)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
