"""The build's own verbs, `rlmake <verb> …`: a function of the verb's name each, in the module that is said here.

A module is imported when its verb is asked for: a plan does not pay for charts.
"""

import importlib
from collections.abc import Callable

HOME = {
    "plan": "rlmake.cli.rlmake",
    "why": "rlmake.cli.rlmake",
    "ls": "rlmake.cli.rlmake",
    "verify": "rlmake.cli.rlmake",
    "tail": "rlmake.cli.tail",
    "inspect-data": "rlmake.cli.inspect",
    "card": "rlmake.cli.lookup",
    "diff": "rlmake.cli.lookup",
    "new": "rlmake.cli.scaffold",
    "accept": "rlmake.cli.housekeeping",
    "adopt": "rlmake.cli.housekeeping",
    "gc": "rlmake.cli.housekeeping",
    "pin": "rlmake.cli.housekeeping",
    "unpin": "rlmake.cli.housekeeping",
    "report": "rlmake.cli.housekeeping",
    "export": "rlmake.export.cli",
    "summary": "rlmake.report.summary",
    "overview": "rlmake.report.overview",
}


def load(name: str) -> Callable[[list[str]], int]:
    """A verb: takes its arguments and returns an exit code."""
    return getattr(importlib.import_module(HOME[name]), name.replace("-", "_"))
