"""torchrun, as the launcher starts it: `python -m rlmake.launch.elastic <torchrun's arguments>`.

It is torch's own agent. What is added: it ends with the launcher, its exit code is that of the rank that failed first
(torchrun's own is always 1, but 75 and 76 mean something), and its last line names that rank, above it the rank's last
lines unless they are shown anyway.
"""

import signal
import sys
from pathlib import Path

from rlmake.core.procs import die_with_parent, leave

LINES = 15


def main() -> int:
    """The exit code."""
    die_with_parent()
    # inherited by the ranks: they and we ignore "save and leave" until a trainer has set its handler
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        _end_ranks_by(signal.SIGHUP)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in (75, 76):
            if failure.local_rank not in _shown(sys.argv[1:]):
                print("\n".join(_last_lines(sys.argv[1:], failure.local_rank)), file=sys.stderr)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            print(f"rank {rank} {how}", file=sys.stderr)
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval.value
    return 0


def _end_ranks_by(number: signal.Signals) -> None:
    """In a SLURM job nobody below the launcher hears SIGTERM, by which the agent ends the other ranks of a failed one
    (and waits 30 s): have it use another one."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    shutdown = LocalElasticAgent._shutdown
    LocalElasticAgent._shutdown = lambda self, death_sig=number, timeout=30: shutdown(  # type: ignore[method-assign]
        self, number if death_sig == signal.SIGTERM else death_sig, timeout
    )


def _shown(arguments: list[str]) -> list[int]:
    """Local ranks whose output is ours already."""
    return [int(rank) for rank in arguments[arguments.index("--local-ranks-filter") + 1].split(",")]


def _last_lines(arguments: list[str], local_rank: int) -> list[str]:
    """The end of a rank's standard error, which torchrun keeps below its --log-dir."""
    folder = Path(arguments[arguments.index("--log-dir") + 1])
    for log in folder.glob(f"*/attempt_*/{local_rank}/stderr.log"):
        return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LINES:]
    return []


if __name__ == "__main__":
    leave(main())
