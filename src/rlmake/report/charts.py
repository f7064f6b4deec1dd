"""Charts as inline SVG. Without the page's script they are whole; with it they answer to the pointer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlmake.report.html import Html, tag, text
from rlmake.report.numbers import fixed, nice_ticks, number, tick_labels

WIDTH, HEIGHT = 360, 176  # units of the view box; a card is about as many pixels wide
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 8, 22
MAX_POINTS = 500


@dataclass(frozen=True)
class Line:
    """A series `[(step, value)]` with its name; `cls` names its colour in the style sheet. Lines of one `group` are
    switched on and off together."""

    name: str
    points: Sequence[tuple[float, float]]
    cls: str = "after"
    group: str | None = None


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points: means over runs of neighbours; the first and the last stay as they are."""
    if len(points) <= limit:
        return list(points)
    inner, buckets = points[1:-1], limit - 2
    out = [points[0]]
    for n in range(buckets):
        part = inner[n * len(inner) // buckets : (n + 1) * len(inner) // buckets]
        out.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return [*out, points[-1]]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Centred moving average over about a twelfth of the series, narrower towards its ends so that it never lags."""
    reach = max(len(points) // 24, 2)
    out = []
    for n, (x, _) in enumerate(points):
        half = min(reach, n, len(points) - 1 - n)
        part = points[n - half : n + half + 1]
        out.append((x, sum(y for _, y in part) / len(part)))
    return out


def curve(title: str, lines: Sequence[Line], unit: str = "", note: str = "", noisy: bool = True) -> Html:
    """A card with one small chart over steps; with the last value. Long `noisy` series get a smooth line too."""
    lines = [Line(line.name, thin(line.points), line.cls) for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    yticks, xticks = nice_ticks(min(ys), max(ys)), _step_ticks(min(xs), max(xs))
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_of = _scale(yticks[0], yticks[-1], HEIGHT - BOTTOM, TOP)
    parts = _axes(xticks, yticks, x_of, y_of)
    for line in lines:
        long = noisy and len(line.points) > 40
        parts.append(_path(line.points, x_of, y_of, f"line {line.cls}{' faint' if long else ''}"))
        if long:
            parts.append(_path(smooth(line.points), x_of, y_of, f"line {line.cls}"))
        if len(line.points) <= 25:
            parts += [
                tag("circle", cx=f"{x_of(x):.1f}", cy=f"{y_of(y):.1f}", r=2, cls=f"dot {line.cls}")
                for x, y in line.points
            ]
    data = [
        {
            "name": line.name,
            "cls": line.cls,
            "points": [[_short(x), _short(y), round(x_of(x), 1), round(y_of(y), 1)] for x, y in line.points],
        }
        for line in lines
    ]
    first, last = lines[0].points[0], lines[0].points[-1]
    label = f"{title}: {number(first[1])} at step {number(first[0])}, {number(last[1])} at step {number(last[0])}"
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
        data_lines=json.dumps(data),
        cls="curve",
    )
    heading = tag(
        "figcaption",
        tag("span", title, cls="name"),
        tag("span", number(last[1]), tag("small", f" {unit}") if unit else None, cls="value"),
    )
    legend = [tag("span", line.name, cls=f"key {line.cls}") for line in lines] if len(lines) > 1 else None
    foot = tag("p", legend, text(note) if note else None, cls="note") if legend or note else None
    return tag("figure", heading, svg, foot, cls="card chart")


def overlay(title: str, lines: Sequence[Line], unit: str = "", note: str = "") -> Html:
    """A card with many lines over steps, each read by pointing at it. Extremes beyond the bulk stay in the picture."""
    lines = [Line(line.name, thin(line.points), line.cls, line.group) for line in lines]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    yticks, xticks = nice_ticks(min(ys), max(ys)), _step_ticks(min(xs), max(xs))
    x_of = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_of = _scale(yticks[0], yticks[-1], HEIGHT - BOTTOM, TOP)
    parts = _axes(xticks, yticks, x_of, y_of)
    for line in sorted(lines, key=lambda line: "faint" not in line.cls):
        parts.append(_path(line.points, x_of, y_of, f"line {line.cls}", line.group))
        if len(line.points) == 1:
            (x, y), *_ = line.points
            parts.append(tag("circle", cx=f"{x_of(x):.1f}", cy=f"{y_of(y):.1f}", r=2, cls=f"dot {line.cls}"))
    data = [
        {
            "name": line.name,
            "cls": line.cls,
            "group": line.group,
            "points": [[_short(x), _short(y), round(x_of(x), 1), round(y_of(y), 1)] for x, y in line.points],
        }
        for line in lines
    ]
    label = f"{title}: {len(lines)} lines from step {number(min(xs))} to {number(max(xs))}"
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
        data_lines=json.dumps(data),
        cls="curve many",
    )
    heading = tag("figcaption", tag("span", title, cls="name"), tag("span", unit, cls="value"))
    return tag("figure", heading, svg, tag("p", note, cls="note") if note else None, cls="card chart")


def _axes(xticks: Sequence[float], yticks: list[float], x_of, y_of) -> list[Html]:
    """Rules and labels of both axes."""
    parts = []
    for value, label in zip(yticks, tick_labels(yticks), strict=True):
        y = f"{y_of(value):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="rule"))
        parts.append(tag("text", label, x=LEFT - 6, y=f"{y_of(value) + 3.5:.1f}", cls="tick end"))
    for value in xticks:
        parts.append(tag("text", number(value), x=f"{x_of(value):.1f}", y=HEIGHT - 6, cls="tick middle"))
    return parts


def intervals(rows: Sequence[tuple[str, float, Sequence[float] | None, str]], low: float, high: float) -> Html:
    """Means with 95 % intervals, rows of `(name, mean, [lo, hi] | None, cls)`, on one axis from `low` to `high`."""
    ticks = nice_ticks(low, high, 5)
    place = _scale(ticks[0], ticks[-1], 0.0, 100.0)

    def at(value: float) -> str:
        return f"left:{min(max(place(value), 0.0), 100.0):.2f}%"

    axis = [tag("i", style=at(tick), cls="rule") for tick in ticks]
    lines = []
    for name, mean, interval, cls in rows:
        whisker = None
        if interval is not None:
            wide = max(place(interval[1]) - place(interval[0]), 0.3)
            whisker = tag("i", style=f"{at(interval[0])};width:{wide:.2f}%", cls=f"whisker {cls}")
        track = tag("span", *axis, whisker, tag("i", style=at(mean), cls=f"mean {cls}"), cls="track")
        lines.append((tag("span", name, cls="name"), track, tag("b", fixed(mean), cls="amount")))
    scale = tag(
        "span",
        *(tag("small", label, style=at(tick)) for tick, label in zip(ticks, tick_labels(ticks), strict=True)),
        cls="scale",
    )
    return tag("div", lines, tag("span"), scale, tag("span"), cls="intervals")


def bars(rows: Sequence[tuple[str, float, str, str]]) -> Html:
    """Horizontal bars `(name, amount, shown, cls)`, lengths relative to the largest."""
    largest = max(amount for _, amount, _, _ in rows) or 1.0
    return tag(
        "div",
        [
            (
                tag("span", name, cls="name"),
                tag("span", tag("i", style=f"width:{max(100 * amount / largest, 0.4):.1f}%", cls=cls), cls="track"),
                tag("span", shown, cls="amount"),
            )
            for name, amount, shown, cls in rows
        ],
        cls="bars",
    )


def _step_ticks(low: float, high: float) -> list[float]:
    """Whole steps: round ones inside the range, and its ends where nothing round stands close."""
    inner = [tick for tick in nice_ticks(low, high, 5) if low <= tick <= high and float(tick).is_integer()]
    room = (high - low) * 0.08
    ends = [end for end in dict.fromkeys((low, high)) if all(abs(end - tick) > room for tick in inner)]
    return sorted({*inner, *ends})


def _scale(low: float, high: float, start: float, end: float):
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _path(points: Sequence[tuple[float, float]], x_of, y_of, cls: str, group: str | None = None) -> Html:
    steps = " L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in points)
    return tag("path", d=f"M{steps}", cls=cls, data_group=group)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
