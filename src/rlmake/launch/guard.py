"""The guard: a small process beside the launcher that ends everything the launcher started once it is gone.

Children end by themselves when the launcher dies (`procs.die_with_parent`); the guard is for those that can't: a
process that hangs in foreign code, or a grandchild that isn't ours. It notices by the end of its standard input, a pipe
of which the launcher holds the only other end. In the end it removes the folder of their temporary files, since what is
killed leaves its own (sockets, most of them). Run as `python -m rlmake.launch.guard <launcher's mark> <folder>`.
"""

import os
import shutil
import signal
import subprocess
import sys

from rlmake.core import procs

GRACE_S = 5.0  # for children to end on their own; nothing is to be left after 10 s


def start(scratch: str) -> subprocess.Popen:
    """Start the guard of this process and of its folder of temporary files. Close its `stdin` when all is ended: it
    looks once more and leaves."""
    mark = procs.launcher_mark()[procs.LAUNCHER]
    command = [sys.executable, "-m", "rlmake.launch.guard", mark, scratch]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark, scratch = sys.argv[1:]
    while os.read(0, 1):
        pass
    grace = GRACE_S
    while left := procs.find(procs.LAUNCHER, lambda value: value == mark):
        procs.terminate(left, grace)
        grace = 0.5  # what is there now was started meanwhile
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
