"""Logs and configurations of a run, as they lie there."""

import re
from pathlib import Path
from typing import Any

from rlmake.core.rundir import numbered
from rlmake.dashboard.confine import NotThere, files_in, inside

MAX_LOG = 2_000_000  # bytes of one answer
MAX_CONFIG = 8 << 20


def attempts(work: Path, what: str) -> list[int]:
    return list(numbered(work / what, "attempt"))


def attempt_folder(work: Path, what: str, attempt: str) -> tuple[int, Path]:
    """The folder of `attempt` ("latest" or a number) below logs/ or configs/. Raises `NotThere`."""
    there = numbered(work / what, "attempt")
    number = max(there, default=0) if attempt == "latest" else int(attempt) if attempt.isdigit() else 0
    if number not in there:
        raise NotThere(f"{what} of attempt {attempt}")
    return number, inside(work, f"{what}/attempt_{number}")


def component(relative: str) -> str:
    """Which part of the run writes a log: trainer, orch, infer, eval, env:<name>, launcher, other."""
    parts = relative.split("/")
    if parts[0] == "envs" and len(parts) > 2:
        return f"env:{'/'.join(parts[2:]).removesuffix('.log')}"
    for prefix, label in (
        ("trainer", "trainer"),
        ("orchestrator", "orch"),
        ("inference", "infer"),
        ("eval", "eval"),
        ("launcher", "launcher"),
    ):
        if parts[0].startswith(prefix):
            return label
    return "other"


def log_files(work: Path, attempt: str) -> dict[str, Any]:
    number, folder = attempt_folder(work, "logs", attempt)
    rows = []
    for path in files_in(folder):
        relative = path.relative_to(folder).as_posix()
        stat = path.stat()
        rows.append(
            {"file": relative, "component": component(relative), "size": stat.st_size, "mtime": stat.st_mtime,
             "rank": "/torchrun/" in f"/{relative}"}
        )  # fmt: skip
    return {"attempt": number, "attempts": attempts(work, "logs"), "files": rows}


def log_part(
    work: Path, attempt: str, file: str, start: int | None, end: int | None, tail: int | None
) -> dict[str, Any]:
    """Bytes [start, end) of a log as text, at most 2 MB; `tail`: the last so many. Whole lines where there are any."""
    _, folder = attempt_folder(work, "logs", attempt)
    path = inside(folder, file)
    if not path.is_file():
        raise NotThere(file)
    size = path.stat().st_size
    if tail is not None:
        start = max(0, size - min(max(tail, 0), MAX_LOG))
    start = min(max(start or 0, 0), size)
    end = min(size if end is None else max(end, start), start + MAX_LOG, size)
    with open(path, "rb") as handle:
        handle.seek(start)
        data = handle.read(end - start)
    if tail is not None and start and 0 <= (cut := data.find(b"\n")) < len(data) - 1:
        data, start = data[cut + 1 :], start + cut + 1
    if (last := data.rfind(b"\n")) >= 0:  # what is not a whole line yet comes with the next part
        data = data[: last + 1]
    elif start + len(data) == size and len(data) < MAX_LOG:
        data = b""
    text = ANSI.sub("", data.decode("utf-8", "replace"))
    return {"file": file, "start": start, "end": start + len(data), "size": size, "text": text}


ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\r(?=\n)")


def configs(work: Path, attempt: str) -> dict[str, Any]:
    number, folder = attempt_folder(work, "configs", attempt)
    rows = [
        {"file": path.relative_to(folder).as_posix(), "size": path.stat().st_size} for path in files_in(folder)
        if path.suffix in (".json", ".toml", ".yaml", ".txt", ".address")
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["file"].startswith("resolved/"), row["file"].count("/"), row["file"]))
    return {"attempt": number, "attempts": attempts(work, "configs"), "files": rows}


def config(work: Path, attempt: str, file: str) -> dict[str, Any]:
    number, folder = attempt_folder(work, "configs", attempt)
    path = inside(folder, file)
    if not path.is_file():
        raise NotThere(file)
    with open(path, "rb") as handle:
        data = handle.read(MAX_CONFIG)
    return {
        "attempt": number,
        "file": file,
        "text": data.decode("utf-8", "replace"),
        "cut": path.stat().st_size > MAX_CONFIG,
    }
