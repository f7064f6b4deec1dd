"""report.html of an evaluation: one page that needs nothing else. Whatever comes from a model or a task is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlmake.evals.records import EpisodeRecord
from rlmake.evals.summary import SCORES

EXAMPLES = 40  # per environment: the worst and the best halves of what there is beyond
BINS = 20

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2530; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } .quiet { color: #5d6b7a; }
table { border-collapse: collapse; width: 100%; } .scroll { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #dde3ea; vertical-align: top; }
td.text { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; word-break: break-word; max-width: 24rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.note { background: #fff4d6; padding: .5rem .8rem; border-radius: .3rem; } .bad { color: #a3271f; }
svg rect { fill: #2f6fb3; } svg line { stroke: #9aa7b5; } svg text { font-size: 11px; fill: #5d6b7a; }
"""


def render(report: Mapping[str, Any], records: Sequence[EpisodeRecord]) -> str:
    """The page of a report and the records it was made from."""
    title = f"Evaluation {report['suite'] or ''} of {report['run'] or 'a model'}".replace("  ", " ")
    step = f" at step {report['model_step']}" if report["model_step"] is not None else ""
    facts = [("model fingerprint", report["model_fingerprint"]), ("seed", report["seed"])]
    facts += [(f"sampling.{key}", value) for key, value in report["sampling"].items()]
    line = ", ".join(f"{escape(key)} {escape(str(value))}" for key, value in facts if value is not None)
    parts = [f"<h1>{escape(title)}</h1><p class='quiet'>{escape(step.strip())} {line}</p>"]
    if report["partial"]:
        parts.append("<p class='note'>Partial: the evaluation was stopped before all episodes had ended.</p>")
    parts.append(_summary(report["envs"]))
    for name, entry in report["envs"].items():
        own = [record for record in records if record.env == name]
        parts.append(f"<h2>{escape(name)}</h2>{_numbers(entry)}{_histogram(own)}{_examples(own)}")
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _summary(envs: Mapping[str, Any]) -> str:
    head = ["environment", "tasks", "episodes", "reward", "95 % interval", "truncated", "timeouts", "failed"]
    rows = []
    for name, entry in envs.items():
        ci95 = entry["reward"]["ci95"]
        interval = f"{ci95[0]:.3f} … {ci95[1]:.3f}" if ci95 else "–"
        cells = [entry["num_tasks"], entry["num_episodes"], _fixed(entry["reward"]["mean"]), interval]
        cells += [entry["truncated"], entry["timeouts"], entry["failed"]]
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(_cell(cell) for cell in cells)}</tr>")
    titles = "".join(f"<th{'' if first == 0 else ' class=number'}>{text}</th>" for first, text in enumerate(head))
    return f"<div class='scroll'><table><tr>{titles}</tr>{''.join(rows)}</table></div>"


def _numbers(entry: Mapping[str, Any]) -> str:
    found = [(key, value) for key, value in entry.items() if key.startswith(SCORES)]
    found += [*entry["metrics"].items()]
    text = " · ".join(f"{escape(name)} <b>{value:.3f}</b>" for name, value in found)
    errors = ", ".join(f"{escape(kind)} × {count}" for kind, count in entry["errors"].items())
    failed = f"<p class='bad'>Errors: {errors}</p>" if errors else ""
    return f"<p>{text} <span class='quiet'>(success: {escape(entry['success'])})</span></p>{failed}"


def _histogram(records: Sequence[EpisodeRecord]) -> str:
    """Rewards in equal bins between the least and the largest (0 and 1 at least)."""
    if not records:
        return ""
    rewards = [record.reward for record in records]
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    counts = [0] * BINS
    for reward in rewards:
        counts[min(BINS - 1, int((reward - low) / (high - low) * BINS))] += 1
    width, height, top = 24, 110, max(counts)
    bars = []
    for index, count in enumerate(counts):
        tall = height * count / top
        box = f"x='{index * width + 1}' y='{height - tall + 14:.1f}' width='{width - 2}' height='{tall:.1f}'"
        start = low + (high - low) * index / BINS
        label = f"{count} episodes with a reward from {start:.2f} to {start + (high - low) / BINS:.2f}"
        bars.append(f"<rect {box}><title>{label}</title></rect>")
    base, full = height + 14, BINS * width
    axis = f"<line x1='0' y1='{base}' x2='{full}' y2='{base}'/><text x='0' y='{base + 14}'>{low:g}</text>"
    axis += (
        f"<text x='{full}' y='{base + 14}' text-anchor='end'>{high:g}</text><text x='0' y='10'>{top} episodes</text>"
    )
    label = f"Histogram of {len(rewards)} rewards"
    return f"<svg role='img' aria-label='{label}' width='{full}' height='{base + 18}'>{''.join(bars)}{axis}</svg>"


def _examples(records: Sequence[EpisodeRecord]) -> str:
    """The episodes from the lowest reward to the highest; the middle is left out where there are many."""
    ordered = sorted(records, key=lambda record: (record.reward, record.task, record.sample))
    half = EXAMPLES // 2
    cut = len(ordered) > EXAMPLES
    shown = ordered[:half] + ordered[-half:] if cut else ordered
    rows = []
    for index, record in enumerate(shown):
        if cut and index == half:
            left = len(ordered) - EXAMPLES
            rows.append(
                f"<tr><td colspan='4' class='quiet'>… {left} episodes in between, see episodes.jsonl …</td></tr>"
            )
        flags = [flag for flag, on in (("truncated", record.truncated), ("timeout", record.timeout)) if on]
        notes = " ".join(flags + ([record.error] if record.error else []))
        note = f"<div class='bad'>{escape(notes)}</div>" if notes else ""
        rows.append(
            f"<tr>{_cell(f'{record.task}.{record.sample}')}{_cell(_fixed(record.reward))}"
            f"<td class='text'>{escape(record.prompt)}</td><td class='text'>{escape(record.reply)}{note}</td></tr>"
        )
    head = "<tr><th class='number'>task</th><th class='number'>reward</th><th>prompt</th><th>reply</th></tr>"
    return f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>"


def _cell(value: Any) -> str:
    return f"<td class='number'>{escape(str(value))}</td>"


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
