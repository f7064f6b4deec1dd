"""Whether the nodes of a partition can see the project's folder, as far as that is plain from the submitting host."""

import functools
import os
import subprocess
from pathlib import Path

from rlmake.core import slurm

LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
LOCAL_TYPES = ("tmpfs", "ramfs", "overlay")


def unseen(project: Path, partition: str | None) -> str | None:
    """Why the nodes cannot see the folder; None where they may. In its job each node is asked."""
    if not foreign_nodes(partition):
        return None
    kind = _filesystem(project)
    if kind in LOCAL_TYPES or any(project.is_relative_to(folder) for folder in LOCAL):
        return f"{project} is on this host alone ({kind}); the nodes cannot see it: use a shared file system"
    return None


@functools.cache
def foreign_nodes(partition: str | None) -> bool:
    """Whether the partition (None: the default one) has nodes on other hosts than this one."""
    answer = slurm.ask("sinfo", "-h", "-N", "-o", "%P %n")
    rows = [line.split() for line in answer.stdout.splitlines()] if answer is not None else []
    wanted = set(partition.split(",")) if partition else None
    nodes = {node for name, node in rows if (name.rstrip("*") in wanted if wanted else "*" in name)}
    return bool(nodes - {os.uname().nodename, os.uname().nodename.partition(".")[0]})


def _filesystem(path: Path) -> str:
    """Type of the file system that holds `path`."""
    try:
        answer = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"
