"""Metrics rows: written whole by several processes, read back with the latest attempt winning."""

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmake import monitors
from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.monitors import console
from rlmake.monitors.console import step_line

ON = SimpleNamespace(file=SimpleNamespace(path=None))


def context(run: Path, attempt: int = 1) -> RunContext:
    return RunContext(run, "id", "name", attempt, None, run / "configs", run / "logs")


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "monitors/file/metrics.jsonl").read_text().splitlines()]


def test_row_form(tmp_path):
    m = monitors.setup(ON, "trainer", context(tmp_path, attempt=3))
    m.log(1, {"loss/mean": 0.5, "count": True})
    m.close()
    (row,) = rows(tmp_path)
    assert row.pop("time") > 1e9
    assert row == {"step": 1, "producer": "trainer", "attempt": 3, "loss/mean": 0.5, "count": 1}


def test_non_finite_values_are_left_out_and_counted(tmp_path, warnings):
    m = monitors.setup(ON, "trainer", context(tmp_path))
    for step in (1, 2):
        m.log(step, {"a": float("nan"), "b": float("-inf"), "c": 1.0, "d": "x"})
    assert [set(row) - {"step", "time", "producer", "attempt"} for row in rows(tmp_path)] == [
        {"c", "monitors/non_finite"}
    ] * 2
    assert rows(tmp_path)[0]["monitors/non_finite"] == 3 and m.dropped == 6
    assert len(warnings) == 3, "one warning per key, not per step"


def test_a_whole_number_beyond_every_float_is_left_out(tmp_path, warnings):
    m = monitors.setup(ON, "orch", context(tmp_path))
    m.log(1, {"huge": 10**5000, "c": 10**20})
    assert rows(tmp_path)[0]["c"] == 10**20 and rows(tmp_path)[0]["monitors/non_finite"] == 1
    assert warnings and "huge is beyond every float at step 1" in warnings[0]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"a":' * 100_000, "[1]", "null", '{"step": 2, "attempt": "x"}', '{"step": 2, "producer": ["a"]}',
     '{"step": true}', '{"step": 2, "producer": null}', '{"step": 2, "producer": "launcher", "attempt": [1]}',
     '{"step": 1' + "0" * 400 + "}"],
)  # fmt: skip
def test_a_damaged_row_costs_only_itself(tmp_path, line):
    """A resume reads the file too: it must not end at a line that something else has written."""
    m = monitors.setup(ON, "orch", context(tmp_path))
    m.log(1, {"a": 1.0})
    with open(tmp_path / "monitors/file/metrics.jsonl", "a") as file:
        file.write(line + '\n{"step": 1, "producer": "orch", "time": "x", "b": "text", "c": NaN, "d": 4}\n')
    m.log(2, {"a": 2.0})
    found = monitors.read(tmp_path)
    assert [(row.step, row.metrics) for row in found] == [(1, {"a": 1.0, "d": 4}), (2, {"a": 2.0})]


def _write(run: str, producer: str, count: int) -> None:
    m = monitors.setup(ON, producer, context(Path(run)))
    for step in range(count):
        m.log(step, {f"key/{i}": float(i) for i in range(200)})
    m.close()


def test_processes_append_whole_rows(tmp_path):
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_write, args=(str(tmp_path), f"p{i}", 200)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(rows(tmp_path)) == 800


def test_torn_row_of_a_killed_writer_costs_only_itself(tmp_path):
    m = monitors.setup(ON, "trainer", context(tmp_path))
    m.log(1, {"x": 1.0})
    path = tmp_path / "monitors/file/metrics.jsonl"
    m.log(7, {"x": 7.0})
    path.write_bytes(path.read_bytes() + b'{"step": 2, "ti')
    monitors.mark_attempt(context(tmp_path, 2), 1)
    again = monitors.setup(ON, "trainer", context(tmp_path, 2))
    again.log(2, {"x": 2.0})
    assert monitors.series(monitors.read(tmp_path), "x") == [(1, 1.0), (2, 2.0)], "nor the mark of the next attempt"


def test_a_path_that_is_no_folder_is_named_with_its_key(tmp_path):
    (tmp_path / "there").write_text("")
    with pytest.raises(UserError, match=r"monitors\.file\.path: \S+/there: File exists; expected a folder"):
        monitors.mark_attempt(context(tmp_path), 0, tmp_path / "there")


def test_a_row_that_a_full_disk_has_cut_costs_only_itself(tmp_path, monkeypatch, warnings):
    m, write = monitors.setup(ON, "trainer", context(tmp_path)), os.write
    other = monitors.setup(ON, "orch", context(tmp_path))
    m.log(1, {"x": 1.0})
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    m.log(2, {"x": 2.0})
    monkeypatch.setattr(os, "write", write)
    other.log(3, {"x": 3.0})
    m.log(4, {"x": 4.0})
    assert monitors.series(monitors.read(tmp_path), "x") == [(1, 1.0), (3, 3.0), (4, 4.0)]
    assert len(rows(tmp_path)) == 3, "every line is whole"
    assert len(warnings) == 1 and "disk full?" in warnings[0]


def test_latest_attempt_wins_and_the_abandoned_future_is_cut(tmp_path):
    first, second = context(tmp_path, 1), context(tmp_path, 2)
    for ctx, steps in ((first, range(1, 13)), (second, range(11, 12))):
        monitors.mark_attempt(ctx, steps.start - 1)
        for producer in ("trainer", "orch"):
            m = monitors.setup(ON, producer, ctx)
            for step in steps:
                m.log(step, {"x": float(ctx.attempt)})
                m.log(step, {f"only/{ctx.attempt}": 1.0})
    table = monitors.read(tmp_path)
    # attempt 2 continued behind step 10 and got to 11: step 12 of attempt 1 is no part of the run any more
    assert monitors.series(table, "x", "trainer") == [(s, 1.0) for s in range(1, 11)] + [(11, 2.0)]
    assert monitors.series(table, "only/1", "orch") == [(s, 1.0) for s in range(1, 11)]
    assert monitors.read(tmp_path / "nothing") == []


def test_a_monitor_that_cannot_start_fails_the_launch(tmp_path):
    (tmp_path / "monitors").write_text("a file where a folder is wanted")
    with pytest.raises(UserError, match=r"monitors\.file: can't start"):
        monitors.setup(ON, "trainer", context(tmp_path))


def test_a_monitor_that_fails_later_only_warns(tmp_path, warnings):
    m = monitors.setup(ON, "trainer", context(tmp_path))
    m._monitors["file"].close()
    for step in (1, 2):
        m.log(step, {"x": 1.0})
    assert len(warnings) == 1 and "monitor file failed at step 1" in warnings[0]


def test_off_and_other_ranks_write_nothing(tmp_path):
    monitors.setup(SimpleNamespace(file=None), "trainer", context(tmp_path)).log(1, {"x": 1.0})
    monitors.setup(ON, "trainer", context(tmp_path), rank=1).log(1, {"x": 1.0})
    assert not (tmp_path / "monitors").exists()


def test_console_lines_say_what_is_left(monkeypatch):
    """From the second step of an attempt on, and not of an endless run."""
    said = []
    monkeypatch.setattr(console.logger, "success", said.append)
    for last in (10, None):
        monitor = console.ConsoleMonitor("orch", last)
        for step, now in ((5, 100.0), (6, 130.0), (8, 700.0), (10, 720.0)):
            monitor.log({"step": step, "time": now, "time/step": 1.0})
    lefts = [line.partition(" | ETA ")[2] for line in said]
    assert lefts == ["", "0:02:00", "0:06:40", "", "", "", "", ""]


def test_console_line():
    row = {"step": 7, "time/step": 1.25, "loss/mean": 0.5, "optim/lr": 3e-6, "entropy/all/mean": 1.0}
    assert step_line("trainer", row) == "Step 7 | 1.25s | Loss 0.5000 | Entropy 1.0000 | LR 3.00e-06"
    row = {"step": 7, "time/step": 2.0, "reward/all/mean": 0.61234, "batch/trainable": 60, "batch/rollouts": 64}
    assert step_line("orch", row) == "Step 7 | 2.00s | Reward 0.6123 | Trainable 60/64"
    assert step_line("trainer", {"step": 7, "loss/mean": 1.0}) is None
