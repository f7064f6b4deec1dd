"""Sample rollouts: the same tasks before and after, side by side."""

from rlmake.evals.records import EpisodeRecord
from rlmake.report.collect import Evaluated
from rlmake.report.html import Html, tag
from rlmake.report.numbers import fixed

SHOWN = 6
LONGEST = 4000  # characters of one text


def rollouts(evaluations: dict[tuple[str, str], list[Evaluated]]) -> Html | None:
    """A few tasks per environment, spread over how much they changed; None where there are no episodes."""
    parts = []
    for (suite, env), runs in evaluations.items():
        first, last = runs[0], runs[-1]
        tasks = _pick(first, last)
        if tasks:
            cards = [_card(task, first if len(runs) > 1 else None, last) for task in tasks]
            parts.append(tag("h3", f"{suite} · {env}" if suite != env else suite))
            parts.append(cards)
    if not parts:
        return None
    lead = "The same tasks before and after, first sample of each, spread from the largest gain to the largest loss."
    return tag("section", tag("h2", "Rollouts"), tag("p", lead, cls="lead"), *parts, id="rollouts")


def _by_task(one: Evaluated) -> dict[str, EpisodeRecord]:
    """The first episode of each task."""
    found: dict[str, EpisodeRecord] = {}
    for row in one.episodes:
        found.setdefault(row.key, row)
    return found


def _pick(first: Evaluated, last: Evaluated) -> list[str]:
    before, after = _by_task(first), _by_task(last)
    tasks = sorted(before.keys() & after.keys())
    tasks.sort(key=lambda task: before[task].reward - after[task].reward)
    if len(tasks) <= SHOWN:
        return tasks
    return [tasks[round(n * (len(tasks) - 1) / (SHOWN - 1))] for n in range(SHOWN)]


def _card(task: str, before: Evaluated | None, after: Evaluated) -> Html:
    said = [_said(one, _by_task(one)[task], cls) for one, cls in ((before, ""), (after, " after")) if one]
    asked = tag("div", tag("pre", _cut(_by_task(after)[task].prompt)), cls="prompt")
    return tag("article", asked, tag("div", *said, cls="two"), cls="card rollout")


def _said(one: Evaluated, row: EpisodeRecord, cls: str) -> Html:
    """What the policy said last, with the reward."""
    marks = [
        mark
        for mark, there in (("cut off", row.truncated), ("timed out", row.timeout), (row.error, row.error))
        if there
    ]
    head = tag(
        "div",
        tag("span", one.name),
        tag("span", *(f"{mark} · " for mark in marks), "reward ", tag("b", fixed(row.reward))),
        cls="who",
    )
    shown = tag("pre", _cut(row.reply)) if row.reply else tag("p", "said nothing", cls="soft")
    return tag("div", head, shown, cls=f"said{cls}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + f" … ({len(text) - LONGEST:,} more characters)"
