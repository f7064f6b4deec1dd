"""`make soak [KILLS=n]`: kill runs with SIGKILL at random moments of many kinds, and see that nothing of it shows.

    python tests/soak/soak.py [--kills 60] [--seed 0] [--keep DIR] [sft] [rl]

The reference is trained once and never killed. The other run is killed, continued by the same command, killed again …,
and in the end trained to its last step. A kill has passed when every checkpoint behind it is the reference's, byte for
byte: weights, optimizer, random generators, loader or orchestrator state, ledger; an export that was killed, when the
next one gives the reference's bytes. In the end loss trace and ledger are compared as a whole.
"""

import argparse
import dataclasses
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import compare
from loguru import logger
from moments import Kill, Moment

from rlmake import checkpoint
from rlmake.core.jsonio import list_files
from rlmake.core.rundir import step_dir

TRIES = 8


@dataclass
class Row:
    """A kill and its verdict: None while no checkpoint behind it was seen."""

    run: str
    number: int
    kill: Kill
    resumed: int
    reached: int = 0
    verdict: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.run:<9} {self.number:>3}  {self.kill.kind:<12} from step {self.resumed:>3}, newest then "
            f"{self.reached:>3}  {self.verdict:<6}  {self.kill}"
        )


@dataclass
class Soak:
    """One run under kills. `start(run, steps, resume, attempt, kill) -> exit code`, 0 or −9."""

    name: str
    root: Path
    moments: list[Moment]
    start: Callable[..., int]
    export: Callable[..., int]
    steps: int
    rng: random.Random
    rows: list[Row] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    attempts: int = 0

    @property
    def reference(self) -> Path:
        return self.root / f"{self.name}-reference"

    @property
    def run(self) -> Path:
        return self.root / f"{self.name}-killed"

    def go(self, kills: int) -> list[Row]:
        began = time.monotonic()
        assert self.start(self.reference, self.steps, None, 1, None) == 0
        last = step_dir(self.reference, self.steps)
        assert self.export(last, self.root / f"{self.name}-export", None) == 0
        print(f"{self.name}: reference of {self.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        kinds = [self.moments[i % len(self.moments)] for i in range(kills)]
        self.rng.shuffle(kinds)
        exports = [moment for moment in kinds if moment.kind == "export"]
        for moment in (moment for moment in kinds if moment.kind != "export"):
            self.kill(moment)
        self.attempt(None)
        self.judge(whole=True)
        for moment in exports:
            self.kill_export(moment)
        return self.rows

    def kill(self, moment: Moment) -> None:
        """One attempt that is killed at such a moment; drawn again when the run gets to its end before it comes."""
        kill = moment.draw(self.rng)
        row = Row(self.name, len(self.rows) + 1, kill, checkpoint.newest(self.run) or 0)
        code = self.attempt(kill)
        row.reached = checkpoint.newest(self.run) or 0
        if code == 0:
            row.verdict = "missed"  # the process ended first: no kill, so neither passed nor failed
        self.judge()
        self.rows.append(row)
        print(f"  kill {row.number}: {kill}", flush=True)

    def attempt(self, kill: Kill | None) -> int:
        newest = checkpoint.newest(self.run)
        if newest == self.steps:
            return 0
        self.attempts += 1
        return self.start(self.run, self.steps, newest, self.attempts, kill)

    def judge(self, whole: bool = False) -> None:
        """Give verdicts to the kills before the checkpoints that are new."""
        new = [step for step in checkpoint.steps(self.run) if step not in self.seen]
        self.seen |= set(new)
        odd = [text for step in new for text in self.faults(step)]
        if whole:
            odd += compare.whole(self.reference, self.run, self.steps)
        if not new and not whole:
            return
        for row in self.rows:
            if row.verdict is None:
                row.verdict = "FAILED" if odd else "passed"
        for text in odd:
            print(f"  DIFFERS: {text}", flush=True)
        if odd and not whole:
            shutil.move(self.run / "checkpoints", self.run / f"odd-{len(self.rows)}")
            for step in (step for step in checkpoint.steps(self.reference) if step <= max(new)):
                # So that the next kill is judged by itself.
                shutil.copytree(step_dir(self.reference, step), step_dir(self.run, step))

    def faults(self, step: int) -> list[str]:
        if faults := checkpoint.verify(step_dir(self.run, step)):
            return faults
        return [f"step {step}: {name}" for name in compare.differences(self.reference, self.run, step)]

    def kill_export(self, moment: Moment) -> None:
        """An export killed half-way never looks finished; the next one gives the reference's bytes, and no rest."""
        out, killed, kill = self.root / f"{self.name}-out" / "weights", False, moment.draw(self.rng)
        for _ in range(TRIES):
            shutil.rmtree(out.parent, ignore_errors=True)
            if killed := self.export(step_dir(self.run, self.steps), out, kill) != 0:
                break
            kill = dataclasses.replace(kill, delay=kill.delay / 2)  # it was done before that
        row = Row(self.name, len(self.rows) + 1, kill, self.steps, self.steps)
        whole = list_files(self.root / f"{self.name}-export")
        sound = not out.exists() or list_files(out) == whole
        self.export(step_dir(self.run, self.steps), out, None)
        sound &= list_files(out) == whole and [path.name for path in out.parent.iterdir()] == ["weights"]
        row.verdict = ("passed" if sound else "FAILED") if killed else "missed"
        self.rows.append(row)


def of_sft(root: Path, kills: int, rng: random.Random, lora: bool) -> list[Row]:
    import sft

    places = sft.prepare(root / f"sft-{lora}")
    steps = sft.STEPS_A_KILL * max(kills, 1)

    def start(run: Path, steps: int, resume: int | None, attempt: int, kill: Kill | None) -> int:
        checkpoint.prune_future(run, resume or 0)  # as the launcher does
        cfg = sft.config(places, run, steps, lora, resume)
        if "reference" in run.name:
            cfg.ckpt.keep_last = None
        return sft.attempt(cfg, attempt, kill)

    def export(folder: Path, out: Path, kill: Kill | None) -> int:
        return sft.export(folder, out, lora, kill)

    moments = [
        Moment(m.kind, "rlmake.export.merge:export", m.calls, m.seconds) if lora and m.kind == "export" else m
        for m in sft.MOMENTS
    ]
    return Soak("sft-lora" if lora else "sft-full", root, moments, start, export, steps, rng).go(kills)


def of_rl(root: Path, kills: int, rng: random.Random) -> list[Row]:
    import rl

    places = rl.prepare(root / "rl")
    steps = max(8, rl.STEPS_A_KILL * kills + rl.INTERVAL)

    def start(run: Path, steps: int, resume: int | None, attempt: int, kill: Kill | None) -> int:
        return rl.attempt(places, run, steps, resume, kill, keep_all="reference" in run.name)

    return Soak("rl", root, rl.MOMENTS, start, rl.export, steps, rng).go(kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=["sft", "rl", []], help="default: both")
    parser.add_argument("--kills", type=int, default=60, help="two thirds of them SFT")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another one each time")
    parser.add_argument("--keep", type=Path, help="folder to work in and leave behind")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    logger.remove()  # checkpoints that a kill left unfinished are expected here
    print(f"soak: {arguments.kills} kills, --seed {seed}", flush=True)
    root = arguments.keep or Path(tempfile.mkdtemp(prefix="rlmake-soak-"))
    root.mkdir(parents=True, exist_ok=True)
    rng, what, rows = random.Random(seed), arguments.what or ["sft", "rl"], []
    of_the_first = -(-arguments.kills * 2 // 3) if len(what) == 2 else arguments.kills
    try:
        if "sft" in what:
            rows += of_sft(root, -(-of_the_first // 2), rng, lora=False)
            rows += of_sft(root, of_the_first // 2, rng, lora=True)
        if "rl" in what:
            rows += of_rl(root, arguments.kills - of_the_first if "sft" in what else arguments.kills, rng)
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
    return report(rows)


def report(rows: list[Row]) -> int:
    print()
    for row in rows:
        print(row)
    count = Counter(row.verdict for row in rows)
    print()
    if count["missed"]:
        print(f"{count['missed']} moments did not come before the process had ended: no kill")
    print(f"{count['passed']} passed, {count['FAILED']} failed")
    return 1 if count["FAILED"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
