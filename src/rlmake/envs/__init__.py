"""Environments: the tasksets and harnesses that ship, the process that serves one environment, and its client.

The orchestrator and the evaluations talk to environments through `client.EnvHandle` alone. One `server` process per
source runs the episodes with verifiers; nothing here knows of training. `data` makes data sets for tasksets and SFT.
"""

from rlmake.envs.startup import light_imports

light_imports()  # before the first import of verifiers, wherever in this package it happens
