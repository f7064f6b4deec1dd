"""`python -m rlmake.cli.job <stage> <fingerprint> [<step>]`, `… publish <link> <destination> …`: what rules call.

Making a link must cost next to nothing, so all that real work needs is imported for real work only.
"""

import signal
import sys
from pathlib import Path

from rlmake.build import publish
from rlmake.core.errors import entry_point


@entry_point
def main() -> int | None:
    """Do one job. Exit code 0 also where another process has done the work meanwhile."""
    stage, *arguments = sys.argv[1:]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "save and leave" is for a training, once it is one
    if stage == "publish":
        paths = [Path(publish.decode(text)) for text in arguments]
        for link, to in zip(paths[::2], paths[1::2], strict=True):
            publish.publish(link, to)
        from rlmake.build import card

        if (artefact := card.locate(paths[-1])) is not None:
            card.publish(artefact)
    else:
        from rlmake.cli.stages import STAGES
        from rlmake.core import log
        from rlmake.launch.requeue import continued

        log.setup("build")
        with continued():
            STAGES[stage](*arguments)
    return 0


if __name__ == "__main__":
    main()
