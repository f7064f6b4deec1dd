"""What an evaluation has done so far, on disk: nothing finished is lost by a kill, and a resume repeats none of it.

    checkpoints/eval/episodes.jsonl            one record per episode, appended as it ends
    checkpoints/eval/config.json               what was evaluated, to compare a resume with
    checkpoints/step_<n>/eval/progress.json    after n groups: how far each environment is, how many records there are

A group is a task's samples. An environment's cursor counts the groups of the completed prefix; n is the cursors' sum. A
resume keeps every episode that ended well, beyond the cursor too, and runs the others: those that failed again as well.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.rundir import numbered, step_dir
from rlmake.evals.records import EpisodeRecord

SCHEMA = 1


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "eval"


def started(run_dir: Path) -> bool:
    """Whether an evaluation in this directory has left anything to go on from."""
    return (folder(run_dir) / "episodes.jsonl").exists()


def going_on_from(run_dir: Path, resume: Any) -> tuple[Path, int | None]:
    """The folder of the records that a `resume` table names, and how many of them count (None: all).

    Raises `UserError` when there is nothing to go on from.
    """
    step = Path(resume.dir) if resume.dir else None
    if resume.step is not None:
        step = step_dir(run_dir, resume.step)
    source = folder(step.parent.parent if step else run_dir)
    if not (source / "episodes.jsonl").exists() or not (source / "config.json").exists():
        raise UserError(f"resume: {source} holds no evaluation to go on from")
    if step is None:
        return source, None
    return source, read_json(step / "eval" / "progress.json")["episodes"]


class Journal:
    """The records of one evaluation. `done` are those of earlier attempts that count."""

    def __init__(self, run_dir: Path, ckpt: Any, planned: dict[str, tuple[int, int]]):
        """`ckpt`: the table of the configuration, or None: records are kept, no cursor is. `planned`: `{env: (tasks,
        samples)}` in the order of the environments."""
        self.run_dir, self.ckpt, self.planned = run_dir, ckpt, planned
        self.done: list[EpisodeRecord] = []
        self._ended: dict[str, list[int]] = {env: [0] * tasks for env, (tasks, _) in planned.items()}
        self._cursors = dict.fromkeys(planned, 0)
        self._lines = self._saved = 0
        self._saving = asyncio.Lock()
        self._file: int | None = None

    def open(self, config: dict[str, Any], resume: Any) -> None:
        """Begin, or go on as the `resume` table says. Raises `UserError` when there is nothing to go on from, or when
        what was evaluated differs."""
        own = folder(self.run_dir)
        records: list[EpisodeRecord] = []
        if resume is not None:
            source, lines = going_on_from(self.run_dir, resume)
            if not resume.skip_checks:
                compare(read_json(source / "config.json")["config"], config)
            records = read_whole(source / "episodes.jsonl", lines)
        elif own.exists():
            shutil.rmtree(own)
        write_json(own / "config.json", {"schema": SCHEMA, "config": config})
        rows = "".join(_row(record) for record in records)
        temporary = own / ".episodes.tmp"
        temporary.write_text(rows, encoding="utf-8", errors="replace")
        os.replace(temporary, own / "episodes.jsonl")
        self._file = os.open(own / "episodes.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._lines = len(records)
        latest = {(record.env, record.task, record.sample): record for record in records}
        self.done = [record for record in latest.values() if record.error is None and record.env in self.planned]
        for record in self.done:
            self._count(record)
        if resume is not None:
            failed = sum(record.error is not None for record in latest.values())
            logger.info(f"going on with {len(self.done)} episodes that have ended; {failed} failed ones run again")

    def of(self, env: str, keys: Sequence[str], samples: int) -> list[EpisodeRecord]:
        """The records of an environment that are done; `keys` of its tasks, as they are now."""
        mine = (record for record in self.done if record.env == env and record.sample < samples)
        return [record for record in mine if record.task < len(keys) and keys[record.task] == record.key]

    async def add(self, record: EpisodeRecord) -> None:
        """Keep a record; a cursor is saved when enough groups have ended."""
        assert self._file is not None
        os.write(self._file, _row(record).encode(errors="replace"))
        self._lines += 1
        self._count(record)
        if self.ckpt is not None and self.cursor - self._saved >= self.ckpt.interval:
            await self.save()

    def _count(self, record: EpisodeRecord) -> None:
        ended, (tasks, samples) = self._ended[record.env], self.planned[record.env]
        if record.task >= tasks:
            return
        ended[record.task] += 1
        cursor = self._cursors[record.env]
        while cursor < tasks and ended[cursor] >= samples:
            cursor += 1
        self._cursors[record.env] = cursor

    @property
    def cursor(self) -> int:
        """Groups of all completed prefixes."""
        return sum(self._cursors.values())

    async def save(self) -> None:
        """Write the cursor's checkpoint, and take away those beyond `keep_last`."""
        if self.ckpt is None:
            return
        async with self._saving:
            step, cursors, lines = self.cursor, dict(self._cursors), self._lines
            if step == self._saved:
                return
            self._saved = step
            await asyncio.to_thread(self._write, step, {"cursors": cursors, "episodes": lines})

    def _write(self, step: int, progress: dict[str, Any]) -> None:
        assert self._file is not None
        os.fsync(self._file)
        write_json(step_dir(self.run_dir, step) / "eval" / "progress.json", {"schema": SCHEMA, "step": step} | progress)
        if self.ckpt.keep_last is not None:
            for n in list(numbered(self.run_dir / "checkpoints"))[: -self.ckpt.keep_last]:
                shutil.rmtree(step_dir(self.run_dir, n), ignore_errors=True)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_whole(path: Path, lines: int | None) -> list[EpisodeRecord]:
    """The first `lines` records (None: all); a last line that a kill has torn is left out."""
    found = []
    for raw in path.read_bytes().splitlines(keepends=True)[:lines]:
        try:
            found.append(EpisodeRecord(**json.loads(raw)))
        except (ValueError, TypeError):
            if raw.endswith(b"\n"):
                raise UserError(f"{path}: row {len(found) + 1} is not a record of an episode") from None
    return found


def compare(before: dict[str, Any], now: dict[str, Any], path: str = "") -> None:
    """Raise `UserError` at the first value in which a resume differs from what was begun."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            compare(old, new, f"{path}{key}.")
        elif old != new:
            raise UserError(
                f"{path}{key}: {json.dumps(new)} now, {json.dumps(old)} when the evaluation was begun; use --clean to "
                "begin anew, or resume.skip_checks"
            )


def _row(record: EpisodeRecord) -> str:
    return json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"
