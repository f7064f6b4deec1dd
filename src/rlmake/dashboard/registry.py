"""One dashboard per user for whatever is launched: which directories it shows, and whether it runs.

~/.cache/rlmake/dashboard/dirs.json      output directories that launches have registered
~/.cache/rlmake/dashboard/daemon.json    {pid, started, url} of the running one; daemon.log beside it
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmake.core.jsonio import write_json
from rlmake.core.procs import process

START_SECONDS = 30.0
MOST_DIRS = 200


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlmake" / "dashboard"


@contextmanager
def _locked() -> Iterator[None]:
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dirs() -> list[Path]:
    """The registered directories that are there, the newest last."""
    try:
        found = json.loads((folder() / "dirs.json").read_bytes())
    except (OSError, ValueError):
        return []
    return [Path(path) for path in found if isinstance(path, str) and Path(path).is_dir()]


def ensure(output_dir: Path) -> str | None:
    """Register a directory, start the user's dashboard if none runs, and give its address; None when it can't start."""
    with _locked():
        known = [path for path in map(str, dirs()) if path != str(output_dir.resolve())]
        write_json(folder() / "dirs.json", [*known[-MOST_DIRS:], str(output_dir.resolve())])
        if url := running():
            return url
        (folder() / "daemon.json").unlink(missing_ok=True)
        with open(folder() / "daemon.log", "ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "rlmake.dashboard.registry"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it outlives the launch
                cwd="/",
                env={key: value for key, value in os.environ.items() if not key.startswith(("RLMAKE_", "PRL_"))},
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if url := running():
                return url
            time.sleep(0.1)
    return None


def running() -> str | None:
    """The address of the user's dashboard if its process lives."""
    try:
        record = json.loads((folder() / "daemon.json").read_bytes())
        found = process(record["pid"])
        return record["url"] if found is not None and found.started == record["started"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note(url: str) -> None:
    """Said by the daemon once it listens."""
    own = process(os.getpid())
    write_json(folder() / "daemon.json", {"pid": os.getpid(), "started": own and own.started, "url": url})


def main() -> int:
    from rlmake.dashboard import server

    return server.main([], dirs=dirs, ready=note)


if __name__ == "__main__":
    sys.exit(main())
