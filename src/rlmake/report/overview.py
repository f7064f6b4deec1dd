"""`rlmake overview`: several built runs on one page, each before and after its training, with what it learned.

rlmake overview algorithms --out outputs/algorithms.html      every built run below experiments/algorithms/
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake import __version__
from rlmake.build.names import OUTPUTS
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_bytes
from rlmake.monitors import series
from rlmake.report import collect
from rlmake.report.charts import Line, curve, intervals
from rlmake.report.html import Html, join, page, table, tag
from rlmake.report.numbers import fixed


@dataclass(frozen=True)
class Score:
    """A held-out mean reward and its 95 % interval; None where the reward is exact."""

    of: str
    mean: float
    interval: list[float] | None


@dataclass(frozen=True)
class Learned:
    """One training on one evaluation: the weights that it began with, and its own. `curve` is (title, points)."""

    run: str
    algorithm: str
    on: str
    step: int
    before: Score
    after: Score
    curve: tuple[str, collect.Points]

    @property
    def shown(self) -> bool:
        """The interval ends above the start's score; a score that is exact is above it."""
        low = self.after.interval[0] if self.after.interval else self.after.mean
        return low > self.before.mean


def overview(argv: list[str]) -> int:
    """Several built runs on one page: evaluations before and after each, and how the reward went in training."""
    parser = ArgumentParser(prog="rlmake overview", description=overview.__doc__)
    parser.add_argument("runs", nargs="+", help="runs, or folders of experiments/ whose built runs are meant")
    parser.add_argument("--out", required=True, type=Path, help="the page to write")
    args = parser.parse_args(argv)
    found, missing = find(args.runs)
    if not found:
        hint = f"; build one with: snakemake -c all {OUTPUTS}/{missing[0]}/report.html" if missing else ""
        raise UserError(f"{', '.join(args.runs)}: no run that was evaluated at its start and its end is built{hint}")
    write_bytes(args.out, render(", ".join(args.runs), found).encode(errors="replace"))
    for one in found:
        print(f"{one.run:<32} {one.on:<22} {_score(one.before)} → {_score(one.after)}  {_yes(one)}")
    for run in missing:
        print(f"{run:<32} not built")
    print(f"page {args.out}")
    return 0


def find(wanted: list[str]) -> tuple[list[Learned], list[str]]:
    """What was learned by the trainings among `wanted` (runs or folders), and the runs that are not built."""
    from rlmake.build.registry import Registry

    registry = Registry.load()
    names = [run for run in registry.runs if any(run == one or run.startswith(f"{one.rstrip('/')}/") for one in wanted)]
    if not names:
        raise UserError(f"{', '.join(wanted)}: no run or folder below experiments/ has this name")
    found, missing = [], []
    for name in names:
        run, before = registry.runs[name], registry.reports.before(name)
        if run.kind != "rl" or before is None:
            continue
        learned = _learned(registry, name, before)
        found += learned
        missing += [] if learned else [name]
    return found, missing


def _learned(registry: Any, name: str, before: str) -> list[Learned]:
    """By the evaluations that the training made itself, at its start and its end, and by the run's suites."""
    work = registry.work(name)
    rows = collect.metrics(work.artefact("checkpoint", 0).folder, work.last_step)
    sources = work.config["orchestrator"]["train"]["source"]
    algorithm = " + ".join(dict.fromkeys(source["algo"]["type"] for source in sources))
    found = []
    for env, points in collect.online_evaluations(rows).items():
        if points[0][0] == 0 and points[-1][0] == work.last_step:
            first, last = _online(rows, env, before, 0), _online(rows, env, name, work.last_step)
            curve = (f"Evaluation of {env}", points) if len(points) > 2 else ("Reward in training", _reward(rows, env))
            found.append(Learned(name, algorithm, env, work.last_step, first, last, curve))
    for suite in registry.runs[name].evals:
        reports = [registry.evaluation(suite, of).artefact().folder / "report.json" for of in (before, name)]
        if all(report.is_file() for report in reports):
            first, last = (read_json(report)["envs"] for report in reports)
            for env in last:
                pair = [
                    Score(of, e[env]["reward"]["mean"], e[env]["reward"]["ci95"])
                    for of, e in ((before, first), (name, last))
                ]
                curve = ("Reward in training", collect.find(rows, (r"reward/all/mean",)))
                found.append(Learned(name, algorithm, f"{suite}: {env}", work.last_step, *pair, curve))
    return found


def _online(rows: list[Any], env: str, of: str, step: int) -> Score:
    values = {
        key: dict(series(rows, f"eval/{env}/reward/{key}")).get(step) for key in ("mean", "ci95_low", "ci95_high")
    }
    low, high = values["ci95_low"], values["ci95_high"]
    return Score(of, values["mean"], None if low is None or high is None else [low, high])


def _reward(rows: list[Any], env: str) -> collect.Points:
    """Training's reward on the environment of that name, else on all."""
    return collect.find(rows, (rf"reward/{re.escape(env)}/mean", r"reward/all/mean"))


def render(title: str, found: list[Learned]) -> str:
    """The page: a table of all, then a card each."""
    good = sum(one.shown for one in found)
    lead = (
        "Held-out reward of the weights that each training began with and of its own, with 95 % intervals over tasks. "
        "Learned: the interval ends above the start's mean. A reward that is computed exactly has no interval."
    )
    rows = [
        [one.run, one.algorithm, one.on, one.step, _score(one.before), _score(one.after), _verdict(one)]
        for one in found
    ]
    head = ["run", "algorithm", "evaluated on", "steps", "before", "after", "learned"]
    body = tag(
        "main",
        tag("header", tag("h1", title), tag("p", f"{good} of {len(found)} evaluations show learning", cls="facts")),
        tag("section", tag("h2", "Before and after"), tag("p", lead, cls="lead"), table(head, rows, "numbers")),
        tag("section", tag("h2", "Runs"), tag("div", [_card(one) for one in found], cls="two")),
        tag("footer", f"Made by rlmake {__version__}. This page stands alone: it loads nothing."),
    )
    return page(f"{title} · rlmake", join([body]))


def _card(one: Learned) -> Html:
    shown = [(part.of, part.mean, part.interval, cls) for part, cls in ((one.before, "before"), (one.after, "after"))]
    ends = [value for _, mean, interval, _ in shown for value in (mean, *(interval or ()))]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
    title, points = one.curve
    chart = curve(title, [Line(title, points)], noisy=False) if points else None
    caption = tag("figcaption", tag("span", f"{one.run} · {one.algorithm} · {one.on}", cls="name"), _verdict(one))
    return tag("div", caption, intervals(shown, low, high), chart, cls="card evaluation")


def _score(one: Score) -> str:
    if one.interval is None:
        return fixed(one.mean)
    return f"{fixed(one.mean)} ({fixed(one.interval[0])} to {fixed(one.interval[1])})"


def _yes(one: Learned) -> str:
    return "learned" if one.shown else "not shown to learn"


def _verdict(one: Learned) -> Html:
    return tag("span", "yes" if one.shown else "no", cls="good" if one.shown else "bad")
