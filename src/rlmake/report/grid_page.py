"""The page of a grid: variants compared, curves laid over one another, every cell, what it cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmake import __version__
from rlmake.core.jsonio import write_bytes, write_json
from rlmake.report import charts, collect
from rlmake.report import grid as numbers_of
from rlmake.report.grid import GridFacts, Results, Variant
from rlmake.report.html import Html, join, page, tag
from rlmake.report.numbers import duration, fixed, number, signed

FILES = ["report.html", "results.csv", "results.json"]
COLOURS = 12  # classes v0 … v11 of the style sheet


def make(out: Path, facts: GridFacts) -> dict[str, Any]:
    """Write `out/report.html`, `results.csv` and `results.json`. Returns facts for the manifest."""
    found = numbers_of.results(facts)
    body = tag(
        "main",
        _header(found),
        _tiles(found),
        _comparison(found),
        _curves(found),
        _cells(found),
        tag("footer", f"Made by rlmake {__version__}. This page stands alone: it loads nothing."),
    )
    write_json(out / "results.json", numbers_of.as_json(found))
    write_bytes(out / "results.csv", numbers_of.as_csv(found).encode())
    write_bytes(out / "report.html", page(f"{facts.name} · rlmake", join([body])).encode(errors="replace"))
    states = [cell.state for cell in found.cells]
    return {"cells": len(states), **{state: states.count(state) for state in ("done", "failed", "missing")}}


def _header(found: Results) -> Html:
    axes = [tag("span", key.rpartition(".")[2], " ", tag("b", ", ".join(_texts(found, key)))) for key in found.axes]
    return tag(
        "header",
        tag("p", "Grid report", cls="eyebrow"),
        tag("h1", found.facts.name),
        tag("p", axes, cls="facts"),
    )


def _texts(found: Results, key: str) -> list[str]:
    return list(dict.fromkeys(cell.facts.texts[key] for cell in found.cells if key in cell.facts.texts))


def _tiles(found: Results) -> Html:
    done = sum(cell.state == "done" for cell in found.cells)
    lost = [f"{n} {state}" for state in ("failed", "missing") if (n := sum(c.state == state for c in found.cells))]
    gpu_hours, hours = numbers_of.totals(found.cells)
    tiles = []
    if found.metrics and (best := _best(found)):
        metric = found.metrics[0]
        entry = best.metrics[metric]
        note = f"{metric}: {best.name}; {_over(entry)}"
        tiles.append(_tile("Best mean", join([fixed(entry["mean"])]), note, " hero"))
    tiles.append(_tile("Cells", f"{done} of {len(found.cells)}", ", ".join(lost) or "all done"))
    tiles.append(_tile("Variants", str(len(found.variants)), "cells that differ in their seed alone are one"))
    tiles.append(_tile("GPU-hours", number(gpu_hours), "of all trainings, repeated ones once"))
    tiles.append(_tile("Time", duration(hours * 3600), "of all trainings, one after the other"))
    return tag("div", tiles, cls="tiles")


def _best(found: Results) -> Variant | None:
    metric = found.metrics[0]
    ranked = [variant for variant in found.variants if metric in variant.metrics]
    pick = min if "loss" in metric else max
    return pick(ranked, key=lambda variant: variant.metrics[metric]["mean"], default=None)


def _tile(name: str, value: Any, note: str, cls: str = "") -> Html:
    return tag("div", tag("p", name, cls="name"), tag("p", value, cls="value"), tag("p", note), cls=f"card tile{cls}")


def _over(entry: dict[str, Any]) -> str:
    what = entry.get("over", "seeds")
    what = what.removesuffix("s") if entry["n"] == 1 else what
    interval = entry["ci95"]
    return f"{entry['n']} {what}" + (f", 95 % {fixed(interval[0])} to {fixed(interval[1])}" if interval else "")


def _comparison(found: Results) -> Html | None:
    """A row per variant: means of all metrics with intervals over seeds, and the paired difference to the baseline."""
    if not found.metrics:
        return None
    base = found.baseline
    axes = [key for key in found.axes if not numbers_of.is_seed(key)]
    head = ["", *(key.rpartition(".")[2] for key in axes), "seeds"]
    for metric in found.metrics:
        head += [metric, *(["against the baseline"] if base else [])]
    rows = []
    for index, variant in enumerate(found.variants):
        name = tag("span", "", cls=f"key v{index % COLOURS}")
        cells = [_td(join([name, "baseline" if variant.baseline else ""]), index)]
        cells += [_td(variant.texts.get(key, "–")) for key in axes]
        cells.append(_td(f"{len(variant.done)} of {len(variant.cells)}", len(variant.done)))
        for metric in found.metrics:
            entry = variant.metrics.get(metric)
            cells.append(_td(_amount(entry), entry["mean"] if entry else None))
            if base:
                change = variant.differences.get(metric)
                cells.append(_td(_gain(change, metric), change["mean"] if change else None))
        rows.append(tag("tr", cells, cls="baseline" if variant.baseline else None))
    lead = "Mean and 95 % interval over seeds. Click a column's head to sort." + (
        f" Differences are paired with {base.name}: seed by seed, or task by task where there is one seed."
        if base
        else ""
    )
    parts = [tag("h2", "Comparison"), tag("p", lead, cls="lead"), tag("div", _sortable(head, rows), cls="card")]
    if len(found.variants) > 1 and (bars := _intervals(found)):
        parts.append(bars)
    return tag("section", parts, id="comparison")


def _intervals(found: Results) -> Html | None:
    """The first metric's means with their intervals on one axis."""
    metric = found.metrics[0]
    shown = [
        (variant.name, entry["mean"], entry["ci95"], f"v{index % COLOURS}")
        for index, variant in enumerate(found.variants)
        if (entry := variant.metrics.get(metric))
    ]
    ends = [value for _, mean, interval, _ in shown for value in (mean, *(interval or ()))]
    if not ends:
        return None
    low, high = min(ends), max(ends)
    caption = tag("figcaption", tag("span", metric, cls="name"))
    return tag("div", caption, charts.intervals(shown, low, high), cls="card evaluation", style="margin-top:.9rem")


def _amount(entry: dict[str, Any] | None) -> Html | str:
    if entry is None:
        return "–"
    interval = entry["ci95"]
    return join(
        [fixed(entry["mean"]), tag("small", f" {fixed(interval[0])} – {fixed(interval[1])}") if interval else ""]
    )


def _gain(change: dict[str, Any] | None, metric: str) -> Html | str:
    if change is None:
        return "–"
    interval = change["ci95"]
    clear = interval is not None and not interval[0] <= 0 <= interval[1]
    better = (change["mean"] < 0) == ("loss" in metric)
    cls = ("good" if better else "bad") if clear else "soft"
    span = f" {signed(interval[0])} to {signed(interval[1])}" if interval else ""
    over = change["over"].removesuffix("s") if change["n"] == 1 else change["over"]
    return tag("span", signed(change["mean"]), tag("small", f"{span} ({change['n']} {over})"), cls=cls)


def _curves(found: Results) -> Html | None:
    """Per metric one chart: thin lines are cells, thick ones the means of variants with several."""
    curves = collect.SFT_CURVES if found.facts.kind == "sft" else collect.RL_CURVES
    cards = []
    for curve in curves:
        lines = []
        for index, variant in enumerate(found.variants):
            colour, group = f"v{index % COLOURS}", str(index)
            several = len(variant.cells) > 1
            for cell in variant.cells:
                if points := collect.find(cell.rows, curve.keys, curve.producer):
                    lines.append(charts.Line(cell.facts.name, points, f"{colour}{' faint' if several else ''}", group))
            if several and (mean := numbers_of.mean_curve(variant.cells, curve.keys, curve.producer)):
                lines.append(charts.Line(f"{variant.name}, mean", mean, colour, group))
        if lines:
            cards.append(charts.overlay(curve.title, lines, curve.unit, curve.note))
    if not cards:
        return None
    keys = [
        tag("label", tag("input", type="checkbox", checked="", data_group=str(index)), _key(index, variant.name))
        for index, variant in enumerate(found.variants)
    ]
    lead = "Thin lines are cells, thick ones means over seeds. Point at a line to read it; switch variants on and off."
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("p", lead, cls="lead"),
        tag("p", keys, cls="switches"),
        tag("div", cards, cls="two"),
        id="curves",
    )


def _key(index: int, name: str) -> Html:
    return tag("span", name, cls=f"key v{index % COLOURS}")


def _cells(found: Results) -> Html:
    head = [
        "cell",
        *(key.rpartition(".")[2] for key in found.axes),
        "state",
        "steps",
        *found.metrics,
        "GPU-hours",
        "time",
    ]
    rows = []
    for cell in found.cells:
        facts = cell.facts
        state = tag("span", cell.state, cls={"done": "good", "failed": "bad", "missing": "soft"}[cell.state])
        cells = [_td(tag("code", facts.name), facts.name)]
        cells += [_td(facts.texts.get(key, "–")) for key in found.axes]
        why = tag("small", f" {facts.why}") if facts.why and facts.why != "not built" else None
        cells += [_td(join([state, why]), cell.state), _td(number(cell.steps), cell.steps)]
        cells += [_td(number(cell.metrics.get(name)), cell.metrics.get(name)) for name in found.metrics]
        cells.append(_td(number(cell.gpu_hours), cell.gpu_hours))
        cells.append(_td(duration(None if cell.hours is None else cell.hours * 3600), cell.hours))
        rows.append(tag("tr", cells, cls=cell.state))
    lead = "Every run of the grid with what it differs in. The same as results.csv and results.json beside this page."
    table = tag("div", _sortable(head, rows), cls="card")
    return tag("section", tag("h2", "Cells"), tag("p", lead, cls="lead"), table, id="cells")


def _td(content: Any, value: Any = None) -> Html:
    """A cell of a table with what it is sorted by: a number, or its own text."""
    if value is None:
        try:
            value = float(str(content))
        except ValueError:
            value = None
    return tag("td", content, data_value=None if value is None else str(value))


def _sortable(head: Sequence[str], rows: list[Html]) -> Html:
    top = tag(
        "thead",
        tag("tr", [tag("th", tag("button", name, type="button") if name else "", scope="col") for name in head]),
    )
    return tag("div", tag("table", top, tag("tbody", rows), cls="sortable"), cls="scroll")
