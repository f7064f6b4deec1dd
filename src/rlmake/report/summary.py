"""`rlmake summary`: a run in three lines, what the evaluations say before and after it, and where its weights are."""

from pathlib import Path

import msgspec

from rlmake.build.experiments import FOLDER
from rlmake.core import jsonio
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError, nearest


class _Reward(msgspec.Struct):
    mean: float | None
    ci95: tuple[float, float] | None


class _Env(msgspec.Struct):
    reward: _Reward


class _Report(msgspec.Struct):
    envs: dict[str, _Env]


def summary(argv: list[str]) -> int:
    """A run in three lines: an evaluation of the run it came from, the same of its own weights, where they are."""
    parser = ArgumentParser(prog="rlmake summary", description=summary.__doc__)
    parser.add_argument("run", help="a built run")
    parser.add_argument("--before", required=True, help="the run to compare with")
    parser.add_argument("--suite", required=True, help="the suite that both were evaluated on")
    args = parser.parse_args(argv)
    root = Path("outputs")
    for run in (args.before, args.run):
        cells = sorted(path.name for path in (root / run).glob("*=*") if path.is_dir())
        if cells and not (root / run / "evals").exists():
            raise UserError(f"{run}: is a grid; name one of its cells, as {run}/{cells[0]}")
        declared = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml")}
        if not (root / run).exists() and not declared & {run, Path(run).parent.as_posix()}:
            raise UserError(f"{run}: no run{nearest(run, declared)}")
    runs = {"reward before": args.before, "reward after": args.run}
    rewards = {label: _reward(root / run / "evals" / args.suite) for label, run in runs.items()}
    weights, report = root / args.run / "weights", root / args.run / "report.html"
    if not weights.exists():
        raise _not_there(weights)
    if report.exists():
        print(f"report          {report}")
    for label, run in runs.items():
        print(f"{label:<15} {rewards[label]}   {run}, held-out, suite {args.suite}")
    print(f"weights         {weights}")
    return 0


def _not_there(target: Path) -> UserError:
    return UserError(f"{target}: is not there; build it, or link what is in the store, with: snakemake -c all {target}")


def _reward(evaluation: Path) -> str:
    path = evaluation / "report.json"
    if not path.exists():
        raise _not_there(evaluation)
    parts = []
    for name, env in jsonio.read_record(path, _Report)["envs"].items():
        mean, label = env["reward"]["mean"], f"{name} " if parts else ""
        if mean is None:
            parts.append(f"{label}–")
            continue
        low, high = env["reward"]["ci95"] or (mean, mean)
        parts.append(f"{label}{mean:.3f} (95 % {low:.3f} to {high:.3f})")
    return ", ".join(parts)
