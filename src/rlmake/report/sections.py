"""The sections of a run's page. Each takes what it shows and returns HTML, or None where there is nothing to show."""

from pathlib import Path
from typing import Any

from rlmake.evals.paired import Paired
from rlmake.monitors import Row
from rlmake.report import charts, collect
from rlmake.report.collect import Evaluated
from rlmake.report.facts import ReportFacts
from rlmake.report.html import Html, join, table, tag
from rlmake.report.numbers import clock, duration, fixed, number, signed

Evaluations = dict[tuple[str, str], list[Evaluated]]
KINDS = {
    "sft": "supervised fine-tuning",
    "rl": "reinforcement learning",
    "data": "data",
    "init": "new model",
    "import": "import",
}


def header(facts: ReportFacts) -> Html:
    kind = facts.spec.get("kind", "")
    made = _last_manifest(facts).get("ended")
    items = [
        ("step", number(facts.step)),
        ("fingerprint", tag("code", facts.spec["fingerprint"]) if facts.spec.get("fingerprint") else None),
        ("finished", clock(made) if made else None),
    ]
    return tag(
        "header",
        tag("p", f"Run report · {KINDS.get(kind, kind)}" if kind else "Run report", cls="eyebrow"),
        tag("h1", facts.name),
        tag("p", [tag("span", name, " ", tag("b", value)) for name, value in items if value is not None], cls="facts"),
    )


def headline(facts: ReportFacts, rows: list[Row], evaluations: Evaluations) -> Html:
    """A wide tile with what the run was for, and up to four smaller ones."""
    numbers = summary(rows, evaluations)
    reward, loss = numbers.get("reward"), numbers.get("loss")
    if "after" in numbers:
        gain = numbers.get("gain")
        note = f"{numbers['suite']}, mean over {number(numbers['tasks'])} tasks"
        note += f"; paired difference {signed(gain['mean'])}{_plus(gain['ci95'])}" if gain else ""
        hero = _tile("Evaluation reward", _change(numbers.get("before"), numbers["after"], 3), note, " hero")
    elif reward or loss:
        name, ends = ("Reward in training", reward) if reward else ("Loss", loss)
        hero, reward, loss = _tile(name, _change(*ends, 3), "first to last step", " hero"), None, None
    else:
        hero = None
    seconds = _training_seconds(facts, rows)
    if "mismatch_kl" in numbers:  # the value of a policy-gradient loss says nothing
        loss = None
    small = [
        _tile("Reward in training", _change(*reward, 2), "first to last step") if reward else None,
        _tile("Loss", _change(*loss, 2), "first to last step") if loss else None,
        _tile("Mismatch KL", _unit(numbers.get("mismatch_kl"), "nats"), "last step; trainer against sampler"),
        _tile("Throughput", _unit(numbers.get("throughput"), "tokens/s"), "trainer, median step"),
        _tile("Training time", None if seconds is None else duration(seconds), f"{number(facts.step)} steps"),
    ]
    return tag("div", hero, small, cls="tiles")


def _tile(name: str, value: Any, note: str, cls: str = "") -> Html | None:
    if value is None:
        return None
    return tag("div", tag("p", name, cls="name"), tag("p", value, cls="value"), tag("p", note), cls=f"card tile{cls}")


def _change(first: float | None, last: float, places: int) -> Html:
    before = tag("span", f"{fixed(first, places)} → ", cls="from") if first is not None else None
    return join([before, fixed(last, places)])


def _unit(value: float | None, unit: str) -> Html | None:
    return None if value is None else join([number(value), tag("small", f" {unit}")])


def summary(rows: list[Row], evaluations: Evaluations) -> dict[str, Any]:
    """The page's headline numbers: those of the first suite's first environment, and the ends of the main curves."""
    found: dict[str, Any] = {}
    for runs in list(evaluations.values())[:1]:
        last = runs[-1]
        found |= {"suite": last.suite, "after": last.mean, "tasks": last.summary.get("num_tasks")}
        if len(runs) > 1:
            found["before"] = runs[0].mean
            if gain := collect.compared(runs[0], last):
                found["gain"] = {"mean": gain.difference, "ci95": gain.ci95, "tasks": gain.num_tasks}
    for name, curve in (("reward", collect.RL_CURVES[0]), ("loss", collect.RL_CURVES[1])):
        if points := collect.find(rows, curve.keys):
            found[name] = (points[0][1], points[-1][1])
    if points := collect.find(rows, (r"mismatch_kl/all/mean",)):
        found["mismatch_kl"] = points[-1][1]
    if points := sorted(value for _, value in collect.find(rows, (r"perf/throughput",))):
        found["throughput"] = points[len(points) // 2]
    return found


def evaluation(evaluations: Evaluations) -> Html | None:
    """Per suite and environment: means with intervals, the paired difference, and the table behind them."""
    if not evaluations:
        return None
    cards = []
    for (suite, env), runs in evaluations.items():
        shown = [(one.name, one.mean, one.interval, "after" if one is runs[-1] else "before") for one in runs]
        ends = [value for _, mean, interval, _ in shown for value in (mean, *(interval or ()))]
        low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else (min(ends), max(ends))
        gain = collect.compared(runs[0], runs[-1]) if len(runs) > 1 else None
        cards.append(
            tag(
                "div",
                tag("figcaption", tag("span", f"{suite} · {env}" if suite != env else suite, cls="name"), _gain(gain)),
                charts.intervals(shown, low, high),
                _table(runs),
                cls="card evaluation",
            )
        )
    lead = "Mean reward with 95 % intervals over tasks. The gain compares the same tasks one by one."
    return tag("section", tag("h2", "Evaluation"), tag("p", lead, cls="lead"), cards, id="evaluation")


def _gain(gain: Paired | None) -> Html | None:
    if gain is None:
        return None
    cls = "soft" if not gain.excludes_zero else "good" if gain.difference > 0 else "bad"
    return tag(
        "span", f"paired difference {signed(gain.difference)}{_plus(gain.ci95)} on {gain.num_tasks} tasks", cls=cls
    )


def _plus(interval: list[float] | None) -> str:
    return f" (95 % {signed(interval[0])} to {signed(interval[1])})" if interval else ""


def _table(runs: list[Evaluated]) -> Html:
    wanted = [key for key in runs[-1].summary if key.startswith(("avg@", "pass@", "pass^"))]
    rows = []
    for one in runs:
        entry = one.summary
        interval = f"{fixed(one.interval[0])} – {fixed(one.interval[1])}" if one.interval else "–"
        rows.append(
            [one.name, fixed(one.mean), interval, *(_cell(entry.get(key)) for key in wanted)]
            + [_cell(entry.get(key)) for key in ("num_tasks", "num_episodes", "truncated", "timeouts", "failed")]
        )
    return table(
        ["weights of", "reward", "95 %", *wanted, "tasks", "episodes", "cut off", "timed out", "failed"],
        rows,
        "numbers",
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("mean", sum(v for v in value.values() if isinstance(v, int | float)))
    return number(value) if isinstance(value, int | float) else "–" if value is None else str(value)


def training(facts: ReportFacts, rows: list[Row]) -> Html | None:
    kind = facts.spec.get("kind")
    cards = _cards(collect.SFT_CURVES if kind == "sft" else collect.RL_CURVES, rows)
    cards += [
        charts.curve(f"Evaluation: {env}", [charts.Line(env, points)])
        for env, points in collect.online_evaluations(rows).items()
    ]
    if not cards:
        return None
    last = max(row.step for row in rows)
    attempts = max(row.attempt for row in rows)
    lead = (
        f"{number(last)} steps"
        + (f" in {attempts} attempts" if attempts > 1 else "")
        + ". Point at a curve to read it."
    )
    return tag(
        "section", tag("h2", "Training"), tag("p", lead, cls="lead"), tag("div", cards, cls="grid"), id="training"
    )


def earlier_training(facts: ReportFacts) -> Html | None:
    """Curves of the trainings that the run began from."""
    parts = []
    for row in facts.lineage[:-1]:
        folder = collect.run_dir_of(row)
        rows = collect.metrics(folder, row["step"]) if folder else []
        if cards := _cards((collect.SFT_CURVES if row.get("kind") == "sft" else collect.RL_CURVES)[:3], rows):
            parts += [tag("h3", f"{row['name']} · {KINDS.get(row.get('kind'), '')}"), tag("div", cards, cls="grid")]
    return tag("section", tag("h2", "Before this run"), *parts, id="before") if parts else None


def _cards(curves: tuple[collect.Curve, ...], rows: list[Row]) -> list[Html]:
    cards = []
    for curve in curves:
        if points := collect.find(rows, curve.keys, curve.producer):
            cards.append(
                charts.curve(curve.title, [charts.Line(curve.title, points)], curve.unit, curve.note, curve.noisy)
            )
    return cards


def time_spent(facts: ReportFacts, rows: list[Row]) -> Html | None:
    """Time per stage, and where the steps of this run went."""
    last = facts.lineage[-1] if facts.lineage else None
    stages = [
        (name, seconds, duration(seconds), "after" if last and name == last["name"] else "before")
        for name, seconds in collect.stages(facts.lineage, facts.evals)
    ]
    steps = [*_step_parts(rows, "trainer"), *_step_parts(rows, "orch")]
    cards = []
    if stages:
        total = sum(seconds for _, seconds, _, _ in stages)
        cards.append(tag("div", _caption("Stages", duration(total)), charts.bars(stages), cls="card"))
    if steps:
        cards.append(tag("div", _caption("Inside this run, all steps", ""), charts.bars(steps), cls="card"))
    if not cards:
        return None
    return tag("section", tag("h2", "Time"), tag("div", cards, cls="two", style="margin-top:1rem"), id="time")


WORDS = {
    "forward_backward": "forward and backward", "wait_for_batch": "waiting for a batch",
    "broadcast_weights": "sending weights", "save_ckpt": "saving checkpoints", "load_data": "loading data",
    "wait_for_policy": "waiting for weights", "pack": "packing",
}  # fmt: skip


def _step_parts(rows: list[Row], producer: str) -> list[tuple[str, float, str, str]]:
    """Sums over all steps of a producer's `time/<part>`, the largest first; what is too short to see is left out."""
    who, cls = {"trainer": ("trainer", "after"), "orch": ("orchestrator", "before")}[producer]
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.metrics.items():
            room, _, part = key.partition("/")
            if row.producer == producer and room == "time" and part != "step" and "/" not in part:
                sums[part] = sums.get(part, 0.0) + value
    found = [
        (f"{who}: {WORDS.get(part, part.replace('_', ' '))}", value) for part, value in sums.items() if value > 0.05
    ]
    return [(name, value, duration(value), cls) for name, value in sorted(found, key=lambda row: -row[1])]


def _caption(name: str, value: str) -> Html:
    return tag("figcaption", tag("span", name, cls="name"), tag("span", value, cls="value"))


def configuration(spec: dict[str, Any]) -> Html | None:
    """What the experiment set, then every field that counts for the result, then the whole resolved configuration."""
    semantic, everything = (dict(_leaves(spec[key])) if spec.get(key) else {} for key in ("semantic", "config"))
    defaults = spec.get("defaults") or {}
    own = {key: value for key, value in semantic.items() if key not in defaults} if semantic else everything
    if not own:
        return None
    rest = {key: value for key, value in everything.items() if key not in own}
    parts = [tag("div", _settings(own), cls="card")]
    if rest:
        parts.append(
            tag("details", tag("summary", f"All other settings ({len(rest)})"), tag("div", _settings(rest), cls="card"))
        )
    lead = (
        "Settings that change the result and differ from their defaults." if semantic else "The resolved configuration."
    )
    return tag("section", tag("h2", "Configuration"), tag("p", lead, cls="lead"), *parts, id="configuration")


def _settings(values: dict[str, Any]) -> Html:
    rows = [
        [tag("code", key), tag("code", "None" if value is None else str(value))]
        for key, value in sorted(values.items())
    ]
    return table([], rows, "settings")


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values; tables inside lists count their place."""
    if isinstance(tree, dict) and tree:
        return [
            leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for n, item in enumerate(tree) for leaf in _leaves(item, f"{prefix}.{n}")]
    return [(prefix, tree)]


def lineage(facts: ReportFacts) -> Html | None:
    if not facts.lineage:
        return None
    cards = []
    for row in facts.lineage:
        made = collect.manifest(row) or {}
        pairs = [
            ("fingerprint", tag("code", row.get("fingerprint"))),
            ("content", tag("code", made["content"][:16]) if made.get("content") else None),
            ("step", number(row["step"]) if row.get("step") is not None else None),
            ("took", duration(collect.seconds(made)) if collect.seconds(made) is not None else None),
            ("GPU-hours", number(made["gpu_hours"]) if made.get("gpu_hours") is not None else None),
            ("made", clock(made["ended"]) if made.get("ended") else None),
        ]
        kind = KINDS.get(row.get("kind"), row.get("stage", ""))
        cards.append(
            tag("li", tag("p", kind, cls="kind"), tag("p", row["name"], cls="name"), _pairs(pairs), cls="card")
        )
    lead = "What this run was made from, oldest first."
    return tag(
        "section", tag("h2", "Lineage"), tag("p", lead, cls="lead"), tag("ol", cards, cls="lineage"), id="lineage"
    )


def provenance(facts: ReportFacts) -> Html | None:
    """Commit, versions, hardware and revisions, as the manifest recorded them."""
    made = _last_manifest(facts)
    code = made.get("code") or facts.spec.get("code") or {}
    pairs: list[tuple[str, Any]] = []
    if code.get("commit"):
        dirty = code.get("dirty")
        pairs.append(
            ("commit", join([tag("code", str(code["commit"])[:12]), " with uncommitted changes" if dirty else ""]))
        )
    for title, key in (("versions", "versions"), ("hardware", "hardware")):
        value = made.get(key)
        if isinstance(value, dict):
            parts = (f"{name} {_listed(part)}" for name, part in value.items() if part not in (None, "", []))
            pairs.append((title, ", ".join(parts)))
        elif value:
            pairs.append((title, str(value)))
    for name, value in (facts.spec.get("revisions") or {}).items():
        pairs.append((f"revision of {name}", tag("code", str(value)[:24])))
    pairs.append(("run directory", tag("code", Path(facts.run_dir).as_posix())))
    return tag(
        "section",
        tag("h2", "Provenance"),
        tag("div", _pairs(pairs, "pairs"), cls="card", style="margin-top:1rem"),
        id="provenance",
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(pairs: list[tuple[str, Any]], cls: str | None = None) -> Html:
    return tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None], cls=cls)


def _last_manifest(facts: ReportFacts) -> dict[str, Any]:
    return (collect.manifest(facts.lineage[-1]) if facts.lineage else None) or {}


def _training_seconds(facts: ReportFacts, rows: list[Row]) -> float | None:
    """Recorded by the manifest, else the sum of the trainer's step times."""
    made = _last_manifest(facts)
    steps = collect.find(rows, (r"time/step",), "trainer")
    recorded = collect.seconds(made)
    return recorded if recorded is not None else sum(value for _, value in steps) if steps else None
