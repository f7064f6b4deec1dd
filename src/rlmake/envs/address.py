"""How an env server says where it listens, and how its client makes sure that it is the right one.

The server binds a port that the system chose and keeps it until it ends. Its address file names run, process and
port; the process is identified by pid and start time. So an address that another run left, or whose port has gone to
a stranger since, is told apart without asking whoever listens there.
"""

import os
from pathlib import Path
from typing import Any

from rlmake.core import jsonio, procs
from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext

SCHEMA = 1


def address_file(ctx: RunContext, split: str, name: str) -> Path:
    """Where the env server of a source publishes its address; `split` is "train" or "eval"."""
    return ctx.config_dir / "resolved" / "envs" / split / f"{name}.address"


def publish(path: Path, address: str, ctx: RunContext, name: str) -> None:
    """Write the address file of this process, atomically."""
    own = procs.process(os.getpid())
    jsonio.write_json(
        path,
        {
            "schema": SCHEMA,
            "run_id": ctx.run_id,
            "attempt": ctx.attempt,
            "name": name,
            "address": address,
            "pid": own.pid,
            "pid_start": own.started,
        },
    )


def read(path: Path, run_id: str | None) -> str | None:
    """The address in the file; None while there is none, or its server has ended. `run_id` None: that of any run.

    Raises `UserError` when the file belongs to another run or is of an unknown form.
    """
    if not path.exists():
        return None
    record: dict[str, Any] = jsonio.read_json(path)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not an env server's address of schema {SCHEMA}")
    if run_id not in (None, record["run_id"]):
        raise UserError(f"{path}: the env server there belongs to run {record['run_id']!r}, not to {run_id!r}")
    if not procs.Process(record["pid"], record["pid_start"]).alive():
        return None
    return record["address"]
