"""Monitors: where the metrics of a run go. One row per step and producer, to every monitor that is configured.

Producers (trainer, orchestrator, evaluation) call `setup` once and `log` per step. Reports read with `read`.
A monitor that can't start fails the launch; one that fails later warns and never stops the training.
"""

from rlmake.monitors.registry import MONITORS, Monitors, setup
from rlmake.monitors.rows import Row, mark_attempt, read, series

__all__ = ["MONITORS", "Monitors", "Row", "mark_attempt", "read", "series", "setup"]
