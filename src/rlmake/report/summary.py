"""`rlmake summary`: a run in three lines, what the evaluations say before and after it, and where its weights are."""

from pathlib import Path

from rlmake.core import jsonio
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError


def summary(argv: list[str]) -> int:
    """A run in three lines: an evaluation of the run it came from, the same of its own weights, where they are."""
    parser = ArgumentParser(prog="rlmake summary", description=summary.__doc__)
    parser.add_argument("run", help="a built run")
    parser.add_argument("--before", required=True, help="the run to compare with")
    parser.add_argument("--suite", required=True, help="the suite that both were evaluated on")
    args = parser.parse_args(argv)
    root = Path("outputs")
    print(f"report          {root / args.run / 'report.html'}")
    for label, run in (("reward before", args.before), ("reward after", args.run)):
        print(f"{label:<15} {_reward(root / run / 'evals' / args.suite)}   {run}, held-out, suite {args.suite}")
    weights = root / args.run / "weights"
    if not weights.exists():
        raise UserError(f"{weights}: not built; build it with: snakemake -c all {weights}")
    print(f"weights         {weights}")
    return 0


def _reward(evaluation: Path) -> str:
    path = evaluation / "report.json"
    if not path.exists():
        raise UserError(f"{evaluation}: not built; build it with: snakemake -c all {evaluation}")
    parts = []
    for name, env in jsonio.read_json(path)["envs"].items():
        low, high = env["reward"]["ci95"] or (env["reward"]["mean"],) * 2
        label = f"{name} " if parts else ""
        parts.append(f"{label}{env['reward']['mean']:.3f} (95 % {low:.3f} to {high:.3f})")
    return ", ".join(parts)
