"""The first thing of a process on a node of an allocation: `python -m rlmake.launch.node [--gpus 0,1] -- command …`.

srun gives a step all GPUs of its node; this leaves the process its own. SIGTERM is left to the launcher (SLURM sends it
to every process of a job that is taken away, see `supervise`), and so is SIGUSR1 until a trainer has its handler. The
launcher's mark is dropped: its pid means nothing here, SLURM ends the step with the job.
"""

import os
import signal
import sys

from rlmake.core import procs


def main(argv: list[str]) -> None:
    """Become the command."""
    separator = argv.index("--")
    options, command = argv[:separator], argv[separator + 1 :]
    env = {key: value for key, value in os.environ.items() if key != procs.LAUNCHER}
    if options:
        ids = [part for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        wanted = [int(index) for index in options[1].split(",") if index]
        if wanted and max(wanted) >= len(ids):
            sys.exit(f"error: {len(wanted)} GPUs are wanted here and SLURM gives {len(ids)}")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(ids[index] for index in wanted)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1:])
