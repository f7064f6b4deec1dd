"""Logs and configurations of a run, as they lie there."""

import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from rlmake.dashboard.confine import NotThere, files_in, inside, opened
from rlmake.dashboard.run import Run
from rlmake.dashboard.view import Refused

MAX_LOG = 2_000_000  # bytes of one answer
MAX_CONFIG = 8 << 20


def attempt_folder(run: Run, what: str, attempt: str) -> tuple[int, Path]:
    """The folder of `attempt` ("latest" or a number) below logs/ or configs/. Raises `NotThere`, `Refused`."""
    if "/" in attempt or "\0" in attempt:
        raise NotThere(f"{what} of attempt {attempt}")  # as any path that leads elsewhere
    if attempt != "latest" and not re.fullmatch(r"[0-9]{1,9}", attempt):
        raise Refused(f"attempt: expected latest or a number, not {attempt[:50]!r}", 422)
    there = run.attempts(what)
    number = max(there, default=0) if attempt == "latest" else int(attempt)
    if number not in there:
        raise NotThere(f"{what} of attempt {attempt}")
    return number, there[number]


def _read(run: Run, folder: Path, file: str) -> BinaryIO:
    try:
        return opened(inside(folder, file, run.roots), run.roots)
    except OSError as error:
        raise NotThere(f"{file}: {error.strerror}") from None


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


def log_files(run: Run, attempt: str) -> dict[str, Any]:
    number, folder = attempt_folder(run, "logs", attempt)
    rows = []
    for path, stat in files_in(folder, run.roots):
        relative = path.relative_to(folder).as_posix()
        rows.append(
            {"file": relative, "component": component(relative), "size": stat.st_size, "mtime": stat.st_mtime,
             "rank": "/torchrun/" in f"/{relative}"}
        )  # fmt: skip
    return {"attempt": number, "attempts": list(run.attempts("logs")), "files": rows}


def log_part(run: Run, attempt: str, file: str, start: int | None, end: int | None, tail: int | None) -> dict[str, Any]:
    """Bytes [start, end) of a log as text, at most 2 MB; `tail`: the last so many. Whole lines where there are any."""
    _, folder = attempt_folder(run, "logs", attempt)
    with _read(run, folder, file) as handle:
        size = handle.seek(0, os.SEEK_END)
        if tail is not None:
            start = max(0, size - min(max(tail, 0), MAX_LOG))
        start = min(max(start or 0, 0), size)
        end = min(size if end is None else max(end, start), start + MAX_LOG, size)
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


def configs(run: Run, attempt: str) -> dict[str, Any]:
    number, folder = attempt_folder(run, "configs", attempt)
    rows = [
        {"file": path.relative_to(folder).as_posix(), "size": stat.st_size}
        for path, stat in files_in(folder, run.roots)
        if path.suffix in (".json", ".toml", ".yaml", ".txt", ".address")
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["file"].startswith("resolved/"), row["file"].count("/"), row["file"]))
    return {"attempt": number, "attempts": list(run.attempts("configs")), "files": rows}


def config(run: Run, attempt: str, file: str) -> dict[str, Any]:
    number, folder = attempt_folder(run, "configs", attempt)
    with _read(run, folder, file) as handle:
        data = handle.read(MAX_CONFIG + 1)
    text = data[:MAX_CONFIG].decode("utf-8", "replace")
    return {"attempt": number, "file": file, "text": text, "cut": len(data) > MAX_CONFIG}
