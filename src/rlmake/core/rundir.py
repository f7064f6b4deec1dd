"""The run directory: where everything of a run lies, and the facts a process of the run needs to know about it.

<run>/configs/attempt_<n>/{command.txt,<entry>.toml,resolved/*.json}   configs/latest -> attempt_<n>
<run>/logs/attempt_<n>/…                                              logs/latest -> attempt_<n>
<run>/checkpoints/step_<n>/{trainer/,orchestrator/,COMPLETE}
<run>/broadcasts/step_<n>/    <run>/batches/step_<n>/    <run>/monitors/file/metrics.jsonl    <run>/run.json
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

RUN_ID, RUN_NAME, FINGERPRINT = "PRL_RUN_ID", "PRL_RUN_NAME", "RLMAKE_FINGERPRINT"
ATTEMPT_CONFIGS, ATTEMPT_LOGS = "PRL_ATTEMPT_CONFIG_DIR", "PRL_ATTEMPT_LOG_DIR"


def numbered(folder: Path, prefix: str = "step") -> dict[int, Path]:
    """`{n: folder/prefix_n}` of the directories there, in ascending numeric order."""
    try:
        entries = os.scandir(folder)  # no look at each entry: this is asked for many times a second
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with entries:
        names = [entry.name for entry in entries if entry.name.startswith(f"{prefix}_") and entry.is_dir()]
    found = {int(match[1]): folder / name for name in names if (match := re.fullmatch(rf"{prefix}_(0|[1-9]\d*)", name))}
    return dict(sorted(found.items()))


def step_dir(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step}"


def broadcast_dir(run: Path, version: int) -> Path:
    return run / "broadcasts" / f"step_{version}"


def batch_dir(run: Path, step: int) -> Path:
    return run / "batches" / f"step_{step}"


def file_monitor_dir(run: Path) -> Path:
    return run / "monitors" / "file"


@dataclass(frozen=True)
class RunContext:
    """What every process of a run knows, set by the launcher in the environment.

    `attempt` is 1 for the first launch into the directory. `fingerprint` is None for runs started directly.
    """

    run_dir: Path
    run_id: str
    run_name: str
    attempt: int
    fingerprint: str | None
    config_dir: Path
    log_dir: Path

    @property
    def leave_file(self) -> Path:
        """Asks the trainer of this attempt, on whichever node, to save after the step in hand and leave."""
        return self.config_dir / "resolved" / "leave"

    @classmethod
    def from_env(cls, run_dir: Path | str) -> "RunContext":
        """Read the context; a process started by hand gets `attempt_1` of `run_dir` and an id made from its name."""
        run = Path(run_dir)
        configs = Path(os.environ.get(ATTEMPT_CONFIGS) or run / "configs" / "attempt_1")
        match = re.fullmatch(r"attempt_(\d+)", configs.name)
        return cls(
            run_dir=run,
            run_id=os.environ.get(RUN_ID) or run.name,
            run_name=os.environ.get(RUN_NAME) or run.name,
            attempt=int(match[1]) if match else 1,
            fingerprint=os.environ.get(FINGERPRINT) or None,
            config_dir=configs,
            log_dir=Path(os.environ.get(ATTEMPT_LOGS) or run / "logs" / configs.name),
        )
