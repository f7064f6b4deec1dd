"""The files of an evaluation: report.json (design: the record "evaluation"), episodes.jsonl and report.html."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmake.core import jsonio
from rlmake.core.errors import UserError
from rlmake.evals.page import render
from rlmake.evals.records import EnvResult
from rlmake.evals.summary import summarise

SCHEMA = 1
REPORT, EPISODES, PAGE = "report.json", "episodes.jsonl", "report.html"
IDENTITY = ("suite", "suite_fingerprint", "run", "model_fingerprint", "model_step", "model_content")


def make(results: Sequence[EnvResult], *, identity: Mapping[str, Any], sampling: Mapping[str, Any], seed: int) -> dict:
    """The content of report.json. `identity` says what was evaluated by what; absent parts are null."""
    envs = {result.env: summarise(result) for result in results}
    return {
        "schema": SCHEMA,
        **{key: identity.get(key) for key in IDENTITY},
        "sampling": dict(sampling),
        "seed": seed,
        "partial": any(entry["partial"] for entry in envs.values()),
        "envs": envs,
    }


def write(out: Path, report: Mapping[str, Any], results: Sequence[EnvResult]) -> None:
    """Write the three files into `out`, report.json last."""
    records = [record for result in results for record in result.records]
    rows = (json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False, sort_keys=True) for record in records)
    jsonio.write_bytes(out / EPISODES, "".join(f"{row}\n" for row in rows).encode(errors="replace"))
    jsonio.write_bytes(out / PAGE, render(report, records).encode(errors="replace"))
    jsonio.write_json(out / REPORT, report)


def read(path: Path) -> dict[str, Any]:
    """A report.json (or that of a folder). Raises `UserError` for another schema."""
    path = path / REPORT if path.is_dir() else path
    report = jsonio.read_json(path)
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UserError(f"{path}: not an evaluation's report of schema {SCHEMA}")
    return report
