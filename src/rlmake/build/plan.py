"""What a set of targets needs: walked from the targets down, stopping at what is finished and whole.

The walk is what Snakemake cannot do by itself: it looks at the files behind manifests and at the links in front of
them, finds to which step each training must go, and which runs have failed for good. Snakemake makes the jobs.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlmake.build import failure, publish, store
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry, Work
from rlmake.build.store import Artefact
from rlmake.core.errors import ConfigError, Fault, UserError
from rlmake.core.rundir import numbered


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
    stale: dict[Path, str] = field(default_factory=dict)
    links: dict[Path, Artefact] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def source(self, artefact: Artefact) -> Path:
        """The manifest that stands for an artefact as an input in this plan.

        One job trains a run to the highest step asked for and finishes the earlier ones on its way: what needs an
        earlier step waits for that job. A step that the run has passed without keeping it is made by a job of its own.
        """
        if artefact.kind != "checkpoint" or artefact not in self.missing:
            return artefact.manifest_path
        assert artefact.step is not None
        if progress(artefact.folder) >= artefact.step:
            return artefact.manifest_path
        top = max(self.steps[artefact.fingerprint])
        return Artefact(artefact.stage, artefact.fingerprint, artefact.kind, top).manifest_path


def progress(folder: Path) -> int:
    """The last step of a training that has a COMPLETE record, 0 when none."""
    steps = [step for step, path in numbered(folder / "checkpoints").items() if (path / "COMPLETE").is_file()]
    return max(steps, default=0)


def targets_of_all(registry: Registry, include_manual: bool = False) -> list[str]:
    """What `all` builds: of every run that is not manual its last artefact, its evaluations and its report."""
    found = []
    for run in registry.runs.values():
        if run.manual and not include_manual:
            continue
        found.append(Target(run.name, "data" if run.stage == "data" else "weights").path)
        found += [Target(run.name, "eval", suite=suite).path for suite in run.evals]
        if run.stage == "train":
            found.append(Target(run.name, "report").path)
    return found


def needs(registry: Registry, asked: Iterable[str], *, everything: bool = False, retry: bool = False) -> Needs:
    """Walk from the targets `asked` (paths below `outputs/`).

    Raises `ConfigError` with all faults: unknown targets, real directories in a link's place, runs that failed for
    good. With `everything` (`all`) failed runs and what rests on them are left out and noted instead.
    """
    walk = _Walk(registry, retry)
    faults: list[Fault] = []
    for path in asked:
        try:
            target = registry.target(path)
            if target.rest:
                raise UserError(f"{path}: ask for the whole artefact, {target.path}")
            if why := publish.obstacle(Path(path)):
                raise UserError(why)
            artefact = registry.artefact(target)
            failed = walk.failures(artefact)
            if failed:
                walk.found.failed |= failed
                if everything:
                    continue
                run, why = next(iter(failed.items()))
                raise UserError(f"{path}: {run} {why}; change its configuration, or retry with --config retry_failed=1")
        except ConfigError as error:
            faults += error.faults
            continue
        except UserError as error:
            faults.append(Fault(str(error)))
            continue
        walk.need(artefact)
        walk.found.targets.append(target)
        link = Path(target.path)
        walk.found.links[link] = artefact
        if link.is_symlink() and not publish.points(link, artefact.path):
            walk.found.stale[link] = "the link points elsewhere"
        elif link.is_symlink() and not artefact.manifest_path.is_file():
            walk.found.stale[link] = "there is no manifest behind the link"
    if faults:
        raise ConfigError(dict.fromkeys(faults))
    return walk.found


class _Walk:
    def __init__(self, registry: Registry, retry: bool):
        self.registry, self.retry = registry, retry
        self.found = Needs()
        self._failures: dict[Artefact, dict[str, str]] = {}

    def need(self, artefact: Artefact) -> None:
        if artefact in self.found.whole or artefact in self.found.missing:
            return
        faults = self._faults(artefact)
        if faults == []:
            self.found.whole.add(artefact)
            return
        self.found.missing.add(artefact)
        if faults:
            self.found.stale[artefact.manifest_path] = faults[0]
        if artefact.kind == "checkpoint":
            assert artefact.step is not None
            self.found.steps.setdefault(artefact.fingerprint, set()).add(artefact.step)
        for parent in self._parents(artefact):
            self.need(parent)

    @staticmethod
    def _faults(artefact: Artefact) -> list[str] | None:
        """None: not declared. Else what is wrong with its files."""
        if not artefact.manifest_path.is_file():
            return None
        try:
            return store.faults(artefact, store.read_manifest(artefact.manifest_path))
        except UserError as error:
            return [str(error)]

    def _parents(self, artefact: Artefact) -> list[Artefact]:
        if artefact.stage == "train" and artefact.kind == "weights":
            return [Artefact("train", artefact.fingerprint, "checkpoint", artefact.step)]
        return [store.artefact_of(parent) for parent in self._work(artefact).parents]

    def _work(self, artefact: Artefact) -> Work:
        return self.registry.works[artefact.stage, artefact.fingerprint]

    def failures(self, artefact: Artefact) -> dict[str, str]:
        """`{run: failure}` of terminal failures that an artefact which is not there would run into."""
        if self.retry:
            return {}
        if artefact not in self._failures:
            found: dict[str, str] = {}
            if self._faults(artefact) != []:
                noted = failure.read(artefact.folder) if artefact.stage == "train" else None
                if noted:
                    found[self._work(artefact).facts["runs"][0]] = failure.describe(noted)
                for parent in self._parents(artefact):
                    found |= self.failures(parent)
            self._failures[artefact] = found
        return self._failures[artefact]


def say(found: Needs) -> None:
    """Print what a user should know besides the jobs."""
    for path, reason in found.stale.items():
        if not path.is_symlink():
            print(f"damaged: {reason}; {path.relative_to(OUTPUTS)} is made again", file=sys.stderr)
    for run, why in found.failed.items():
        print(f"failed: {run} {why}; left out, retry with --config retry_failed=1", file=sys.stderr)
