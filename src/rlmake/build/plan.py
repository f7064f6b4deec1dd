"""What a set of targets needs: walked from the targets down, stopping at what is finished and whole.

The walk is what Snakemake cannot do by itself: it looks at the files behind manifests and at the links in front of
them, finds to which step each training must go, and which runs have failed for good. Snakemake makes the jobs.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlmake.build import publish, store
from rlmake.build.names import EXPORTS, GRID_FILES, OUTPUTS, Target
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.core.errors import ConfigError, Fault, UserError


@dataclass
class Needs:
    """Outcome of the walk.

    `whole`: artefacts that are there with all their files. `steps`: training fingerprint → steps to be made.
    `stale`: declared outputs (manifests, links) that exist but must be made again, with the reason of each.
    `links`: link → artefact of every target. `failed`: run → its terminal failure in words.
    """

    targets: list[Target] = field(default_factory=list)
    whole: set[Artefact] = field(default_factory=set)
    missing: set[Artefact] = field(default_factory=set)
    steps: dict[str, set[int]] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)
    links: dict[str, Artefact] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def source(self, artefact: Artefact) -> str:
        """The declared manifest that stands for an artefact as an input in this plan.

        One job trains a run to the highest step asked for and finishes the earlier ones on its way: what needs an
        earlier step waits for that job. A step that the run has passed without keeping it is made by a job of its own.
        """
        if artefact.kind != "checkpoint" or artefact not in self.missing:
            return artefact.output
        assert artefact.step is not None
        if store.progress(artefact.folder) >= artefact.step:
            return artefact.output
        return self.last(artefact).output

    def last(self, checkpoint: Artefact) -> Artefact:
        """The checkpoint of the highest step that is asked for of a training."""
        return store.artefact("train", checkpoint.fingerprint, "checkpoint", max(self.steps[checkpoint.fingerprint]))


def targets_of_all(registry: Registry, include_manual: bool = False) -> list[str]:
    """What `all` builds: of every run that is not manual its last artefact, its evaluations and its report; and the
    reports of grids."""
    found = []
    for run in registry.runs.values():
        if run.manual and not include_manual:
            continue
        found.append(Target(run.name, "data" if run.stage == "data" else "weights").path)
        found += [Target(run.name, "eval", suite=suite).path for suite in run.evals]
        if run.stage == "train":
            found.append(Target(run.name, "report").path)
    for grid, manual in registry.grids.items():
        if include_manual or not manual:
            found += [Target(grid, "grid", rest=leaf).path for leaf in GRID_FILES]
    return found


def needs(registry: Registry, asked: Iterable[str], *, everything: bool = False) -> Needs:
    """Walk from the targets `asked` (paths below `outputs/`).

    Raises `ConfigError` with all faults: unknown targets, real directories in a link's place, runs that failed for
    good. With `everything` (`all`) failed runs and what rests on them are left out and noted instead.
    """
    walk, clear = _Walk(registry), set[str]()
    faults: list[Fault] = []
    for path in asked:
        try:
            target = registry.target(path)
            if target.inside:
                raise UserError(f"{path}: ask for the whole artefact, {target.path}")
            for link in registry.links(target) if target.kind == "grid" else [path]:
                if why := publish.obstacle(link, clear):
                    raise UserError(why)
            artefact = registry.artefact(target)
            if target.kind == "grid":
                walk.found.failed |= registry.reports.failed_cells(target.run)
            if failed := registry.failure(artefact):
                run, why = failed
                walk.found.failed[run] = why
                if everything:
                    continue
                raise UserError(f"{path}: {run} {why}; change its configuration, or retry with --config retry_failed=1")
        except ConfigError as error:
            faults += error.faults
            continue
        except UserError as error:
            faults.append(Fault(str(error)))
            continue
        walk.need(artefact)
        walk.found.targets.append(target)
        link = target.path
        walk.found.links[link] = artefact
        if os.path.islink(link):
            if apart := [one for one, to in registry.links(target).items() if not publish.points(one, to)]:
                beside = "" if link in apart else f" of {apart[0].rpartition('/')[2]} beside it"
                walk.found.stale[link] = f"the link{beside} points elsewhere"
            elif not os.path.isfile(artefact.output):
                walk.found.stale[link] = "there is no manifest behind the link"
    if faults:
        raise ConfigError(dict.fromkeys(faults))
    return walk.found


class _Walk:
    def __init__(self, registry: Registry):
        self.registry = registry
        self.found = Needs()

    def need(self, artefact: Artefact) -> None:
        if artefact in self.found.whole or artefact in self.found.missing:
            return
        faults = self._faults(artefact)
        if faults == []:
            self.found.whole.add(artefact)
            return
        self.found.missing.add(artefact)
        if faults:
            self.found.stale[artefact.output] = faults[0]
        if artefact.kind == "checkpoint":
            assert artefact.step is not None
            self.found.steps.setdefault(artefact.fingerprint, set()).add(artefact.step)
        for parent in self.registry.parents(artefact):
            self.need(parent)

    @staticmethod
    def _faults(artefact: Artefact) -> list[str] | None:
        """None: not declared. Else what is wrong with its files."""
        if not os.path.isfile(artefact.output):
            return None
        try:
            found = store.faults(artefact, store.read_brief(artefact.output))
            if not found and not store.same_file(artefact):
                store.read_brief(artefact.done_path)
            return found
        except UserError as error:
            return [str(error)]


@dataclass(frozen=True)
class PlannedJob:
    """One job of a plan: the rule of the Snakefile, the output that it declares, and what that makes."""

    rule: str
    output: str
    artefact: Artefact
    target: Target | None = None  # of a job that publishes


RULE_OF = {
    "data": "data", "model": "model", "eval": "evaluate", "parity": "parity", "best": "best", "report": "report",
    "grid": "grid",
}  # fmt: skip
GRID_RULES = ("publish_report", "publish_results")
EXPORT_RULE = {"checkpoint": "train", "weights": "export", "weights-FP8": "export_fp8", "adapter": "export_adapter"}


def rule_of(artefact: Artefact) -> str:
    """The rule of the Snakefile that makes an artefact."""
    return EXPORT_RULE[artefact.kind] if artefact.stage == "train" else RULE_OF[artefact.stage]


def publishing_rule(target: Target) -> str:
    """The rule of the Snakefile that makes a target's link."""
    if target.kind in EXPORTS:
        kind = {"weights": "weights", "weights-FP8": "fp8", "adapter": "adapter"}[target.kind]
        return f"publish_{kind}" if target.step is None else f"publish_{kind}_of_step"
    return {
        "data": "publish_data",
        "best": "publish_best",
        "checkpoint": "publish_checkpoint",
        "eval": "publish_evaluation" if target.step is None else "publish_evaluation_of_step",
        "parity": "publish_parity",
        "report": "publish_report",
        "grid": GRID_RULES[target.rest != "report.html"],
    }[target.kind]


def jobs(registry: Registry, found: Needs) -> list[PlannedJob]:
    """The jobs that Snakemake makes of these needs, parents first, links last; a test compares the two lists."""
    made: dict[str, PlannedJob] = {}
    place = {unit: index for index, unit in enumerate(registry.works)}

    def order(artefact: Artefact) -> tuple[Any, ...]:
        """By stage, then as declared."""
        declared = place[artefact.stage, artefact.fingerprint]
        return store.STAGES.index(artefact.stage), artefact.kind != "checkpoint", declared, artefact.kind, artefact.step

    for artefact in sorted(found.missing, key=order):
        output = found.source(artefact)
        if output not in made:
            artefact = artefact if output == artefact.output else found.last(artefact)
            made[output] = PlannedJob(rule_of(artefact), output, artefact)
    links = [
        PlannedJob(publishing_rule(target), target.path, found.links[target.path], target)
        for target in unpublished(registry, found)
    ]
    return [*_in_order(registry, list(made.values())), *dict.fromkeys(links)]


def unpublished(registry: Registry, found: Needs) -> list[Target]:
    """The targets whose link is to be made."""
    targets = []
    for target in found.targets:
        there = os.path.isfile(found.links[target.path].output)
        there = there and all(publish.points(link, to) for link, to in registry.links(target).items())
        if not there or not os.path.exists(target.path):  # a link to a file that was lost counts as missing
            targets.append(target)
    return targets


def _in_order(registry: Registry, planned: list[PlannedJob]) -> list[PlannedJob]:
    """Every job behind those that it waits for, otherwise as they came."""
    by_unit: dict[tuple[str, str], list[PlannedJob]] = {}
    for job in planned:
        by_unit.setdefault((job.artefact.stage, job.artefact.fingerprint), []).append(job)
    done: dict[PlannedJob, None] = {}

    def place(job: PlannedJob) -> None:
        if job in done:
            return
        for parent in registry.parents(job.artefact):
            for other in by_unit.get((parent.stage, parent.fingerprint), ()):
                if other.artefact.kind == parent.kind and other is not job:
                    place(other)
        done[job] = None

    for job in planned:
        place(job)
    return list(done)


def notes(found: Needs) -> list[str]:
    """What a user should know besides the jobs, one line each."""
    lines = [
        f"damaged: {reason}; {path.removeprefix(f'{OUTPUTS}/')} is made again"
        for path, reason in found.stale.items()
        if not os.path.islink(path)
    ]
    return lines + [
        f"failed: {run} {why}; left out, retry with --config retry_failed=1" for run, why in found.failed.items()
    ]
