"""What goes: old checkpoints by the stated rule, leftovers of dead writers, and everything of an abandoned future."""

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from loguru import logger

from rlmake.checkpoint.complete import steps, verify
from rlmake.checkpoint.halves import COMPLETE
from rlmake.checkpoint.readers import is_read
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import numbered, step_dir


def retain(
    run_dir: Path, keep_last: int | None = None, keep_interval: int | None = None, protect: Iterable[int] = ()
) -> list[int]:
    """Delete complete checkpoints outside the union of the last `keep_last` and the multiples of `keep_interval`.

    Both None keeps all. Never deleted: the newest whole one, any newer than it, one that is being read, one that a
    manifest of the build names (`manifests/done_<n>.json`: a target, what forks begin from), one that it was asked for
    (`steps` of `spec.json`), one in `protect`.
    Damaged and unfinished ones below the newest whole one are not counted and go. Returns the steps deleted; a failed
    deletion is a warning.
    """
    for name, value in (("keep_last", keep_last), ("keep_interval", keep_interval)):
        if value is not None and value < 1:
            raise UserError(f"ckpt.{name} = {value}: expected at least 1, or None to keep all")
    whole = [step for step in steps(run_dir) if not verify(step_dir(run_dir, step), hashes=False)]
    if not whole or (keep_last is None and keep_interval is None):
        return []
    keep = {whole[-1], *protect, *_targets(run_dir), *whole[-(keep_last or 1) :]}
    if keep_interval is not None:
        keep |= {step for step in whole if step % keep_interval == 0}
    gone = []
    for step, folder in numbered(run_dir / "checkpoints").items():
        if step < whole[-1] and step not in keep and not is_read(folder) and _delete(folder):
            gone.append(step)
    if gone:
        logger.info(f"checkpoints deleted by retention: {', '.join(f'step_{step}' for step in gone)}")
    return gone


def _targets(run_dir: Path) -> set[int]:
    names = (path.stem.removeprefix("done_") for path in (run_dir / "manifests").glob("done_*.json"))
    asked = read_json(spec).get("steps", []) if (spec := run_dir / "spec.json").is_file() else []
    return {*asked, *(int(name) for name in names if name.isdecimal())}


def sweep(run_dir: Path) -> list[Path]:
    """Remove what dead writers left: `<half>.tmp-*` and half-deleted folders. Only the run's one writer may call it."""
    checkpoints = run_dir / "checkpoints"
    gone = [*checkpoints.glob(".deleting-*"), *checkpoints.glob("step_*/*.tmp-*")]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
        logger.info(f"leftover removed: {path.relative_to(run_dir)}")
    return gone


def prune_future(run_dir: Path, step: int, explicit: bool = False) -> list[Path]:
    """Take away everything later than the `step` that a run continues from (0: a fresh start). Returns what went.

    Removed: `batches/step_>n`, `broadcasts/step_>=n` (v_n is offered anew), unfinished checkpoints beyond n.
    Checkpoints beyond n that were completed are renamed `abandoned-<k>-step_<m>`: never chosen again, never lost.
    Without `explicit` a whole one beyond n is an error, as the newest should then have been resumed from.
    """
    sweep(run_dir)
    gone = [path for n, path in numbered(run_dir / "batches").items() if n > step]
    gone += [path for n, path in numbered(run_dir / "broadcasts").items() if n >= step]
    for path in gone:
        shutil.rmtree(path)
        logger.info(f"made again from step {step} on, removed: {path.relative_to(run_dir)}")
    for n, folder in reversed(numbered(run_dir / "checkpoints").items()):
        if n <= step:
            continue
        if not (folder / COMPLETE).is_file():
            why = "damaged" if (folder / f"{COMPLETE}.damaged").is_file() else "never finished"
            _delete(folder)
            logger.info(f"{why}, removed: {folder.relative_to(run_dir)}")
        elif not explicit and not verify(folder):
            raise UserError(f"{folder} is complete, but the run would continue from step {step} (ask with resume.step)")
        else:
            _abandon(folder)
        gone.append(folder)
    return gone


def _abandon(folder: Path) -> None:
    taken = [path.name.split("-")[1] for path in folder.parent.glob("abandoned-*-step_*")]
    number = max((int(text) for text in taken if text.isdecimal()), default=0) + 1
    target = folder.with_name(f"abandoned-{number}-{folder.name}")
    os.rename(folder, target)
    logger.info(f"abandoned: {folder.name} is now {target.name}")


def _delete(folder: Path) -> bool:
    """Delete a step's folder: out of sight by one rename first, so that no half-deleted one is ever found."""
    hidden = folder.with_name(f".deleting-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning(f"checkpoint not deleted: {error}")
        return False
    return True
