"""Where a training begins: at the start, behind a checkpoint of its own, or behind one of another run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlmake import checkpoint
from rlmake.config.shared import ResumeConfig
from rlmake.core.errors import UserError

Resume = Literal["auto"] | ResumeConfig | None


@dataclass(frozen=True)
class Start:
    """`step`: the last one trained (0: none). `fork`: the checkpoint of another run that is loaded.

    `explicit`: the user named the step, so what the run had reached beyond it is given up.
    """

    step: int = 0
    fork: Path | None = None
    explicit: bool = False

    @property
    def own_step(self) -> int:
        """The step up to which the run directory's own files count."""
        return 0 if self.fork else self.step

    def config(self) -> ResumeConfig | None:
        """The `resume` table of the processes: always a definite checkpoint, never "the newest"."""
        if self.step == 0:
            return None
        return ResumeConfig(dir=str(self.fork)) if self.fork else ResumeConfig(step=self.step)


def starting_point(run_dir: Path, resume: Resume, fork: str | None, hashes: bool = True) -> Start:
    """Resolve what to resume from to one complete, verified checkpoint (without `hashes`: by its files' sizes).

    `resume`: None, a fresh start; a table, as the user asked; "auto", the newest of the run itself, else its `fork`
    (the configuration's `resume.dir`), else a fresh start. Raises `UserError` when what was asked for isn't there.
    """
    if resume == "auto":
        newest = checkpoint.newest(run_dir)
        if newest is not None:
            return Start(newest)
        resume = ResumeConfig(dir=fork) if fork else None
    if resume is None:
        return Start()
    folder = checkpoint.resume_point(run_dir, step=resume.step, fork=resume.dir, hashes=hashes)
    step = int(folder.name.removeprefix("step_"))
    if resume.dir is None:
        return Start(step, explicit=resume.step is not None)
    if folder.resolve().is_relative_to(run_dir.resolve()):
        raise UserError(f"resume.dir = {resume.dir!r} lies in the run itself; use resume.step = {step}")
    return Start(step, fork=folder.resolve())


def link_checkpoints(run_dir: Path, external: str | None) -> None:
    """Let `<run>/checkpoints` be a link to `ckpt.output_dir`, so that both halves and retention share one folder."""
    if external is None:
        return
    link, target = run_dir / "checkpoints", Path(external).absolute()
    target.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    if link.is_symlink():
        raise UserError(
            f"ckpt.output_dir: {link} is a link to {os.readlink(link)}; name that folder, or remove the link"
        )
    if link.exists():
        raise UserError(f"ckpt.output_dir: {link} exists already and is no link to {target}; use --clean, or move it")
    link.symlink_to(target)
