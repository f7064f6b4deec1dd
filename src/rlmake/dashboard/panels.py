"""The panels of a run's overview: the names that the list of metrics marks, as far as the run has logged them."""

import functools
import re
from typing import Any

from rlmake.monitors import names

SFT = {
    "train": ["loss/mean", "loss/perplexity", "val/loss", "val/perplexity", "progress/epoch"],
    "stability": ["optim/grad_norm", "optim/lr", "loss/nan_count"],
    "performance": ["perf/throughput", "perf/mfu", "perf/peak_memory", "time/step", "packing/fill"],
}
SECTIONS = (*names.SECTIONS,)


@functools.lru_cache(maxsize=32)
def panels(keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """`[{section, panels: [{title, text, keys}]}]`: one panel a pattern, with a line for each name it stands for.

    Pages ask for it every few seconds: it is kept, and not to be changed.
    """
    found: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
    taken: set[str] = set()
    for metric in names.METRICS:
        if metric.overview:
            expression = _expression(metric.pattern).fullmatch
            hits = [key for key in keys if expression(key) and key not in taken]
            if {"all", "agg"} & {part for key in hits for part in key.split("/")} and len(hits) == 2:
                hits = hits[:1]  # of a single environment the two are the same
            if hits:
                taken |= set(hits)
                found.setdefault(metric.section, []).append(
                    {"title": metric.pattern, "text": metric.text, "keys": hits[:12]}
                )
    for section, wanted in SFT.items():
        for key in wanted:
            if key in keys and key not in taken:
                found.setdefault(section, []).append({"title": key, "text": "", "keys": [key]})
    return [{"section": section, "panels": rows} for section, rows in found.items() if rows]


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(pattern)))
