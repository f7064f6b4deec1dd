"""What two runs must have in common: every checkpoint byte by byte, the loss trace, the ordered ledger of samples."""

import json
from pathlib import Path
from typing import Any

from rlmake import checkpoint
from rlmake.core.rundir import step_dir
from rlmake.monitors import read

TRACE = ("loss/mean", "optim/grad_norm", "optim/lr", "reward/all/mean")
# DCP's index is a pickle that names its files in the order of dictionaries; the tensors' bytes are in `*.distcp`.
BYTES = (".distcp", "trainer/state.json", "trainer/model.json", "orchestrator/state.json", "orchestrator/queue.msgpack")


def content(run: Path, step: int) -> dict[str, Any]:
    """`{file: hash}` of a checkpoint, and its ledger."""
    record = checkpoint.read(step_dir(run, step))
    files = {entry["path"]: entry["blake3"] for entry in record["files"] if entry["path"].endswith(BYTES)}
    return files | {"ledger": record["ledger"]}


def differences(reference: Path, run: Path, step: int) -> list[str]:
    """Files of a checkpoint that differ from the reference's."""
    mine, there = content(run, step), content(reference, step)
    return sorted(name for name in mine.keys() | there.keys() if mine.get(name) != there.get(name))


def ledger(run: Path) -> dict[int, list[str]]:
    """`{step: samples}` of the final trajectory; of a step trained twice the later attempt counts."""
    rows: dict[int, list[str]] = {}
    for path in sorted((run / "ledger").glob("attempt_*.jsonl"), key=lambda p: int(p.stem.rpartition("_")[2])):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the step was trained again
            rows[row["step"]] = row["samples"]
    return dict(sorted(rows.items()))


def trace(run: Path) -> dict[int, list[Any]]:
    """`{step: [values]}` as they were written."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read(run):
        if row.step is not None:
            found = {name: repr(row.metrics[name]) for name in TRACE if name in row.metrics}
            rows.setdefault(row.step, {}).update(found)
    return {step: list(values.items()) for step, values in sorted(rows.items()) if values}


def whole(reference: Path, run: Path, last: int) -> list[str]:
    """What of two finished runs differs."""
    found = differences(reference, run, last)
    if trace(reference) != trace(run):
        odd = [step for step in trace(reference) if trace(reference)[step] != trace(run).get(step)]
        found.append(f"loss trace from step {min(odd, default='?')}")
    if ledger(reference) != ledger(run):
        found.append("ledger of samples")
    return found
