"""Real little processes for the supervision tests: `python stubs.py <role> …`."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlmake.core import procs


def serve() -> None:
    """Ends on SIGTERM, as a server does."""
    print("serving", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)


def litter() -> None:
    """Leaves a temporary file behind when it is killed, and says where it was."""
    print(tempfile.mkdtemp(), os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
    stubborn()


def stubborn() -> None:
    """Ignores SIGTERM, and is no process of ours that would end with its launcher."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("stubborn", flush=True)
    time.sleep(600)


def family() -> None:
    """A server with a worker in a session of its own that ignores SIGTERM."""
    subprocess.Popen([sys.executable, __file__, "stubborn"], start_new_session=True)
    serve()


def fail() -> None:
    print("first line\n\nValueError: the reason", file=sys.stderr)
    sys.exit(int(sys.argv[2]))


def finish() -> None:
    time.sleep(float(sys.argv[2]))


def rank() -> None:
    """A trainer's rank: SIGUSR1 means save and leave with 75. Slow to import and slow to shut down, as they are."""
    procs.die_with_parent()
    Path(sys.argv[2], f"started{os.environ['RANK']}").touch()
    time.sleep(1.0)
    atexit.register(lambda: (signal.signal(signal.SIGUSR1, signal.SIG_DFL), time.sleep(1.5)))
    left = []
    signal.signal(signal.SIGUSR1, lambda *_: left.append(1))
    while not left:
        time.sleep(0.05)
    print("saved", flush=True)
    sys.exit(75)


def launcher() -> None:
    """A launcher with the children named on its command line: `launcher <log folder> <role> …`; prints when all run."""
    from rlmake.launch.supervise import Supervisor

    logs = Path(sys.argv[2])
    env = {**os.environ, "PRL_ATTEMPT_LOG_DIR": str(logs)}
    with Supervisor(grace=1.0) as supervisor:
        for i, role in enumerate(sys.argv[3:]):
            supervisor.start(f"{role}{i}", [sys.executable, __file__, role], env, logs / f"{role}{i}.log", final=i == 0)
        supervisor.wait_until(lambda: all(c.log.stat().st_size for c in supervisor.children), 30, "stubs")
        print("up", flush=True)
        supervisor.wait()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
