"""The console line of a step, in the one form that people (and their scripts) read from the logs."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from loguru import logger

from rlmake.monitors.base import Monitor

Text = Callable[[float], str]


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


# per producer: (label, metric keys of which the first present one counts, how it is written)
COLUMNS: dict[str, list[tuple[str, tuple[str, ...], Text]]] = {
    "trainer": [
        ("Loss", ("loss/mean",), "{:.4f}".format),
        ("Entropy", ("entropy/all/mean", "entropy/mean"), "{:.4f}".format),
        ("Mismatch KL", ("mismatch_kl/all/mean", "mismatch_kl/mean"), "{:.4f}".format),
        ("Grad. Norm", ("optim/grad_norm",), "{:.4f}".format),
        ("LR", ("optim/lr",), "{:.2e}".format),
        ("Throughput", ("perf/throughput",), "{:.0f} tokens/s".format),
        ("MFU", ("perf/mfu",), "{:.1f}%".format),
        ("Peak Mem.", ("perf/peak_memory",), "{:.1f} GiB".format),
    ],
    "orch": [
        ("Reward", ("reward/all/mean",), "{:.4f}".format),
        ("Turns", ("num_turns/all/mean",), "{:.1f}".format),
        ("Branches", ("num_branches/all/mean",), "{:.1f}".format),
        ("Max Off-Policy", ("off_policy/max",), "{:.0f}".format),
        ("Error", ("errored_rollouts/all",), _share),
        ("Cancelled", ("cancelled_rollouts/all",), _share),
        ("Truncation", ("is_truncated/all/mean",), _share),
    ],
}


def step_line(producer: str, row: Mapping[str, Any]) -> str | None:
    """`Step N | 1.2s | Loss 0.1234 | …` of a row, or None for a row that is not a step's main one (no `time/step`)."""
    if producer not in COLUMNS or row.get("step") is None or "time/step" not in row:
        return None
    parts = [f"Step {row['step']}", f"{row['time/step']:.2f}s"]
    for label, keys, text in COLUMNS[producer]:
        value = next((row[key] for key in keys if key in row), None)
        if value is not None:
            parts.append(f"{label} {text(value)}")
        if label == "Reward" and "batch/trainable" in row and "batch/rollouts" in row:
            parts.append(f"Trainable {row['batch/trainable']:.0f}/{row['batch/rollouts']:.0f}")
    return " | ".join(parts)


class ConsoleMonitor(Monitor):
    """Logs the step's line at level SUCCESS. `last`: the run's last step, None for an endless one."""

    def __init__(self, producer: str, last: int | None = None):
        self._producer, self._last = producer, last
        self._first: tuple[int, float] | None = None  # (step, time) of this attempt's first line

    def log(self, row: Mapping[str, Any]) -> None:
        if line := step_line(self._producer, row):
            logger.success(line + self._left(row["step"], row["time"]))

    def _left(self, step: int, now: float) -> str:
        """What the rest takes at the pace of the steps so far, which holds evaluations and checkpoints too."""
        if self._first is None:
            self._first = step, now
        done = step - self._first[0]
        if self._last is None or step >= self._last or done < 1:
            return ""
        return f" | ETA {timedelta(seconds=round((now - self._first[1]) / done * (self._last - step)))}"
