"""A launcher with stub processes as a job: `python slurm_stub.py launcher <folder>`, which notes in `<folder>/said`.

The trainer's stand-in is an agent with a rank below it that saves and leaves (75) half a second after SIGUSR1; the
server's would die of a SIGTERM that it hears.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(folder: Path, text: str) -> None:
    with open(folder / "said", "a") as file:
        print(text, file=file)


def rank(folder: Path) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    say(folder, "rank up")
    while not asked:
        time.sleep(0.05)
    time.sleep(0.5)
    say(folder, "saved")
    sys.exit(75)


def agent(folder: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "stub"}
    sys.exit(subprocess.run([sys.executable, __file__, "rank", str(folder)], env=env, check=False).returncode)


def server(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (say(folder, "server heard SIGTERM"), sys.exit(1)))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        say(folder, "server told to stop")


def launcher(folder: Path) -> None:
    from rlmake.launch.supervise import RunStopped, Supervisor

    try:
        with Supervisor() as supervisor:
            for name, final in (("server", False), ("agent", True)):
                command = [sys.executable, __file__, name, str(folder)]
                supervisor.start(name, command, dict(os.environ), folder / f"{name}.log", final=final)
            supervisor.wait()
    except RunStopped as stopped:
        say(folder, f"stopped {stopped.exit_code} early={stopped.early}")
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
