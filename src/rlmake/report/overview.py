"""`rlmake overview`: several built runs on one page, each before and after its training, with what it learned.

rlmake overview algorithms --out outputs/algorithms.html      every built run below experiments/algorithms/
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake import __version__
from rlmake.build.names import OUTPUTS
from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_bytes
from rlmake.report import collect
from rlmake.report.charts import Line, curve, intervals
from rlmake.report.collect import Evaluated
from rlmake.report.html import Html, join, page, table, tag
from rlmake.report.numbers import fixed

REWARD = (r"reward/all/mean",)


@dataclass(frozen=True)
class Learned:
    """One training and one evaluation of it: of the weights that it began with, and of its own."""

    run: str
    algorithm: str
    before: Evaluated
    after: Evaluated
    rewards: collect.Points
    online: dict[str, collect.Points]

    @property
    def shown(self) -> bool:
        """The 95 % interval ends above the start's score; a score that is exact has no interval, and is above it."""
        low = self.after.interval[0] if self.after.interval else self.after.mean
        return low > self.before.mean


def overview(argv: list[str]) -> int:
    """Several built runs on one page: evaluations before and after each, and how the reward went in training."""
    parser = argparse.ArgumentParser(prog="rlmake overview", description=overview.__doc__)
    parser.add_argument("runs", nargs="+", help="runs, or folders of experiments/ whose built runs are meant")
    parser.add_argument("--out", required=True, type=Path, help="the page to write")
    args = parser.parse_args(argv)
    found, missing = find(args.runs)
    if not found:
        hint = f"; build one with: snakemake -c all {OUTPUTS}/{missing[0]}/report.html" if missing else ""
        raise UserError(f"{', '.join(args.runs)}: no run with evaluations before and after it is built{hint}")
    write_bytes(args.out, render(", ".join(args.runs), found).encode(errors="replace"))
    for one in found:
        print(f"{one.run:<40} {one.after.suite:<18} {_score(one.before)} → {_score(one.after)}  {_verdict(one)}")
    for run in missing:
        print(f"{run:<40} not built")
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
        run, before = registry.runs[name], registry.before(name)
        if run.kind != "rl" or before is None:
            continue
        learned = [one for suite in run.evals for one in _learned(registry, name, before, suite)]
        found += learned
        missing += [] if learned else [name]
    return found, missing


def _learned(registry: Any, name: str, before: str, suite: str) -> list[Learned]:
    work = registry.work(name)
    evals = []
    for of in (before, name):
        report = registry.evaluation(suite, of).artefact().folder / "report.json"
        if not report.is_file():
            return []
        evals.append({"suite": suite, "of": of, "step": registry.work(of).last_step, "report": report})
    rows = collect.metrics(work.artefact("checkpoint", 0).folder, work.last_step)
    sources = work.config["orchestrator"]["train"]["source"]
    algorithm = " + ".join(dict.fromkeys(source["algo"]["type"] for source in sources))
    pairs = collect.evaluations(evals, [before, name]).values()
    return [
        Learned(name, algorithm, *pair, collect.find(rows, REWARD), collect.online_evaluations(rows))
        for pair in pairs
        if len(pair) == 2
    ]


def render(title: str, found: list[Learned]) -> str:
    """The page: a table of all, then a card each."""
    good = sum(one.shown for one in found)
    lead = (
        "Held-out reward of the weights that each training began with and of its own, with 95 % intervals over tasks. "
        "Learned: the interval ends above the start's mean. A reward that is computed exactly has no interval."
    )
    rows = [
        [one.run, one.algorithm, one.after.env, one.after.step, _score(one.before), _score(one.after), _verdict(one)]
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
    runs = [(one.before, "before"), (one.after, "after")]
    shown = [(part.name, part.mean, part.interval, cls) for part, cls in runs]
    ends = [value for _, mean, interval, _ in shown for value in (mean, *(interval or ()))]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
    charts = [curve(f"Evaluation of {env}", [Line(env, points)], noisy=False) for env, points in one.online.items()]
    if one.rewards and not charts:
        charts = [curve("Reward in training", [Line("reward", one.rewards)])]
    caption = tag("figcaption", tag("span", f"{one.run} · {one.algorithm}", cls="name"), tag("span", _verdict(one)))
    return tag("div", caption, intervals(shown, low, high), charts, cls="card evaluation")


def _score(one: Evaluated) -> str:
    if one.interval is None:
        return fixed(one.mean)
    return f"{fixed(one.mean)} ({fixed(one.interval[0])} to {fixed(one.interval[1])})"


def _verdict(one: Learned) -> Html:
    return tag("span", "yes" if one.shown else "no", cls="good" if one.shown else "bad")


VERBS = {"overview": overview}
