"""The run directory before a launch: its name, whether it is free to use, what --clean may delete, who holds it."""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from loguru import logger

from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import read_json, write_json

MARKER = "run.json"  # a run that was started directly; the build has no such file in its folders
SCHEMA = 1
CHECKPOINTS = "checkpoints"
HARMLESS = {"configs", "launcher"}  # what a dry run leaves


def short_id() -> str:
    """Eight hex digits that tell runs of one automatic name apart."""
    return uuid.uuid4().hex[:8]


def used(run_dir: Path) -> str | None:
    """The name of something in the directory that an earlier run left there; None when a run may start in it."""
    if not run_dir.is_dir():
        return None
    for path in sorted(run_dir.iterdir()):
        empty_logs = path.name == "logs" and not path.is_symlink() and not any(p.is_file() for p in path.rglob("*"))
        if path.is_symlink() or not (path.name in HARMLESS or empty_logs):
            return path.name
    return None


def check_free(run_dir: Path, checkpoints: Path | None, resume: bool) -> None:
    """The used-run guard. Raises `UserError` unless the directory is free, or `resume` is asked for and possible."""
    for path in (run_dir / "configs", run_dir / "logs"):
        if path.is_symlink():
            raise UserError(f"{run_dir} belongs to the build ({path.name} is a link); choose another --run.name")
    if resume:
        return
    check_idle(run_dir)
    if found := used(run_dir):
        raise UserError(f"{run_dir} already holds a run ({found}); use --resume, --clean or another --run.name")
    if checkpoints is not None and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise UserError(f"ckpt.output_dir: {checkpoints} is not empty; use --resume, --clean or another folder")


def check_clean(run_dir: Path, output_dir: Path, checkpoints: Path | None = None) -> None:
    """What `--clean` refuses (`UserError`): to delete while NEVER_CLEAN is set, outside `output_dir`, through links, or
    where there is anything that was not started directly (no `run.json`): what a build made is not ours to delete.
    `RunFailed` while a launcher is at work there. `checkpoints`: `ckpt.output_dir`; the run's link to it is its own.
    """
    if os.environ.get("NEVER_CLEAN", "0").lower() not in ("", "0", "false", "no"):
        raise UserError("--clean: refused, since NEVER_CLEAN is set")
    if run_dir.is_symlink() or not _strictly_inside(run_dir, output_dir):
        raise UserError(f"--clean: refused, {run_dir} is a link or not inside {output_dir}")
    if (found := used(run_dir)) and not (run_dir / MARKER).is_file():
        raise UserError(
            f"--clean: refused, {run_dir} holds {found} but no {MARKER}: not a run that was started directly"
        )
    check_idle(run_dir)
    if links := [path for path in _entries(run_dir) if path.is_symlink() and not _is_own_link(path, checkpoints)]:
        hint = f" to {os.readlink(links[0])}; give that as ckpt.output_dir" if links[0].name == CHECKPOINTS else ""
        raise UserError(f"--clean: refused, {links[0]} is a link{hint}")
    if checkpoints is not None and not _strictly_inside(checkpoints, run_dir):
        foreign = [p.name for p in _entries(checkpoints) if not re.fullmatch(r"(abandoned-\d+-)?step_\d+", p.name)]
        if foreign or checkpoints.is_symlink():
            raise UserError(f"--clean: refused, ckpt.output_dir {checkpoints} holds {(foreign or ['a link'])[0]}")


def clean(run_dir: Path, output_dir: Path, checkpoints: Path | None = None) -> None:
    """Delete what an earlier direct run left in its directory (and in its external checkpoint folder).

    Raises `UserError` as `check_clean` does. `launcher/` stays, it holds the lock.
    """
    check_clean(run_dir, output_dir, checkpoints)
    if not run_dir.is_dir():
        return
    with Held(run_dir):
        if checkpoints is not None and not _strictly_inside(checkpoints, run_dir):
            shutil.rmtree(checkpoints, ignore_errors=True)
        for path in _entries(run_dir):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            elif path.name != "launcher":
                shutil.rmtree(path)


def _is_own_link(path: Path, checkpoints: Path | None) -> bool:
    """Whether it is the link that `resume.link_checkpoints` makes, to the folder that the configuration names."""
    return path.name == CHECKPOINTS and checkpoints is not None and Path(os.readlink(path)) == checkpoints.absolute()


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _strictly_inside(path: Path, folder: Path) -> bool:
    path, folder = path.resolve(), folder.resolve()
    return path != folder and path.is_relative_to(folder)


def _lock(file: IO[str], run_dir: Path) -> None:
    """Take the lock of `run_dir`. Raises `RunFailed` when a launcher has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        raise RunFailed(f"{run_dir} is in use by launcher {owner}; stop it first") from None
    except OSError as error:
        logger.warning(f"{file.name}: no file locks here ({error}), a second launcher would not be noticed")


def check_idle(run_dir: Path) -> None:
    """Raise `RunFailed` when a launcher is at work in the directory. Makes nothing."""
    path = run_dir / "launcher" / "lock"
    if path.is_file():
        with open(path, "a+") as file:
            _lock(file, run_dir)


@contextlib.contextmanager
def made(run_dir: Path) -> Iterator[None]:
    """The run directory, made if absent; a start that fails and leaves nothing in it takes away the folders it made."""
    absent = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            for folder in absent:
                if folder.exists():
                    folder.rmdir()
        raise


class Held:
    """The run directory's lock: one launcher at a time, released by the kernel when the launcher ends.

    A launcher that failed before it left anything else takes its lock, and then the empty directory, away again.
    """

    def __init__(self, run_dir: Path):
        self._run_dir, path = run_dir, run_dir / "launcher" / "lock"
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+")  # noqa: SIM115  held for the launcher's life
            try:
                _lock(self._file, run_dir)
                if path.is_file() and os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                    break
            except BaseException:
                self._file.close()
                raise
            self._file.close()  # a launcher that failed has taken it away meanwhile: once more
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()}\n")
        self._file.flush()

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        folder = self._run_dir / "launcher"
        with contextlib.suppress(OSError):  # another launcher is beginning here
            if error is not None and os.listdir(self._run_dir) == ["launcher"] and os.listdir(folder) == ["lock"]:
                (folder / "lock").unlink()
                folder.rmdir()
                self._run_dir.rmdir()
        self._file.close()


def run_id(run_dir: Path) -> str:
    """The id of a direct run, kept in `run.json` over all its attempts; $PRL_RUN_ID decides for a new directory."""
    path = run_dir / MARKER
    return read_json(path)["run_id"] if path.is_file() else os.environ.get("PRL_RUN_ID") or uuid.uuid4().hex


def mark(run_dir: Path, kind: str, name: str) -> str:
    """Make a directory that of a direct run, if it is not. Returns the run's id."""
    identity = run_id(run_dir)
    if not (run_dir / MARKER).is_file():
        write_json(run_dir / MARKER, {"schema": SCHEMA, "run_id": identity, "name": name, "kind": kind})
    return identity
