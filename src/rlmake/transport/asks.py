"""How the trainer asks for the orchestrator's half of a checkpoint that no interval foresaw (SIGUSR1).

The orchestrator keeps its last states in memory and writes the half of an asked step as soon as it has it.
"""

from pathlib import Path

from rlmake.core.jsonio import write_bytes
from rlmake.core.rundir import numbered, step_dir

ASK = "orchestrator.wanted"


def ask_half(run_dir: Path, step: int) -> None:
    """The trainer's master: say that checkpoint `step` is coming, before waiting for the halves."""
    write_bytes(step_dir(run_dir, step) / ASK, b"")


def asked_halves(run_dir: Path) -> list[int]:
    """Steps asked for and not yet answered."""
    return [step for step, folder in numbered(run_dir / "checkpoints").items() if (folder / ASK).exists()]


def answered(run_dir: Path, step: int) -> None:
    (step_dir(run_dir, step) / ASK).unlink(missing_ok=True)
